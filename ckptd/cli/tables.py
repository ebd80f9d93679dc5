"""Printing: a table on a terminal, tab-separated lines on a pipe. Both with a header line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def on_terminal() -> bool:
    return sys.stdout.isatty()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Numbers are right-aligned on a terminal; None is printed as '-'."""
    lines = [[clean("-" if cell is None else cell) for cell in row] for row in rows]
    if not on_terminal():
        for line in ([*columns], *lines):
            typer.echo("\t".join(line))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)


def size(count: int) -> str:
    """Bytes, for a person on a terminal and exactly on a pipe."""
    if not on_terminal():
        return str(count)
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def clean(value: object) -> str:
    """Text without control characters: names and metrics come from whoever wrote them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def warn(message: str) -> None:
    """One line on standard error."""
    typer.echo(f"warning: {clean(message)}", err=True)
