"""The state of a run, put into answers. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ckptd.history import candidates, resume_point
from ckptd.records import Damage
from ckptd.state import Checkpoint, Generation, RunState
from ckptd.wire import Answer, CheckpointInfo, Latest, RunInfo


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
        checkpoint=checkpoint_info(state, point) if point else None,
        candidates=candidates(state, seen),
    )


def checkpoint_info(state: RunState, checkpoint: Checkpoint, *, pinned: bool = False) -> CheckpointInfo:
    """`pinned` leaves out what later records change, so that an answer stays the same to the byte."""
    point = resume_point(state)
    return CheckpointInfo(
        save=checkpoint.save,
        step=checkpoint.step,
        generation=checkpoint.generation,
        parent=checkpoint.parent,
        manifest=checkpoint.manifest,
        payload_bytes=checkpoint.payload_bytes,
        writers=checkpoint.writers,
        metrics=checkpoint.metrics,
        time=checkpoint.time,
        status="quarantined" if checkpoint.save in state.quarantined and not pinned else "valid",
        is_tip=checkpoint.save == state.tip and not pinned,
        is_resume_point=point is not None and point.save == checkpoint.save and not pinned,
    )


def run_info(run: str, state: RunState, problem: str | None = None) -> RunInfo:
    """A run in one line."""
    point = resume_point(state)
    last = max(state.checkpoints.values(), key=lambda c: c.seq, default=None)
    return RunInfo(
        run=run,
        generation=state.current.number if state.current else 0,
        ready=bool(state.current and state.current.ready),
        records=state.seq,
        void_records=len(state.void),
        checkpoints=len(state.checkpoints),
        resume_step=point.step if point else None,
        tip_step=state.checkpoints[state.tip].step if state.tip else None,
        last_commit=last.time if last else None,
        problem=problem,
    )
