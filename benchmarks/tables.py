"""Results as tables of text: the same cells for the terminal and for the document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table as Grid

from benchmarks.results import Report, Row, Table, Verdict

MEGABYTE = 10**6
HEADERS = {
    "durable_seconds": "until durable, s",
    "cpu_seconds": "CPU, s",
    "peak_bytes": "extra memory, MB",
    "state_bytes": "state, MB",
    "disk_written_bytes": "disk writes, MB",
    "disk_read_bytes": "disk reads, MB",
    "read_call_bytes": "read, MB",
    "step_seconds": "step alone, s",
    "step_ratio": "step / alone",
    "worst_step_ratio": "worst step / alone",
    "worst_alone_ratio": "worst step alone",
    "errors": "without an answer",
    "asked_again": "asked again",
}
GOAL_HEADERS = ("goal", "at", "at most", "median", "min", "")


def number(value: float) -> str:
    """Three digits or so, whatever the size."""
    if value == 0:
        return "0"
    return next(
        f"{value:.{digits}f}" for least, digits in ((100, 0), (1, 2), (0.01, 4), (0, 6)) if abs(value) >= least
    )


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """The headers, and one line for each contender; columns in which nothing happened are left out."""
    keys = [key for key in HEADERS if any(any(row.samples.get(key, ())) for row in table.rows)]
    timed = any("seconds" in row.samples for row in table.rows)
    reference = next((row for row in table.rows if row.name == table.reference and "seconds" in row.samples), None)
    headers = ["contender"]
    if timed:
        headers += ["median, s", "min, s"]
    if reference:
        headers.append("x")
    headers += [HEADERS[key] for key in keys]
    return headers, [_line(row, reference, timed, keys, len(headers)) for row in table.rows]


def _line(row: Row, reference: Row | None, timed: bool, keys: Sequence[str], width: int) -> list[str]:
    if row.missing:
        return [row.name, row.missing, *[""] * (width - 2)]
    line = [row.name]
    if timed:
        line += [number(row.median("seconds")), number(row.best("seconds"))]
    if reference:
        line.append(f"{row.median('seconds') / reference.median('seconds'):.2f}")
    for key in keys:
        scale = MEGABYTE if key.endswith("_bytes") else 1
        # A peak is a peak: of those the highest counts.
        value = (max(row.samples[key]) if key == "peak_bytes" else row.median(key)) if key in row.samples else None
        line.append("" if value is None else number(value / scale))
    return line


def goal_cells(verdict: Verdict) -> list[str]:
    """One line of the table of goals."""
    at = verdict.at
    if verdict.held is None or verdict.value is None:
        return [verdict.text, at, _with_unit(verdict.limit, verdict.unit), "", "", "not measured"]
    if verdict.measured_at != at:
        at = f"{at} (measured at {verdict.measured_at})" if at else verdict.measured_at
    best = number(verdict.best) if verdict.best is not None else ""
    limit = _with_unit(verdict.limit, verdict.unit)
    return [verdict.text, at, limit, number(verdict.value), best, "pass" if verdict.held else "miss"]


def _with_unit(value: float, unit: str) -> str:
    return f"{value:g} {unit}".strip()


def grid(table: Table) -> Grid:
    """For the terminal."""
    headers, lines = cells(table)
    made = Grid(title=table.title, title_justify="left", caption=table.note or None, caption_justify="left")
    for number_, header in enumerate(headers):
        made.add_column(header, justify="left" if number_ == 0 else "right")
    for line in lines:
        made.add_row(*line)
    return made


def goal_grid(report: Report) -> Grid:
    """All goals for the terminal."""
    made = Grid(title=f"Goals ({report.mode})", title_justify="left")
    for header in GOAL_HEADERS:
        made.add_column(header, justify="right" if header in ("at most", "median", "min") else "left")
    colours = {"pass": "green", "miss": "red", "not measured": "yellow"}
    for verdict in report.verdicts():
        *line, word = goal_cells(verdict)
        made.add_row(*line, f"[{colours[word]}]{word}[/]")
    return made
