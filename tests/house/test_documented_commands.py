"""What the documents tell people to type, and to import, exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

import ckptd_client
from ckptd.cli.main import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}


def _code(text: str) -> list[str]:
    """What stands in backticks, in fences, or indented by four: what people copy. Comments are left out."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`([^`]+)`", rest) + re.findall(r"^    (.+)$", rest, re.MULTILINE)
    return [line.partition("#")[0].strip() for block in [*fenced, *found] for line in block.splitlines()]


def _used(program: str) -> list[tuple[str, str]]:
    """The words after `program` at the start of a line of code, and the document they are in."""
    start = re.compile(rf"(?:[A-Z_]+=\S+ )*{program} ([a-z][a-z-]*)\b(?!=)")
    return sorted({(m[1], name) for name, text in TEXT.items() for line in _code(text) if (m := start.match(line))})


@pytest.mark.parametrize(("command", "document"), _used("ckptd"))
def test_a_documented_command_exists(command: str, document: str) -> None:
    commands = typer.main.get_command(app)
    assert command in getattr(commands, "commands", {}), f"{document} tells to type `ckptd {command}`"


@pytest.mark.parametrize(("target", "document"), _used("make"))
def test_a_documented_target_exists(target: str, document: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target in targets, f"{document} tells to type `make {target}`"


def test_every_command_is_documented() -> None:
    commands = getattr(typer.main.get_command(app), "commands", {})
    assert set(commands) <= {command for command, _ in _used("ckptd")}


@pytest.mark.parametrize("name", ckptd_client.__all__)
def test_an_exported_name_can_be_imported(name: str) -> None:
    assert getattr(ckptd_client, name) is not None


@pytest.mark.parametrize("document", TEXT)
def test_a_link_inside_the_repository_leads_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", TEXT[document])
    gone = [link for link in links if not (folder / link).exists()]
    assert not gone, f"{document} links to {gone}"


@pytest.mark.parametrize("document", TEXT)
def test_a_file_that_is_named_exists(document: str) -> None:
    """Paths of our own in backticks, such as `ckptd/history.py`."""
    named = re.findall(r"`((?:ckptd|client|trainer|tests|docs)/[\w./-]+\.(?:py|md))`", TEXT[document])
    gone = [path for path in named if not (ROOT / path).exists()]
    assert not gone, f"{document} names {gone}"
