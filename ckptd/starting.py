"""The records of a start, and of what is given up on the way there, made from the state they would follow. Pure."""

from __future__ import annotations

from ckptd.errors import Conflict, Corrupt
from ckptd.lineage import candidates, resume_point
from ckptd.records import Damage, GenerationStarted, Observer
from ckptd.state import RunState
from ckptd.upkeep import as_next
from ckptd.upkeep_records import CheckpointQuarantined
from ckptd.wire import BeginRequest


def start_body(run: str, state: RunState, request: BeginRequest) -> GenerationStarted:
    """The generation that `request` asks for, from the resume point. `Corrupt` if there should be one and is none;
    `Conflict` if the run is closed."""
    point, looked_at = resume_point(state), candidates(state)
    begun = state.started(request.attempt, request.fallback_of)  # by an earlier try of this call
    if state.closed is not None and begun is None:
        why = f": {state.closed.reason}" if state.closed.reason else ""
        raise Conflict(
            f"run {run} was closed by {state.closed.who}{why}; nothing starts in it",
            do=f"`ckptd reopen {run}` takes that back; or train under another name.",
            run=run,
            final=False,
        )
    if point is None and state.tip is not None and begun is None:
        raise Corrupt(
            f"run {run} has {len(state.checkpoints)} checkpoints and none of its line is valid;"
            " it is not started from zero",
            do="`ckptd why` tells the reason for each; `ckptd reinstate` or `ckptd rollback` choose one.",
            run=run,
            candidates=[c.model_dump() for c in looked_at],
        )
    return GenerationStarted(
        generation=(state.current.number if state.current else 0) + 1,
        attempt=request.attempt,
        world=request.world,
        resume_from=point.save if point else None,
        fallback_of=request.fallback_of,
        candidates=looked_at,
    )


def doubt_body(state: RunState, save: str) -> CheckpointQuarantined:
    """The quarantine of a checkpoint that everybody who starts from it dies of."""
    starts = state.starts[save]
    reason = f"{starts} generations started from it and none of them committed anything; the one before is tried"
    return as_next(state, CheckpointQuarantined(save=save, ground="crash-loop", reason=reason))


def damage_body(
    state: RunState, save: str, reported_by: Observer, confirmed_by: Observer, damage: Damage
) -> CheckpointQuarantined:
    """The quarantine of a checkpoint that needs a damaged object. `state` is that before the readings, so that a
    decision which was made since is not undone."""
    body = CheckpointQuarantined(save=save, damage=damage, reported_by=reported_by, confirmed_by=confirmed_by)
    return as_next(state, body)
