"""What a run's log means.

A record counts or it is void, and which of the two is decided here, by the records before it and nothing
else: no I/O, no clock, no configuration. Every reader that holds the same records comes to the same verdict,
so a lost race needs no referee: the loser's record is void for everyone.

    fold(records) -> RunState         what holds after these records
    judge(state, body) -> Verdict     would this record count next?

`lineage.resume_point(state)` is the checkpoint a new generation starts from; `upkeep` has the rules for what is kept.

An attempt is an incarnation of the job; its age is the slot in which it was opened. A generation is an attempt
that began; its number is the fencing token: no commit of generation g counts after g+1 started, and none before
g is ready. The *tip* is the newest checkpoint of the line that is being trained; the resume point is the first
valid one on the way from the tip to its ancestors, never simply the highest step.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.encoding import Record
from ckptd.lineage import resume_point
from ckptd.records import (
    AttemptOpened,
    Body,
    CheckpointCommitted,
    GenerationReady,
    GenerationStarted,
    RunCreated,
    SaveAborted,
)
from ckptd.state import Checkpoint, Generation, OpenedAttempt, RunState
from ckptd.upkeep import apply_upkeep, judge_upkeep
from ckptd.upkeep_records import AboutTopic
from ckptd.verdicts import ACCEPTED, Verdict, fenced, never, void


def fold(records: Iterable[tuple[Record, str]]) -> RunState:
    """The state after `records`, given with the sha256 of each one's bytes, from slot 1 without a gap."""
    state = RunState()
    for item, digest in records:
        advance(state, item, digest)
    return state


def advance(state: RunState, item: Record, digest: str) -> Verdict:
    """Fold one more record into `state`. The caller checked that it is the next one and chains to the last."""
    verdict = judge(state, item.body)
    if verdict.accepted:
        state.accepted[item.rid] = item.seq
        _apply(state, item, digest)
    else:
        state.void[item.seq] = verdict.reason
    state.seq, state.digest = item.seq, digest
    return verdict


def judge(state: RunState, body: Body) -> Verdict:
    """Whether `body` counts as the next record of `state`, and why not."""
    if body.rid in state.accepted:
        return never(f"{body.rid} was accepted in slot {state.accepted[body.rid]}")
    if isinstance(body, RunCreated):
        return ACCEPTED if state.seq == 0 else never("the run exists already")
    if state.seq == 0 or not state.fingerprint:
        return void("the run was not created")
    match body:
        case AttemptOpened():
            return ACCEPTED
        case GenerationStarted():
            return _judge_start(state, body)
        case GenerationReady():
            return _judge_ready(state, body)
        case CheckpointCommitted():
            return _judge_commit(state, body)
        case SaveAborted():
            return _judge_abort(state, body)
        case AboutTopic():
            return judge_upkeep(state, body)
    raise TypeError(f"no rule for {type(body).__name__}")


def _judge_start(state: RunState, body: GenerationStarted) -> Verdict:
    attempt, current = state.attempts.get(body.attempt), state.current
    if state.closed is not None:
        return void(f"the run was closed by {state.closed.who}")
    if attempt is None:
        return void(f"attempt {body.attempt} was not opened")
    if body.fallback_of is None:
        if current is not None and attempt.seq <= state.attempts[current.attempt].seq:
            return fenced(f"a younger attempt began generation {current.number}")
    else:
        if current is None or current.number < body.fallback_of:
            return void(f"generation {body.fallback_of} did not start")
        if current.number > body.fallback_of:
            return fenced(f"generation {current.number} started")
        if current.attempt != body.attempt or current.ready:
            return never(f"generation {current.number} is ready or another attempt's")
    number = current.number + 1 if current is not None else 1
    if body.generation != number:
        return void(f"generation {number} is next, not {body.generation}")
    point = resume_point(state)
    if body.resume_from != (point.save if point is not None else None):
        return void(f"the resume point is {point.save if point else None}")
    if point is None and state.tip is not None:
        return void("the run has commits and none is valid: it does not start from zero")
    return ACCEPTED


