"""Each numbered rule of the protocol has a test named after it, and each such test names a rule that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = re.findall(r"^- \*\*([A-Z]\d+)\*\*", (ROOT / "docs" / "PROTOCOL.md").read_text(), re.MULTILINE)
INVARIANTS = [f"I{number}" for number in range(1, 23)]
NAMED = re.compile(r"test_([A-Z]\d+)_(?:and_([A-Z]\d+)_)?")
# The contract that storages are tested with is shipped, so its tests lie outside of tests/.
SOURCES = [*sorted((ROOT / "tests").rglob("*.py")), ROOT / "ckptd" / "testing" / "storage_contract.py"]


def _named_tests() -> Iterator[tuple[str, str]]:
    """Each rule or invariant in the name of a test, and where that test is."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := NAMED.match(node.name)):
                for rule in filter(None, match.groups()):
                    yield rule, f"{path.relative_to(ROOT)}: {node.name}"


TESTS = list(_named_tests())


def test_the_protocol_has_numbered_rules() -> None:
    assert len(RULES) > 50
    assert len(set(RULES)) == len(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_a_test(rule: str) -> None:
    assert any(rule == named for named, _ in TESTS), f"no test is named test_{rule}_..."


def test_a_test_names_a_rule_that_exists() -> None:
    strange = [where for named, where in TESTS if named not in [*RULES, *INVARIANTS]]
    assert not strange, strange


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_an_invariant_is_checked_after_every_step(invariant: str) -> None:
    """The table in `test_invariants` says where."""
    table = (ROOT / "tests" / "protocol" / "test_invariants.py").read_text()
    assert re.search(rf"^\|[^|]*\b{invariant}\b[^|]*\|", table, re.MULTILINE), (
        f"{invariant} is in no row of the table"
    )
