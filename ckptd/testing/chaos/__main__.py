"""The command line of `make chaos`."""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ckptd.testing.chaos.run import STRIKES, Settings, chaos


class StorageKind(StrEnum):
    file = "file"
    s3 = "s3"


def main(
    seed: Annotated[int | None, typer.Option(help="By default a new one.")] = None,
    faults: Annotated[int, typer.Option(min=1, max=10_000)] = 200,
    storage: Annotated[
        StorageKind, typer.Option(help="A folder on a mount of its own, or SeaweedFS.")
    ] = StorageKind.file,
    minutes: Annotated[float, typer.Option(min=0.0, help="Strike no more after so long.")] = 0.0,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind of faults; may be repeated.")] = None,
    apart: Annotated[
        bool, typer.Option(help="Each node in a network namespace, and cuts between them; on file.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for logs and the report; a new one by default.")] = None,
) -> None:
    """A torchrun job of four ranks on two agents, under a seeded plan of real faults."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended and unmounted
    unknown = sorted(set(kind or []) - STRIKES.keys())
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of: {', '.join(STRIKES)}")
    seed = secrets.randbelow(10**6) if seed is None else seed
    folder = output or Path(tempfile.mkdtemp(prefix="ckptd-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    typer.echo(f"seed {seed}; everything of this run lies in {folder}")
    settings = Settings(seed, faults, storage.value, folder.resolve(), tuple(kind or ()), minutes, apart)
    report = chaos(settings, typer.echo)
    Console().print(report.table())
    typer.echo("\n".join([*report.lines(), f"report: {folder}/report.json"]))
    raise typer.Exit(0 if report.held else 1)


if __name__ == "__main__":
    typer.run(main)
