"""The tests that the documents name as proof exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("GUARANTEES.md", "FAULTS.md", "TESTING.md", "PROTOCOL.md", "STORAGE.md", "RESUME.md", "CONTAINERS.md")
TESTS = {
    name
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "ckptd" / "testing").rglob("*.py")]
    for name in re.findall(r"def (test_\w+)", path.read_text())
}


@pytest.mark.parametrize("page", PAGES)
def test_a_test_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for name, dots in re.findall(r"`(test_\w+?)(_?\.\.\.)?`", text):
        if name == "test_Xn":
            continue  # the form of such names
        found = any(test.startswith(name) for test in TESTS) if dots else name in TESTS
        assert found, f"{page} names {name}, which is no test"


@pytest.mark.parametrize("page", PAGES)
def test_a_path_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for path in re.findall(r"`((?:tests|ckptd|client|trainer|docs|scripts)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), f"{page} names {path}, which does not exist"


def test_every_guarantee_names_a_test() -> None:
    rows = [
        line for line in (ROOT / "docs" / "GUARANTEES.md").read_text().splitlines() if re.match(r"\| [A-Z]", line)
    ]
    assert len(rows) > 10
    assert all("`test_" in row for row in rows)
