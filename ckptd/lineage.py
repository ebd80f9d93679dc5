"""The line that is being trained: the tip and its ancestors, and which of them training would go on from.

Pure functions of a run's state: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptd.records import MAX_CANDIDATES, Candidate, Damage
from ckptd.state import Checkpoint, RunState

MIN_KEEP = 2  # verified checkpoints of the line that retention never takes
CRASH_LOOP_STARTS = 5  # so many starts from one checkpoint without a commit put it in doubt
MAX_DOUBTS = 2  # so many checkpoints in a row may be doubted for that, for the reason may well be elsewhere


def lineage(state: RunState) -> Iterator[Checkpoint]:
    """The tip and its ancestors, newest first."""
    save = state.tip
    while save is not None:
        checkpoint = state.checkpoints[save]
        yield checkpoint
        save = checkpoint.parent


def is_valid(state: RunState, save: str) -> bool:
    """Whether a committed checkpoint may be resumed from: neither in quarantine nor retired."""
    return save in state.checkpoints and save not in state.quarantined and save not in state.retired


def resume_point(state: RunState, seen: Mapping[str, Damage] = {}) -> Checkpoint | None:
    """Where training goes on: the first valid checkpoint of the lineage. `seen` is damage found by looking, which no
    record confirms yet: for people who ask, never for a verdict."""
    return next((c for c in lineage(state) if is_valid(state, c.save) and c.save not in seen), None)


def candidates(state: RunState, seen: Mapping[str, Damage] = {}) -> tuple[Candidate, ...]:
    """The checkpoints passed over on the way to the resume point, and the resume point, each with its reason."""
    found = []
    for checkpoint in lineage(state):
        reason = _why_not(state, checkpoint.save, seen)
        valid = reason is None
        told = reason or "newest valid checkpoint of the lineage"
        found.append(Candidate(save=checkpoint.save, step=checkpoint.step, valid=valid, reason=told[:1000]))
        if valid:
            break
    return tuple(found[-MAX_CANDIDATES:])


def _why_not(state: RunState, save: str, seen: Mapping[str, Damage]) -> str | None:
    if save in state.quarantined:
        record = state.quarantined[save]
        return f"quarantined ({record.ground}): {record.why}"
    if save in state.retired:
        return f"retired in slot {state.retired[save]}"
    if save in seen:
        damage = seen[save]
        return (
            f"damaged, and the next start will quarantine it: {damage.object}, expected {damage.expected},"
            f" observed {damage.observed}"
        )
    return None


def min_keep(state: RunState) -> list[str]:
    """The newest verified valid checkpoints of the line, at most MIN_KEEP: what retention leaves in any case."""
    verified = (c.save for c in lineage(state) if c.save in state.verified and is_valid(state, c.save))
    return [save for save, _ in zip(verified, range(MIN_KEEP), strict=False)]


def protection(state: RunState) -> dict[str, str]:
    """The checkpoints that must not be retired now, each with the reason."""
    found = dict.fromkeys(min_keep(state), f"one of the {MIN_KEEP} newest verified ones of the line")
    for save, readers in state.held.items():
        found[save] = f"held by {', '.join(sorted(readers))}"
    for save, people in state.pinned.items():
        found[save] = f"pinned by {', '.join(sorted(people))}"
    point = resume_point(state)
    if point is not None:
        found[point.save] = "the resume point"
    return found


def first_open(state: RunState) -> int:
    """The first generation of which something may count yet; those before it ended. Generation 1 before any."""
    current = state.current
    if current is None:
        return 1
    return current.number + 1 if current.closed else current.number


def borrowers(state: RunState) -> Mapping[str, list[str]]:
    """For each save whose objects are borrowed, the checkpoints that need them: those that are not retired."""
    return state.lent


def in_crash_loop(state: RunState) -> str | None:
    """The resume point, if it was started from so often without progress that the one before should be tried."""
    point = resume_point(state)
    if point is None or state.starts.get(point.save, 0) < CRASH_LOOP_STARTS or state.doubts >= MAX_DOUBTS:
        return None
    another = any(is_valid(state, c.save) for c in lineage(state) if c.save != point.save)
    return point.save if another else None
