"""The rules for what is kept: quarantine and its end, roll-back, pins and holds, verification, retention.

The other half of `ckptd.history`, and as pure: verdicts read the records before, nothing else.
"""

from __future__ import annotations

from typing import TypeVar

from ckptd.lineage import MIN_KEEP, borrowers, in_crash_loop, is_valid, min_keep, protection
from ckptd.state import RunState
from ckptd.upkeep_records import (
    AboutTopic,
    CheckpointHeld,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReinstated,
    CheckpointReleased,
    CheckpointsPurged,
    CheckpointsRetired,
    CheckpointUnpinned,
    CheckpointVerified,
    Keeping,
    RolledBack,
    RunClosed,
    RunReopened,
)
from ckptd.verdicts import ACCEPTED, Verdict, never, void

B = TypeVar("B", bound=AboutTopic)


def as_next(state: RunState, body: B) -> B:
    """`body` as the next turn of its topic, for whoever read `state`."""
    return body.model_copy(update={"turn": state.turns.get(body.topic, 0)})


def judge_upkeep(state: RunState, body: AboutTopic) -> Verdict:
    """Whether `body` counts as the next record of `state`, and why not."""
    turn = state.turns.get(body.topic, 0)
    if body.turn != turn:
        outcome = never if body.turn < turn else void
        return outcome(f"{body.topic} was decided {turn} times, this would be time {body.turn + 1}")
    match body:
        case CheckpointQuarantined():
            return _judge_quarantine(state, body)
        case CheckpointReinstated():
            return _judge_reinstate(state, body)
        case RolledBack():
            return ACCEPTED if is_valid(state, body.to) else void(f"{body.to} is no valid checkpoint")
        case RunClosed():
            if isinstance(body, RunReopened) == (state.closed is None):
                return void(f"the run is {'not ' if state.closed is None else ''}closed")
            return ACCEPTED
        case Keeping():
            return _judge_keeping(state, body)
        case CheckpointVerified():
            if body.quarantines != state.turns.get(f"quarantine:{body.save}", 0):
                return void(f"{body.save} was in quarantine after the reading began")
            return ACCEPTED if is_valid(state, body.save) else void(f"{body.save} is no valid checkpoint")
        case CheckpointsRetired():
            return _judge_retire(state, body)
        case CheckpointsPurged():
            return _judge_purge(state, body)
    raise TypeError(f"no rule for {type(body).__name__}")


def _judge_quarantine(state: RunState, body: CheckpointQuarantined) -> Verdict:
    if body.save not in state.checkpoints:
        return void(f"save {body.save} is not committed")
    if body.save in state.retired:
        return never(f"{body.save} is retired")
    if body.save in state.quarantined:
        return void(f"{body.save} is in quarantine")
    if body.ground == "damage" and body.reported_by == body.confirmed_by:
        return void("one reader alone cannot quarantine")
    if body.ground == "crash-loop" and in_crash_loop(state) != body.save:
        return void(f"{state.starts.get(body.save, 0)} starts from {body.save} without a commit are no crash loop")
    return ACCEPTED


def _judge_reinstate(state: RunState, body: CheckpointReinstated) -> Verdict:
    if body.save in state.retired:
        return never(f"{body.save} is retired")
    return ACCEPTED if body.save in state.quarantined else void(f"{body.save} is not in quarantine")


def _judge_keeping(state: RunState, body: Keeping) -> Verdict:
    if body.save not in state.checkpoints:
        return void(f"save {body.save} is not committed")
    if body.save in state.retired:
        return never(f"{body.save} is retired")
    kept = state.held if isinstance(body, CheckpointHeld) else state.pinned
    ends = isinstance(body, CheckpointUnpinned | CheckpointReleased)
    again = isinstance(body, CheckpointHeld) and not ends  # the reader is still there
    if (body.who in kept.get(body.save, ())) != ends and not again:
        return void(f"{body.save} is {'not ' if ends else ''}kept for {body.who}")
    return ACCEPTED


def _judge_retire(state: RunState, body: CheckpointsRetired) -> Verdict:
    current = state.current
    if state.closed is None and (current is None or current.closed or not current.ready):
        return void("no generation is ready: while one is starting, its fallbacks stay")
    for save in body.saves:
        if save not in state.checkpoints:
            return void(f"save {save} is not committed")
        if save in state.retired:
            return never(f"{save} is retired")
    if len(set(body.saves)) != len(body.saves):
        return never("a save is named twice")
    if len(min_keep(state)) < MIN_KEEP:
        return void(f"the line has fewer than {MIN_KEEP} verified valid checkpoints")
    kept = protection(state)
    for save in body.saves:
        if save in kept:
            return void(f"{save} stays: {kept[save]}")
    return ACCEPTED


def _judge_purge(state: RunState, body: CheckpointsPurged) -> Verdict:
    needed = borrowers(state)
    for save in body.saves:
        if save not in state.retired:
            return void(f"{save} is not retired")
        if save in state.purged:
            return never(f"{save} is purged")
        if save in needed:
            return void(f"{save} is needed by {', '.join(needed[save][:5])}")
    return ACCEPTED


def apply_upkeep(state: RunState, body: AboutTopic, seq: int) -> None:
    """Put an accepted record into `state`."""
    state.turns[body.topic] = body.turn + 1
    match body:
        case CheckpointQuarantined():
            state.quarantined[body.save] = body
            state.verified.pop(body.save, None)  # who reinstates it has not read it
            state.doubts += body.ground == "crash-loop"
        case CheckpointReinstated():
            del state.quarantined[body.save]
            state.starts.pop(body.save, None)
        case RolledBack():
            state.tip = body.to
            state.starts.clear()
            state.doubts = 0
            if state.current is not None:
                state.current.closed = "rolled back"
        case RunReopened():
            state.closed = None
        case RunClosed():
            state.closed = body
            if state.current is not None:
                state.current.closed = "closed"
        case CheckpointUnpinned() | CheckpointReleased():
            kept = state.held if isinstance(body, CheckpointReleased) else state.pinned
            kept[body.save].discard(body.who)
            if not kept[body.save]:
                del kept[body.save]
        case CheckpointPinned() | CheckpointHeld():
            kept = state.held if isinstance(body, CheckpointHeld) else state.pinned
            kept.setdefault(body.save, set()).add(body.who)
        case CheckpointVerified():
            state.verified[body.save] = seq
        case CheckpointsRetired():
            for save in body.saves:
                state.retired[save] = seq
                for lender in state.checkpoints[save].borrows:
                    state.lent[lender].remove(save)
                    if not state.lent[lender]:
                        del state.lent[lender]
                for kept in (state.pinned, state.held):
                    kept.pop(save, None)
        case CheckpointsPurged():
            state.purged.update(body.saves)
