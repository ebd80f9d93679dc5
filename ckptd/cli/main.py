"""The command line: `ckptd init`, `doctor`, `serve`; to look, `runs`, `ls`, `show`, `latest`, `why`, `fsck`; to
decide, `quarantine`, `reinstate`, `rollback`, `pin`, `unpin`, `close`, `reopen`; to keep order, `verify`, `retain`,
`gc`.

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
from ckptd.cli import deciding, keeping, looking
from ckptd.cli.doctor import doctor
from ckptd.cli.options import AsJson, exit_code
from ckptd.cli.tables import clean
from ckptd.errors import CkptdError, Invalid
from ckptd.storage import init_root, open_storage
from ckptd.storage.root import refill_reserve

app = typer.Typer(
    name="ckptd",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run() -> None:
    """The entry point: an error of ours is one message and an exit code; a traceback is a fault in ckptd."""
    try:
        app()
    except CkptdError as error:
        typer.echo("error: " + "\n".join(map(clean, str(error).splitlines())), err=True)
        sys.exit(exit_code(error))


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
    refill_reserve(open_storage(url))
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


for command in (
    *(looking.runs, looking.ls, looking.show, looking.latest, looking.why, looking.fsck),
    *(deciding.quarantine, deciding.reinstate, deciding.rollback, deciding.pin, deciding.unpin),
    *(deciding.close, deciding.reopen),
    *(keeping.verify, keeping.retain, keeping.gc),
):
    app.command()(command)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"token file {path}: {error}", field="token-file") from error


if __name__ == "__main__":
    run()
