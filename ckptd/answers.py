"""The state of a run, put into answers. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ckptd import layout
from ckptd.errors import NotFound
from ckptd.lineage import borrowers, candidates, lineage, resume_point
from ckptd.records import Damage
from ckptd.state import Checkpoint, Generation, RunState
from ckptd.wire import Answer, CheckpointInfo, Latest, RunInfo, SaveStatus

MAX_NEEDED_TOLD = 20  # of the checkpoints that need another's objects


def pinned(run: str, storage_uuid: str, state: RunState, generation: Generation) -> Answer:
    """The one answer of a generation: equal bytes for every rank, whenever it asks."""
    save = generation.resume_from
    info = checkpoint_info(state, state.checkpoints[save], pinned=True) if save else None
    return Answer(
        answer="found" if info else "none",
        run=run,
        generation=generation.number,
        attempt=generation.attempt,
        world=generation.world,
        fallback_of=generation.fallback_of,
        checkpoint=info,
        candidates=generation.candidates,
        record_sha256=generation.digest,
        storage_uuid=storage_uuid,
    )


def latest(run: str, state: RunState, seen: Mapping[str, Damage]) -> Latest:
    """Where a start would resume now, given the damage that was `seen` by looking at the storage."""
    point = resume_point(state, seen)
    answer: Literal["found", "none", "corrupt"] = "found" if point else "corrupt" if state.tip else "none"
    return Latest(
        answer=answer,
        run=run,
        generation=state.current.number if state.current else 0,
        checkpoint=checkpoint_info(state, point, line={point.save}) if point else None,
        candidates=candidates(state, seen),
    )


def checkpoint_infos(state: RunState) -> list[CheckpointInfo]:
    """All checkpoints, in the order of their commits."""
    line, needed = {c.save for c in lineage(state)}, borrowers(state)
    return [checkpoint_info(state, c, line=line, needed=needed) for c in state.checkpoints.values()]


def checkpoint_info(
    state: RunState,
    checkpoint: Checkpoint,
    *,
    pinned: bool = False,
    line: set[str] | None = None,
    needed: Mapping[str, list[str]] | None = None,
) -> CheckpointInfo:
    """`pinned` leaves out what later records change, so that an answer stays the same to the byte. `line` are the
    saves of the lineage and `needed` those who borrow from which, if the caller has them."""
    save, point = checkpoint.save, resume_point(state)
    now: dict[str, Any] = {}
    if not pinned:
        now = {
            "status": status(state, save),
            "verified": save in state.verified,
            "pinned_by": tuple(sorted(state.pinned.get(save, ()))),
            "held_by": tuple(sorted(state.held.get(save, ()))),
            "needed_by": tuple((needed if needed is not None else borrowers(state)).get(save, [])[-MAX_NEEDED_TOLD:]),
            "on_line": save in (line if line is not None else {c.save for c in lineage(state)}),
            "is_tip": save == state.tip,
            "is_resume_point": point is not None and point.save == save,
        }
    return CheckpointInfo(
        save=save,
        step=checkpoint.step,
        generation=checkpoint.generation,
        parent=checkpoint.parent,
        manifest=checkpoint.manifest,
        payload_bytes=checkpoint.payload_bytes,
        writers=checkpoint.writers,
        metrics=checkpoint.metrics,
        time=checkpoint.time,
        borrows=checkpoint.borrows,
        borrowed_bytes=checkpoint.borrowed_bytes,
        **now,
    )


def status(state: RunState, save: str) -> Literal["valid", "quarantined", "retired", "purged"]:
    if save in state.purged:
        return "purged"
    if save in state.retired:
        return "retired"
    return "quarantined" if save in state.quarantined else "valid"


def run_info(run: str, state: RunState, problem: str | None = None) -> RunInfo:
    """A run in one line."""
    point = resume_point(state)
    last = next(reversed(state.checkpoints.values()), None)
    return RunInfo(
        run=run,
        generation=state.current.number if state.current else 0,
        ready=bool(state.current and state.current.ready),
        stored_bytes=sum(c.payload_bytes for c in state.checkpoints.values() if c.save not in state.purged),
        ended=state.current.closed if state.current else "",
        closed=state.closed is not None,
        records=state.seq,
        void_records=len(state.void),
        checkpoints=len(state.checkpoints),
        resume_step=point.step if point else None,
        tip_step=state.checkpoints[state.tip].step if state.tip else None,
        last_commit=last.time if last else None,
        problem=problem,
    )


def checkpoint_at(run: str, state: RunState, step: int, save: str | None = None) -> CheckpointInfo:
    """The newest checkpoint of `step`, the one on the line if there are several; or `save`, if that is given and of
    this step. `NotFound` if there is none."""
    of_step = [c for c in reversed(state.checkpoints.values()) if c.step == step]
    if not of_step:
        steps = sorted({c.step for c in state.checkpoints.values()})
        raise NotFound(f"run {run} has no checkpoint of step {step}; it has {steps[-20:]}", run=run)
    line = {c.save for c in lineage(state)}
    chosen = [c for c in of_step if c.save == save] if save is not None else [c for c in of_step if c.save in line]
    if save is not None and not chosen:
        raise NotFound(
            f"run {run} has no checkpoint {save} of step {step}; it has {[c.save for c in of_step[:20]]}",
            run=run,
            save=save,
        )
    return checkpoint_info(state, (chosen or of_step)[0], line=line)


def save_status(state: RunState, save: str) -> SaveStatus:
    """What became of a save."""
    if save in state.checkpoints:
        return SaveStatus(save=save, status="durable")
    if save in state.aborted:
        return SaveStatus(save=save, status="aborted", detail=state.aborted[save])
    current = state.current
    if current is not None and current.number > layout.generation_of(save):
        return SaveStatus(save=save, status="fenced", detail=f"generation {current.number} started before it")
    if current is not None and current.closed:
        return SaveStatus(save=save, status="fenced", detail=f"the run was {current.closed} before it")
    return SaveStatus(save=save, status="pending")
