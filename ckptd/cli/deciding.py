"""Commands by which people decide about a checkpoint: `ckptd quarantine`, `reinstate`, `rollback`, `pin`, `unpin`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from pydantic import ValidationError

from ckptd import layout
from ckptd.cli import views
from ckptd.cli.options import AsJson, Reason, Run, Save, Step, Url, Who, whoever
from ckptd.cli.source import Source, open_source
from ckptd.cli.tables import clean, warn
from ckptd.errors import Invalid
from ckptd.wire import ActRequest, CheckpointInfo, Verb


def quarantine(
    run: Run,
    step: Step,
    reason: Reason,
    save: Save = None,
    who: Who = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Give a checkpoint up: no start resumes from it. Nothing is deleted; `ckptd reinstate` takes it back."""
    _act(open_source(url), run, step, "quarantine", save, who, reason, as_json)


def reinstate(
    run: Run,
    step: Step,
    reason: Reason,
    save: Save = None,
    who: Who = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Take a quarantine back, whoever declared it."""
    _act(open_source(url), run, step, "reinstate", save, who, reason, as_json)


def rollback(
    run: Run,
    step: Step,
    reason: Reason,
    save: Save = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    who: Who = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Go back to a checkpoint. The running job is fenced, and its restart resumes from there."""
    source = open_source(url)
    if not yes and sys.stdin.isatty():
        typer.echo(
            f"Run {clean(run)} goes back to step {step}. A job that is running is fenced: what it saves from now on"
            f" does not count, and its restart resumes from step {step}. Younger checkpoints stay, off the line.",
            err=True,
        )
        typer.confirm("Roll back?", abort=True, err=True)
    _act(source, run, step, "rollback", save, who, reason, as_json)


def pin(run: Run, step: Step, save: Save = None, who: Who = None, url: Url = None, as_json: AsJson = False) -> None:
    """Keep a checkpoint until it is unpinned, whatever retention says."""
    _act(open_source(url), run, step, "pin", save, who, "", as_json)


def unpin(run: Run, step: Step, save: Save = None, who: Who = None, url: Url = None, as_json: AsJson = False) -> None:
    """Take a pin back: yours, or that of --who."""
    _act(open_source(url), run, step, "unpin", save, who, "", as_json)


def _act(
    source: Source, run: str, step: int, verb: Verb, save: str | None, who: str | None, reason: str, as_json: bool
) -> None:
    by = whoever(who)
    try:
        request = ActRequest(who=by, reason=reason, save=save and layout.check_save(save))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = str(first["loc"][0])
        raise Invalid(f"--{field}: {first['msg']}", field=field) from error
    info = source.act(run, step, verb, request)
    if as_json:
        views.print_json(info)
    else:
        typer.echo(clean(f"step {info.step} ({info.save}) {_said(verb, info, by)}"))
    others = [c.save for c in source.checkpoints(run) if c.step == step and c.save != info.save]
    if others and save is None:
        warn(f"step {step} has several checkpoints; this was about {info.save}. Others: {', '.join(others[:20])}")


def _said(verb: Verb, info: CheckpointInfo, by: str) -> str:
    if verb == "rollback":
        return "is what the run goes on from; a job that was running is fenced, and its restart resumes there"
    if verb in ("quarantine", "reinstate"):
        return "is in quarantine" if info.status == "quarantined" else "is not in quarantine"
    pins = f"; pinned by {', '.join(info.pinned_by)}" if info.pinned_by else ""
    return f"is {'' if by in info.pinned_by else 'not '}pinned by {by}{pins}"
