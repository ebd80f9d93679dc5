"""The figures of one run in docs/BENCHMARKS.md: everything between two marks is written by the command alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.bars import svg
from benchmarks.results import Report, Table
from benchmarks.tables import GOAL_HEADERS, cells, goal_cells

DOCUMENT = Path(__file__).parents[1] / "docs" / "BENCHMARKS.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
PICTURES = {
    "Durable save, ": "bench-save.svg",
    "Async save, ": "bench-stall.svg",
    "Load into the live state, warm, ": "bench-load-warm.svg",
    "Load into the live state, cold, ": "bench-load-cold.svg",
}


def write_figures(report: Report, document: Path = DOCUMENT) -> None:
    """Put the report between the marks, and its pictures beside the document. ValueError if a mark is not there."""
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no section between {BEGIN} and {END}")
    pictures = {name: table for start, name in PICTURES.items() if (table := _chosen(report, start)) is not None}
    for name, table in pictures.items():
        (document.parent / name).write_text(svg(table))
    document.write_text(f"{before}{BEGIN}\n\n{_section(report, pictures)}\n{END}{after}")


def _chosen(report: Report, start: str) -> Table | None:
    """The table of 1 GB, else the last one."""
    found = [table for table in report.tables if table.title.startswith(start)]
    exact = [table for table in found if table.title == f"{start}1 GB"]
    return next(reversed(exact or found), None)


def _section(report: Report, pictures: dict[str, Table]) -> str:
    machine = ", ".join(f"{name}: {value}" for name, value in report.machine.items())
    verdicts = report.verdicts()
    held = sum(verdict.held is True for verdict in verdicts)
    missed = sum(verdict.held is False for verdict in verdicts)
    blocks = [
        f"Measured {report.started}, `python -m benchmarks --{report.mode}`, {report.seconds:.0f} s. {machine}.",
        f"Of {len(verdicts)} goals {held} are reached, {missed} missed, "
        f"{len(verdicts) - held - missed} not measured in this run.",
        _markdown(GOAL_HEADERS, [goal_cells(verdict) for verdict in verdicts]),
    ]
    blocks += [f"Failed: {problem}" for problem in report.problems]
    blocks += [f"![{table.title}]({name})" for name, table in pictures.items()]
    for table in report.tables:
        headers, lines = cells(table)
        blocks.append(f"### {table.title}")
        blocks.append(_markdown(headers, lines))
        if table.note:
            blocks.append(table.note)
    return "\n\n".join(blocks) + "\n"


def _markdown(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [headers, ["---"] + ["---:"] * (len(headers) - 1), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
