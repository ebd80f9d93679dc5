"""Commands that keep a run in order: `ckptd verify`, `retain`, `gc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ckptd.cli import views
from ckptd.cli.options import DAMAGED, AsJson, Run, Save, Url, progress
from ckptd.cli.source import Source, open_source
from ckptd.cli.tables import clean, print_table, size, warn
from ckptd.collecting import Lent
from ckptd.errors import Corrupt, Invalid, NotFound
from ckptd.lineage import MIN_KEEP
from ckptd.retaining import RetainRequest
from ckptd.wire import CheckpointInfo, VerifyAnswer


def verify(
    run: Run,
    step: Annotated[
        int | None, typer.Argument(help="Step of the checkpoint [default: where a start would resume].")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints that have their bytes.")] = False,
    save: Save = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint, or of all, and compare it with its digest. Ends with 6 on damage."""
    source = open_source(url)
    chosen = _chosen(source, run, step, save, every)
    answers: list[VerifyAnswer] = []
    with progress(f"reading {run}", sum(c.payload_bytes + c.borrowed_bytes for c in chosen)) as watch:
        for checkpoint in chosen:
            try:
                answers.append(source.verify(run, checkpoint.step, checkpoint.save, watch))
            except (Invalid, NotFound) as error:
                if not every:
                    raise
                warn(f"step {checkpoint.step} is passed over: {error.message}")  # retired since it was listed
    if as_json:
        views.print_json(answers)
    else:
        print_table(
            ("step", "result", "size", "save", "detail"),
            [(a.step, a.result, size(a.payload_bytes), a.save, a.detail or None) for a in answers],
        )
    if any(answer.result != "whole" for answer in answers):
        raise typer.Exit(DAMAGED)


def retain(
    run: Run,
    keep_last: Annotated[int, typer.Option(min=MIN_KEEP, max=10**6, help="So many of the newest stay.")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, max=10**12, help="Of every so many steps the first one stays for good.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be retired.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Verify what must be, retire what the policy does not keep, and delete its bytes."""
    source = open_source(url)
    request = RetainRequest(keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    newest = max((c.payload_bytes + c.borrowed_bytes for c in source.checkpoints(run)[-MIN_KEEP:]), default=0)
    with progress(f"verifying {run}", newest, quiet=dry_run) as watch:
        answer = source.retain(run, request, watch)
    if as_json:
        views.print_json(answer)
    else:
        print_table(
            ("step", "decision", "rule", "save"),
            [(d.step, "keep" if d.keep else "retire", d.rule, d.save) for d in answer.decisions],
        )
        if not dry_run:
            _tell(len(answer.retired), len(answer.verified), answer.objects)
            _tell_lent(answer.lent)
    damaged = [verified for verified in answer.verified if verified.result != "whole"]
    for verified in damaged:
        warn(f"step {verified.step} is {verified.result}: {verified.detail}")
    if damaged:
        raise typer.Exit(DAMAGED)


def gc(run: Run, url: Url = None, as_json: AsJson = False) -> None:
    """Delete the bytes of retired checkpoints, and what uncommitted saves of ended generations left."""
    collected = open_source(url).collect(run)
    if as_json:
        views.print_json(collected)
    else:
        typer.echo(f"{collected.objects} objects deleted; of {len(collected.purged)} retired checkpoints all is gone")
        _tell_lent(collected.lent)


def _tell(retired: int, verified: int, objects: int) -> None:
    typer.echo(f"{verified} verified, {retired} retired, {objects} objects deleted", err=True)


def _tell_lent(lent: Sequence[Lent]) -> None:
    for save, needed_by in ((told.save, told.needed_by) for told in lent):
        typer.echo(f"{save} is kept for the sake of {', '.join(needed_by)}", err=True)


def _chosen(source: Source, run: str, step: int | None, save: str | None, every: bool) -> list[CheckpointInfo]:
    found = source.checkpoints(run)
    if every:
        if step is not None or save is not None:
            raise Invalid("--all and a step exclude each other", field="step")
        return [c for c in found if c.status in ("valid", "quarantined")]
    if step is None and save is None:
        point = source.latest(run).checkpoint
        if point is None:
            raise Corrupt(
                f"run {clean(run)} has no valid checkpoint to start from", do="Name a step, or --all, to read it."
            )
        return [point]
    of_step = [c for c in found if (step is None or c.step == step) and (save is None or c.save == save)]
    if not of_step:
        raise NotFound(f"run {run} has no such checkpoint", do="`ckptd ls` lists them.", run=run)
    return [next((c for c in reversed(of_step) if c.on_line), of_step[-1])]
