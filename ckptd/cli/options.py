"""What the commands have in common: options, exit codes, who somebody is, and how far something is."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ckptd.cli.tables import clean
from ckptd.errors import CkptdError, Conflict, Corrupt, Fenced, Invalid, NotFound, Unauthorized, Unavailable, Unfit
from ckptd.watched import Watch, unwatched

DAMAGED = 6
EXIT_CODES: dict[type[CkptdError], int] = {
    Unfit: 8,  # before Invalid, of which it is one
    Invalid: 2,
    NotFound: 3,
    Unavailable: 4,
    Conflict: 5,
    Fenced: 5,
    Corrupt: DAMAGED,
    Unauthorized: 7,
}

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar=["CKPTD_URL", "CKPTD_STORAGE"], help="A service (http://...) or a storage (file:///...)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[str, typer.Argument(help="Name of the run.")]
Step = Annotated[int, typer.Argument(help="Step of the checkpoint.")]
Save = Annotated[
    str | None,
    typer.Option(
        "--save", help="Which one, if the step has several. By default the one on the line, else the newest."
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Why, for those who read it later.")]
Who = Annotated[str | None, typer.Option("--who", help="Who decides it [default: you, on this machine].")]


def exit_code(error: CkptdError) -> int:
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def whoever(who: str | None) -> str:
    """`who`, or the user of this process and this machine."""
    if who:
        return who
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        user = f"uid {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


@contextmanager
def progress(what: str, total_bytes: int, *, quiet: bool = False) -> Iterator[Watch]:
    """A bar on standard error while bytes are read, for a person who waits there; else nothing."""
    if quiet or not sys.stderr.isatty():
        yield unwatched
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(clean(what), total=total_bytes)
        yield lambda count: bar.advance(task, count)
