"""The command line: `ckptd init`, `doctor`, `serve`, `runs`, `ls`, `show`, `latest`.

Exit codes: 0 done, 2 invalid call, 3 not found, 4 unavailable or not initialised, 5 conflict, fenced or in use,
6 damaged, 7 unauthorized, 8 unfit storage, 1 anything else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ckptd import __version__
from ckptd.cli import views
from ckptd.cli.doctor import doctor
from ckptd.cli.source import Source, open_source
from ckptd.cli.tables import clean, warn
from ckptd.errors import CkptdError, Conflict, Corrupt, Fenced, Invalid, NotFound, Unauthorized, Unavailable, Unfit
from ckptd.storage import init_root
from ckptd.wire import CheckpointInfo

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

app = typer.Typer(
    name="ckptd",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar=["CKPTD_URL", "CKPTD_STORAGE"], help="A service (http://...) or a storage (file:///...)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[str, typer.Argument(help="Name of the run.")]


def run() -> None:
    """The entry point: an error of ours is one message and an exit code; a traceback is a fault in ckptd."""
    try:
        app()
    except CkptdError as error:
        typer.echo("error: " + "\n".join(map(clean, str(error).splitlines())), err=True)
        sys.exit(exit_code(error))


def exit_code(error: CkptdError) -> int:
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ckptd {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Fault-tolerant checkpoints for distributed training: the service, and looking around."""


@app.command()
def init(
    url: Annotated[str, typer.Argument(help="Storage URL, such as file:///mnt/shared/ckpts.")],
    as_json: AsJson = False,
) -> None:
    """Make a storage root ready, once. On one that is ready it changes nothing."""
    uuid = init_root(url)
    if as_json:
        typer.echo(json.dumps({"url": url, "uuid": uuid}))
    else:
        typer.echo(f"{clean(url)} is ready: storage {uuid}")


app.command()(doctor)


@app.command()
def serve(
    storage: Annotated[
        str | None, typer.Option(envvar="CKPTD_STORAGE", help="Storage URL, such as file:///mnt/shared/ckpts.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, 0 for a free one [default: 8440].")] = None,
    init_storage: Annotated[bool, typer.Option("--init", help="Initialise the storage first, if it is new.")] = False,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must send; or set CKPTD_TOKEN.")
    ] = None,
) -> None:
    """Run the service until SIGTERM. Needs the `service` extra. More settings by environment: see ServiceSettings."""
    try:
        from ckptd.service import server, settings
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in (
            "fastapi",
            "starlette",
            "uvicorn",
            "pydantic_settings",
        ):
            raise
        raise Invalid(
            f"`ckptd serve` needs {error.name}, which is not installed",
            do="Install the service extra: pip install 'ckptd[service]'.",
        ) from error
    token = _read_token(token_file) if token_file is not None else None
    chosen = settings.load(storage=storage, host=host, port=port, token=token)
    if init_storage:
        init_root(chosen.storage)
    server.log_to_stderr()
    server.serve(chosen, lambda url: typer.echo(f"ckptd serves {clean(chosen.storage)} at {url}"))


@app.command()
def runs(url: Url = None, as_json: AsJson = False) -> None:
    """List the runs."""
    found = open_source(url).runs()
    views.print_json(found) if as_json else views.print_runs(found)
    damaged = [info for info in found if info.problem]
    for info in damaged:
        warn(f"run {info.run}: {info.problem}")
    if damaged:
        raise typer.Exit(DAMAGED)


@app.command()
def ls(run: Run, url: Url = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run."""
    found, damage = _checkpoints(open_source(url), run)
    views.print_json(found) if as_json else views.print_checkpoints(found)
    _end(damage)


@app.command()
def show(
    run: Run,
    step: Annotated[int, typer.Argument(help="Step of the checkpoint.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint: its manifest with parts, objects, sizes and digests, its metrics and its lineage."""
    source = open_source(url)
    found, damage = _checkpoints(source, run)
    if damage is None:
        info = source.checkpoint_at(run, step)
        manifest = source.manifest(run, step)
    else:
        of_step = [c for c in found if c.step == step]
        if not of_step:
            raise damage
        info, manifest = of_step[-1], None
    lineage = views.lineage(found, info)
    if as_json:
        views.print_json({"checkpoint": info, "lineage": lineage, "manifest": manifest})
    else:
        views.print_checkpoint(info, manifest, lineage)
    _end(damage)


@app.command()
def latest(run: Run, url: Url = None, as_json: AsJson = False) -> None:
    """Say where a start would resume now, and why: each candidate with its reason."""
    answer = open_source(url).latest(run)
    views.print_json(answer) if as_json else views.print_latest(answer)
    if answer.answer == "corrupt":
        warn(f"run {run} has checkpoints and none of its line is valid; it will not start from zero")
        raise typer.Exit(DAMAGED)


def _checkpoints(source: Source, run: str) -> tuple[list[CheckpointInfo], Corrupt | None]:
    """All checkpoints; of a damaged log those before the damage, and the error."""
    try:
        return source.checkpoints(run), None
    except Corrupt as error:
        readable = error.fields.get("readable")
        if readable is None:
            raise
        return [CheckpointInfo.model_validate_json(json.dumps(info)) for info in readable], error


def _end(damage: Corrupt | None) -> None:
    if damage is not None:
        warn(f"this is what can be read: {damage.message}. {damage.do}")
        raise typer.Exit(DAMAGED)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"token file {path}: {error}", field="token-file") from error


if __name__ == "__main__":
    run()
