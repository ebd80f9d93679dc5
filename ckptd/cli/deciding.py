"""Commands by which people decide: about a checkpoint, `ckptd quarantine`, `reinstate`, `rollback`, `pin`, `unpin`;
about a run, `close` and `reopen`."""

from __future__ import annotations

import sys
from typing import Annotated, TypeVar

import typer
from pydantic import ValidationError

from ckptd import layout
from ckptd.cli import views
from ckptd.cli.options import AsJson, Reason, Run, Save, Step, Url, Who, whoever
from ckptd.cli.source import Source, open_source
from ckptd.cli.tables import clean, warn
from ckptd.errors import Invalid
from ckptd.wire import ActOnRun, ActRequest, CheckpointInfo, RunVerb, Verb

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Q = TypeVar("Q", bound=ActOnRun)


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
    yes: Yes = False,
    who: Who = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Go back to a checkpoint. The running job is fenced, and its restart resumes from there."""
    source = open_source(url)
    _ask(
        yes,
        f"Run {clean(run)} goes back to step {step}. A job that is running is fenced: what it saves from now on"
        f" does not count, and its restart resumes from step {step}. Younger checkpoints stay, off the line.",
        "Roll back?",
    )
    _act(source, run, step, "rollback", save, who, reason, as_json)


def pin(run: Run, step: Step, save: Save = None, who: Who = None, url: Url = None, as_json: AsJson = False) -> None:
    """Keep a checkpoint until it is unpinned, whatever retention says."""
    _act(open_source(url), run, step, "pin", save, who, "", as_json)


def unpin(run: Run, step: Step, save: Save = None, who: Who = None, url: Url = None, as_json: AsJson = False) -> None:
    """Take a pin back: yours, or that of --who."""
    _act(open_source(url), run, step, "unpin", save, who, "", as_json)


def close(
    run: Run, reason: Reason, yes: Yes = False, who: Who = None, url: Url = None, as_json: AsJson = False
) -> None:
    """End a run: the running job is fenced, and nothing starts in it. All else goes on; `ckptd reopen` undoes it."""
    source = open_source(url)
    _ask(
        yes,
        f"Run {clean(run)} is closed. A job that is running is fenced: what it saves from now on does not count, and"
        " it does not start again. Nothing is deleted.",
        "Close it?",
    )
    _act_on_run(source, run, "close", who, reason, as_json)


def reopen(run: Run, reason: Reason, who: Who = None, url: Url = None, as_json: AsJson = False) -> None:
    """Let a closed run go on: the next start resumes from where it was."""
    _act_on_run(open_source(url), run, "reopen", who, reason, as_json)


def _ask(yes: bool, what: str, question: str) -> None:
    """At a terminal, unless `yes`, say what would happen and go on only if that is wanted."""
    if not yes and sys.stdin.isatty():
        typer.echo(what, err=True)
        typer.confirm(question, abort=True, err=True)


def _act_on_run(source: Source, run: str, verb: RunVerb, who: str | None, reason: str, as_json: bool) -> None:
    info = source.act_on_run(run, verb, _request(ActOnRun, who=whoever(who), reason=reason))
    if as_json:
        views.print_json(info)
    else:
        resume = f"from step {info.resume_step}" if info.resume_step is not None else "anew"
        typer.echo(clean(f"run {run} is {'closed' if info.closed else f'open: the next start goes on {resume}'}"))


def _act(
    source: Source, run: str, step: int, verb: Verb, save: str | None, who: str | None, reason: str, as_json: bool
) -> None:
    by = whoever(who)
    request = _request(ActRequest, who=by, reason=reason, save=save and layout.check_save(save))
    info = source.act(run, step, verb, request)
    if as_json:
        views.print_json(info)
    else:
        typer.echo(clean(f"step {info.step} ({info.save}) {_said(verb, info, by)}"))
    others = [c.save for c in source.checkpoints(run) if c.step == step and c.save != info.save]
    if others and save is None:
        warn(f"step {step} has several checkpoints; this was about {info.save}. Others: {', '.join(others[:20])}")


def _request(kind: type[Q], **values: str | None) -> Q:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = str(first["loc"][0])
        raise Invalid(f"--{field}: {first['msg']}", field=field) from error


def _said(verb: Verb, info: CheckpointInfo, by: str) -> str:
    if verb == "rollback":
        return "is what the run goes on from; a job that was running is fenced, and its restart resumes there"
    if verb in ("quarantine", "reinstate"):
        return "is in quarantine" if info.status == "quarantined" else "is not in quarantine"
    pins = f"; pinned by {', '.join(info.pinned_by)}" if info.pinned_by else ""
    return f"is {'' if by in info.pinned_by else 'not '}pinned by {by}{pins}"
