"""The records of a start, made from the state they would follow. Pure."""

from __future__ import annotations

from ckptd.errors import Corrupt
from ckptd.lineage import candidates, resume_point
from ckptd.records import GenerationStarted
from ckptd.state import RunState
from ckptd.upkeep_records import CheckpointQuarantined
from ckptd.wire import BeginRequest


def start_body(run: str, state: RunState, request: BeginRequest) -> GenerationStarted:
    """The generation that `request` asks for, from the resume point. `Corrupt` if there should be one and is none."""
    point, looked_at = resume_point(state), candidates(state)
    begun = state.started(request.attempt, request.fallback_of)  # by an earlier try of this call
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
    turn = state.turns.get(f"quarantine:{save}", 0)
    return CheckpointQuarantined(save=save, turn=turn, ground="crash-loop", reason=reason)
