"""Commands that look and change nothing: `ckptd runs`, `ls`, `show`, `latest`, `why`, `fsck`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ckptd import layout
from ckptd.cli import views, why_views
from ckptd.cli.options import DAMAGED, AsJson, Run, Save, Step, Url, progress
from ckptd.cli.source import Source, open_source
from ckptd.cli.tables import warn
from ckptd.errors import Corrupt
from ckptd.wire import CheckpointInfo


def runs(url: Url = None, as_json: AsJson = False) -> None:
    """List the runs."""
    found = open_source(url).runs()
    views.print_json(found) if as_json else views.print_runs(found)
    damaged = [info for info in found if info.problem]
    for info in damaged:
        warn(f"run {info.run}: {info.problem}")
    if damaged:
        raise typer.Exit(DAMAGED)


def ls(run: Run, url: Url = None, as_json: AsJson = False) -> None:
    """List the checkpoints of a run."""
    found, damage = _checkpoints(open_source(url), run)
    views.print_json(found) if as_json else views.print_checkpoints(found)
    _end(damage)


def show(run: Run, step: Step, save: Save = None, url: Url = None, as_json: AsJson = False) -> None:
    """Show a checkpoint: its manifest with parts, objects, sizes and digests, its metrics and its lineage."""
    source = open_source(url)
    found, damage = _checkpoints(source, run)
    if save is not None:
        layout.check_save(save)
    if damage is None:
        info = source.checkpoint_at(run, step, save)
        manifest = source.manifest(run, step, info.save) if info.status != "purged" else None
    else:
        of_step = [c for c in found if c.step == step and save in (None, c.save)]
        if not of_step:
            raise damage
        info, manifest = of_step[-1], None
    lineage = views.lineage(found, info)
    if as_json:
        views.print_json({"checkpoint": info, "lineage": lineage, "manifest": manifest})
    else:
        views.print_checkpoint(info, manifest, lineage)
    _end(damage)


def latest(run: Run, url: Url = None, as_json: AsJson = False) -> None:
    """Say where a start would resume now, and why: each candidate with its reason."""
    answer = open_source(url).latest(run)
    views.print_json(answer) if as_json else views.print_latest(answer)
    if answer.answer == "corrupt":
        _warn_corrupt(run)


def why(run: Run, url: Url = None, as_json: AsJson = False) -> None:
    """Explain the answer that a start would get: the line, what is off it and why, who runs, what did not count."""
    found = open_source(url).why(run)
    views.print_json(found) if as_json else why_views.print_why(found)
    if found.latest.answer == "corrupt":
        _warn_corrupt(run)


def fsck(
    run: Run,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte of payload, too.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check a run as it is stored: log, manifests, objects, leftovers. Changes nothing; ends with 6 on damage."""
    source = open_source(url)
    total = 0
    if deep:
        total = sum(
            c.payload_bytes
            for c in _checkpoints(source, run)[0]
            if c.status in ("valid", "quarantined") or c.needed_by
        )
    with progress(f"reading {run}", total, quiet=not deep) as watch:
        answer = source.fsck(run, deep, watch)
    views.print_json(answer) if as_json else why_views.print_fsck(answer)
    if answer.damaged:
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


def _warn_corrupt(run: str) -> None:
    warn(f"run {run} has checkpoints and none of its line is valid; it will not start from zero")
    raise typer.Exit(DAMAGED)
