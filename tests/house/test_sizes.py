"""Modules and functions stay small enough to be read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 320
MAX_FUNCTION_LINES = 75
MODULES = [
    path
    for package in ("ckptd", "client/ckptd_client", "trainer/ckptd_trainer")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_measure() -> None:
    assert len(MODULES) > 50


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_MODULE_LINES, f"{_name(path)} has {lines} lines: give one of its ideas a module of its own"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_function_is_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{_name(path)}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", [path for path in MODULES if path.read_text().strip()], ids=_name)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{_name(path)} has no docstring"