def _judge_ready(state: RunState, body: GenerationReady) -> Verdict:
    fence = _fence(state, body.generation)
    if fence is not None:
        return fence
    if state.generations[-1].attempt != body.attempt:
        return never(f"generation {body.generation} is another attempt's")
    return ACCEPTED


def _judge_commit(state: RunState, body: CheckpointCommitted) -> Verdict:
    if body.save in state.checkpoints:
        return never(f"save {body.save} is committed with another manifest")
    if body.save in state.aborted:
        return never(f"save {body.save} was aborted: {state.aborted[body.save]}")
    fence = _fence(state, body.generation)
    if fence is not None:
        return fence
    if not state.generations[-1].ready:
        return void(f"generation {body.generation} is not ready")
    tip = state.checkpoints[state.tip] if state.tip is not None else None
    if tip is not None and body.step < tip.step:
        return never(f"step {body.step} is before step {tip.step} of the tip")
    return _judge_borrowing(state, body) or ACCEPTED


def _judge_borrowing(state: RunState, body: CheckpointCommitted) -> Verdict | None:
    """What speaks against the saves that a commit borrows from. A retired one lends while another borrower keeps its
    bytes; once none does, nobody begins to, and a collector that sees none deletes nothing that is needed."""
    for lender in body.borrows:
        if lender in state.aborted or (lender in state.retired and lender not in state.lent):
            return never(f"it borrows from {lender}, which is {'retired' if lender in state.retired else 'aborted'}")
        if lender not in state.checkpoints or lender in state.quarantined:
            gone = "in quarantine" if lender in state.quarantined else "not committed"
            return void(f"it borrows from {lender}, which is {gone}")
    return None


def _judge_abort(state: RunState, body: SaveAborted) -> Verdict:
    if body.save in state.checkpoints:
        return never(f"save {body.save} is committed")
    return _fence(state, body.generation) or ACCEPTED


def _fence(state: RunState, generation: int) -> Verdict | None:
    """What stops a record of `generation` because it is not the current one."""
    number = state.generations[-1].number if state.generations else 0
    if generation < number:
        return fenced(f"generation {number} started, this is generation {generation}")
    if generation > number:
        return void(f"generation {generation} did not start")
    if state.generations[-1].closed:
        return fenced(f"the run was {state.generations[-1].closed}, which ended generation {generation}")
    return None


def _apply(state: RunState, item: Record, digest: str) -> None:
    match item.body:
        case RunCreated() as body:
            state.fingerprint = body.fingerprint
        case AttemptOpened() as body:
            state.attempts[body.attempt] = OpenedAttempt(item.seq, body.job, body.host)
        case GenerationStarted() as body:
            state.tip = body.resume_from
            if body.resume_from is not None and body.fallback_of is None:
                state.starts[body.resume_from] = state.starts.get(body.resume_from, 0) + 1
            state.generations.append(
                Generation(
                    number=body.generation,
                    attempt=body.attempt,
                    world=body.world,
                    resume_from=body.resume_from,
                    fallback_of=body.fallback_of,
                    candidates=body.candidates,
                    digest=digest,
                    time=item.time,
                    quarantines=state.turns.get(f"quarantine:{body.resume_from}", 0),
                )
            )
        case GenerationReady():
            current = state.generations[-1]
            current.ready = True
            turn = state.turns.get(f"quarantine:{current.resume_from}", 0)
            if current.resume_from is not None and turn == current.quarantines:
                state.verified[current.resume_from] = item.seq  # all ranks read every byte of it since
        case CheckpointCommitted() as body:
            state.checkpoints[body.save] = Checkpoint(
                save=body.save,
                seq=item.seq,
                step=body.step,
                generation=body.generation,
                parent=state.tip,
                manifest=body.manifest,
                payload_bytes=body.payload_bytes,
                writers=body.writers,
                metrics=body.metrics,
                time=item.time,
                borrows=body.borrows,
                borrowed_bytes=body.borrowed_bytes,
            )
            for lender in body.borrows:
                state.lent.setdefault(lender, []).append(body.save)
            state.tip = body.save
            state.starts.clear()
            state.doubts = 0
        case SaveAborted() as body:
            state.aborted[body.save] = body.reason
        case AboutTopic() as body:
            apply_upkeep(state, body, item.seq)
