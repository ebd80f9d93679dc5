"""The code and the model come to the same verdicts: on every log within bounds, for every record that anybody could
have asked for by then.

The logs are met breadth first, each by one shortest way. Beside each model fold stands the real state, which came from
the real bytes of the same records. What the two judge differently on purpose is said by `_left_out` and `_may_wait`,
and nowhere else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from ckptd import encoding, history, lineage
from ckptd.digests import sha256_hex
from ckptd.records import Body, RunCreated
from ckptd.state import RunState
from tests.model.bodies import body_of, fold_of
from tests.model.configurations import UNDER_WAY
from tests.model.folding import apply
from tests.model.refusals import never
from tests.model.rules import (
    GENERATIONS,
    Fold,
    Ground,
    Kind,
    Record,
    Rules,
    bit,
    generation_of,
    judge,
    needed,
    resume_point,
    save_id,
    saves_in,
    step_of,
    valid,
)
from tests.model.states import Bounds, Event
from tests.model.telling import say

CREATED = RunCreated(fingerprint="f" * 32)
STARTS = Bounds(incarnations=3, fallbacks=1, saves=2, commits=2, aborts=True)
QUARANTINE = Bounds(
    fallbacks=1, saves=2, commits=3, quarantines=2, reinstates=1, rollbacks=1, verifies=True, history=UNDER_WAY
)
CRASH_LOOPS = Bounds(
    incarnations=4, fallbacks=1, commits=3, quarantines=2, reinstates=1, rollbacks=1, history=UNDER_WAY
)
PEOPLE = Bounds(
    saves=3, commits=3, quarantines=1, reinstates=1, rollbacks=1, pins=2, retires=1, verifies=True, history=UNDER_WAY
)
RETENTION = Bounds(saves=3, commits=4, quarantines=1, retires=2, verifies=True, objects=True, history=UNDER_WAY)
BORROWING = Bounds(
    saves=3, commits=4, quarantines=1, retires=2, verifies=True, borrows=2, objects=True, history=UNDER_WAY
)
BOUNDS = {
    "starts": STARTS,
    "quarantine": QUARANTINE,
    "crash loops": CRASH_LOOPS,
    "people": PEOPLE,
    "retention": RETENTION,
    "borrowing": BORROWING,
}


def asked(fold: Fold, bounds: Bounds) -> Iterator[Record]:
    """Every record that anybody could have asked for by now, in time or late, right or wrong."""
    yield Record(Kind.OPENED, fold.opened)
    number = len(fold.generations)
    points = (0, *saves_in(fold.committed))
    for point in points:
        for attempt in range(fold.opened):
            for next_number in {number, number + 1} - {0}:
                yield Record(Kind.STARTED, attempt, number=next_number, point=point, by=attempt)
            for given_up in range(1, number + 1):
                yield Record(
                    Kind.STARTED, attempt, number=number + 1, point=point, fallback_of=given_up, by=attempt
                )
    for generation in range(1, number + 2):
        yield Record(Kind.READY, generation)
        for save in (save_id(generation, k) for k in range(1, bounds.saves + 1)):
            yield Record(Kind.ABORTED, save)
            for lender in points:
                if lender != save:
                    yield Record(Kind.COMMITTED, save, lender=lender)
    for save in saves_in(fold.committed | fold.aborted):
        yield from _asked_about(fold, save)


def _asked_about(fold: Fold, save: int) -> Iterator[Record]:
    for turn in range(fold.turns[save] + 1):
        for ground in Ground:
            yield Record(Kind.QUARANTINED, save, turn, ground=ground)
        yield Record(Kind.REINSTATED, save, turn)
        yield Record(Kind.VERIFIED, save, turn)
    for turn in range(fold.pin_turns[save] + 1):
        yield Record(Kind.PINNED, save, turn)
        yield Record(Kind.UNPINNED, save, turn)
    for turn in range(fold.rollbacks + 1):
        yield Record(Kind.ROLLED_BACK, save, turn)
    yield Record(Kind.RETIRED, save)
    yield Record(Kind.PURGED, save)


def within(bounds: Bounds, fold: Fold) -> bool:
    """Whether the search goes on from here."""
    return (
        fold.opened <= bounds.incarnations
        and len(fold.generations) < GENERATIONS
        and sum(generation.fallback_of > 0 for generation in fold.generations) <= bounds.fallbacks
        and fold.committed.bit_count() <= bounds.commits
        and (bounds.aborts or not fold.aborted)
        and sum((turn + 1) // 2 for turn in fold.turns) <= bounds.quarantines
        and sum(turn // 2 for turn in fold.turns) <= bounds.reinstates
        and fold.rollbacks <= bounds.rollbacks
        and (bounds.verifies or not fold.verified)
        and sum(fold.pin_turns) <= bounds.pins
        and fold.retired.bit_count() <= bounds.retires
        and len(fold.lenders) <= bounds.borrows
        and (bounds.objects or not fold.purged)
    )


if __name__ == "__main__":
    pass
