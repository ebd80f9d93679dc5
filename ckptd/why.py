"""Why a run is where it is: the answer a start would get, checkpoint by checkpoint, and what stands beside the line.

For people. It reads the log once more from its beginning, to find the record that left a checkpoint behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckptd import answers, layout
from ckptd.digests import sha256_hex
from ckptd.encoding import MAX_RECORD_BYTES, Record, decode
from ckptd.history import advance
from ckptd.ledger import Ledger
from ckptd.lineage import CRASH_LOOP_STARTS, MAX_DOUBTS, in_crash_loop, is_valid, lineage, resume_point
from ckptd.manifest import Frozen, SaveId, Step
from ckptd.records import GenerationStarted
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.upkeep_records import CheckpointQuarantined, RolledBack
from ckptd.wire import CheckpointInfo, Latest

MAX_TOLD = 100  # checkpoints on and off the line, and void records


class WhyCheckpoint(Frozen):
    """One checkpoint and the reason why a start would, or would not, resume from it."""

    checkpoint: CheckpointInfo
    verdict: Literal["resume", "older", "no", "left"]
    reason: str
    starts: int = 0


class WhyGeneration(Frozen):
    """The incarnation that has the run. `seconds_ago` is when the service last heard of its job, if it did."""

    generation: int
    attempt: str
    job: str
    host: str
    world: int
    state: Literal["loading", "training", "rolled back", "closed"]
    resume_step: Step | None
    resume_save: SaveId | None
    fallback_of: int | None
    started: str
    seconds_ago: float | None = None


class WhyVoid(Frozen):
    slot: int
    reason: str


class Why(Frozen):
    """`line` from the tip on; `beside` what is off it, newest first; `next_start` what the next start does first;
    `closed` who ended the run and why, empty if nobody did."""

    run: str
    latest: Latest
    line: tuple[WhyCheckpoint, ...]
    beside: tuple[WhyCheckpoint, ...]
    generation: WhyGeneration | None
    next_start: str = ""
    closed: str = ""
    void_records: int
    void: tuple[WhyVoid, ...]
    more: int = 0


def why(ledger: Ledger, run: str) -> Why:
    """Any run that exists. `NotFound`, `Corrupt` as all questions; looks at objects as a start does."""
    latest = ledger.latest(run)
    state = ledger.state(run)
    seen = {c.save: c.reason for c in latest.candidates if not c.valid}
    line = [c.save for c in lineage(state)]
    beside = [save for save in reversed(state.checkpoints) if save not in set(line)]
    left = _who_left(ledger.storage, run, state) if beside else {}
    infos = {info.save: info for info in answers.checkpoint_infos(state)}
    void = [WhyVoid(slot=slot, reason=reason) for slot, reason in state.void.items()]
    return Why(
        run=run,
        latest=latest,
        line=_line(state, [infos[save] for save in line[:MAX_TOLD]], seen),
        beside=tuple(_beside(state, infos[save], left.get(save, "")) for save in beside[:MAX_TOLD]),
        generation=_generation(state),
        next_start=_next_start(state),
        closed=_closed(state),
        void_records=len(void),
        void=tuple(void[-MAX_TOLD:]),
        more=max(0, len(line) - MAX_TOLD) + max(0, len(beside) - MAX_TOLD),
    )


def _line(state: RunState, line: Sequence[CheckpointInfo], seen: dict[str, str]) -> tuple[WhyCheckpoint, ...]:
    told: list[WhyCheckpoint] = []
    found = False
    for info in line:
        reason = _gone(state, info.save) or seen.get(info.save, "")
        verdict: Literal["resume", "older", "no"] = "no" if reason else "older" if found else "resume"
        if not reason:
            reason = "valid, and older" if found else "the newest valid checkpoint of the line"
        found = found or verdict == "resume"
        starts = state.starts.get(info.save, 0)
        told.append(WhyCheckpoint(checkpoint=info, verdict=verdict, reason=reason, starts=starts))
    return tuple(told)


def _beside(state: RunState, info: CheckpointInfo, left: str) -> WhyCheckpoint:
    reason = "; ".join(filter(None, (left, _gone(state, info.save))))
    return WhyCheckpoint(checkpoint=info, verdict="left", reason=reason)


def _gone(state: RunState, save: str) -> str:
    """What was decided against a checkpoint, and by whom; empty if nothing was."""
    if save in state.retired:
        purged = ", and its bytes were collected" if save in state.purged else ""
        return f"retired in slot {state.retired[save]}{purged}"
    quarantine = state.quarantined.get(save)
    return _ground(quarantine) if quarantine is not None else ""


def _ground(body: CheckpointQuarantined) -> str:
    if body.ground == "damage" and body.reported_by is not None and body.confirmed_by is not None:
        readers = (body.reported_by, body.confirmed_by)
        by = " and ".join(f"{reader.process} on {reader.host}" for reader in readers)
        return f"in quarantine for damage, read by {by}: {body.why}"
    by = f" by {body.who}" if body.who else ""
    return f"in quarantine ({body.ground}{by}): {body.why or 'no reason given'}"


def _generation(state: RunState) -> WhyGeneration | None:
    current = state.current
    if current is None:
        return None
    opened = state.attempts[current.attempt]
    return WhyGeneration(
        generation=current.number,
        attempt=current.attempt,
        job=opened.job,
        host=opened.host,
        world=current.world,
        state=current.closed or ("training" if current.ready else "loading"),
        resume_step=state.checkpoints[current.resume_from].step if current.resume_from else None,
        resume_save=current.resume_from,
        fallback_of=current.fallback_of,
        started=current.time,
    )


def _next_start(state: RunState) -> str:
    """What the next start does before it looks at the candidates."""
    point = resume_point(state)
    starts = state.starts.get(point.save, 0) if point is not None else 0
    if point is None or not starts:
        return ""
    so_far = f"{starts} generations started from {point.save} and committed nothing yet"
    if in_crash_loop(state) is not None:
        return f"{so_far}: the next start puts it in quarantine and resumes from the one before"
    if starts < CRASH_LOOP_STARTS:
        return f"{so_far}; {CRASH_LOOP_STARTS} put it in doubt"
    if state.doubts >= MAX_DOUBTS:
        return f"{so_far}; {state.doubts} others were given up for that, so the reason is elsewhere and it stays"
    if any(is_valid(state, c.save) for c in lineage(state) if c.save != point.save):
        return so_far
    return f"{so_far}; there is no other on its line, so it stays"


def _closed(state: RunState) -> str:
    if state.closed is None:
        return ""
    return f"closed by {state.closed.who}: {state.closed.reason or 'no reason given'}"


def _who_left(storage: Storage, run: str, until: RunState) -> dict[str, str]:
    """For each checkpoint that is off the line, the last record that left it behind."""
    state, left = RunState(), {}
    for seq in range(1, until.seq + 1):
        key = layout.log_key(run, seq)
        data = storage.get(key, MAX_RECORD_BYTES)
        item, tip = decode(data, key=key, seq=seq), state.tip
        moves = advance(state, item, sha256_hex(data)).accepted and isinstance(
            item.body, GenerationStarted | RolledBack
        )
        if moves and state.tip != tip:
            line = {c.save for c in lineage(state)}
            while tip is not None and tip not in line:
                left[tip] = _moved(state, item)
                tip = state.checkpoints[tip].parent
    return left


def _moved(state: RunState, item: Record) -> str:
    """What a record that moved the tip says, for people."""
    step = state.checkpoints[state.tip].step if state.tip is not None else 0
    if isinstance(item.body, RolledBack):
        why = f": {item.body.reason}" if item.body.reason else ""
        return f"left behind in slot {item.seq}: rolled back to step {step} by {item.body.who}{why}"
    number = state.generations[-1].number
    return f"left behind in slot {item.seq}: generation {number} started from step {step}"
