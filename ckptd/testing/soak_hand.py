"""What everything that a process of a soak does is done with: its dice, its journal, and the ways to the runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from ckptd.errors import NotFound, OutcomeUnknown, Unavailable
from ckptd.manifest import Frozen
from ckptd.storage import open_storage
from ckptd.testing.soak_journal import Journal
from ckptd.testing.soak_sides import OverHttp, Side, Straight
from ckptd.wire import CheckpointInfo

T = TypeVar("T")
RUNS = 2
RECORDS_PER_RUN = 500  # then a fresh run, so that an audit stays short
APPEND_SECONDS = 20.0
TRIES = 6


class Orders(Frozen):
    """What a process is told at its start. `seed` is of this one life; `operations` None: until SIGTERM."""

    name: str
    storage: str
    services: tuple[str, ...]
    journal: str
    seed: str
    operations: int | None


class Hand:
    """One thread; everything that is rolled comes from the seed."""

    def __init__(self, orders: Orders, journal: Journal) -> None:
        self.name = orders.name
        self.seed = orders.seed
        self.journal = journal
        self.random = random.Random(orders.seed)
        self.straight = Straight(open_storage(orders.storage), deadline_seconds=APPEND_SECONDS)
        self.sides: list[Side] = [self.straight, *map(OverHttp, orders.services)]
        self._numbers = [0] * RUNS

    def any(self) -> Side:
        return self.random.choice(self.sides)

    def insist(self, first: Side, call: Callable[[Side], T]) -> T:
        """Ask `first`, and anybody after it, until somebody answers."""
        side = first
        for left in reversed(range(TRIES)):
            try:
                return call(side)
            except Unavailable as error:
                self.journal.event("unknown" if isinstance(error, OutcomeUnknown) else "unavailable")
                if not left:
                    raise
            side = self.any()
        raise AssertionError("the last try returns or raises")

    def run(self) -> str:
        """One of those that are worked on."""
        which = self.random.randrange(RUNS)
        while True:
            run = f"soak-{which}-{self._numbers[which]}"
            try:
                if self.straight.run_info(run).records < RECORDS_PER_RUN:
                    return run
            except NotFound:
                return run
            self._numbers[which] += 1

    def leave(self, run: str) -> None:
        """Go on with a fresh run instead."""
        which, number = map(int, run.split("-")[1:])
        self._numbers[which] = max(self._numbers[which], number + 1)

    def checkpoints(self, run: str, *status: str) -> list[CheckpointInfo]:
        """Those of a run that are of one of these kinds now; none if it is no run."""
        try:
            return [info for info in self.straight.checkpoints(run) if info.status in status]
        except NotFound:
            return []

    def is_retired(self, run: str, save: str) -> bool:
        return save in self.straight.state(run).retired
