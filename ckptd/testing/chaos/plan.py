"""Which fault comes when: drawn from a seed, addressed by step, rank and phase.

Each kind is drawn once before any comes again, so a short plan is as mixed as a long one. Between two faults the job
is given steps enough for a commit: five starts from one checkpoint without one would rightly put it in doubt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

FIRST_STEP, STEPS_PER_FAULT = 6, 8
IN_SAVE = ("payload-begin", "payload-written", "part-written")
IN_SAVE_OF_RANK_0 = (*IN_SAVE, "manifest-written", "before-commit", "after-commit")
IN_APPEND = ("slot-begin", "slot-filled")

ALWAYS = (
    "kill rank in training", "kill rank in save", "kill rank in start", "kill agent", "kill both agents", "kill node",
    "kill all", "zombie", "stop rank", "fail in save", "kill service", "kill service in append", "stop service",
    "cut off service", "damage payload", "damage manifest", "damage two",
)  # fmt: skip
WITH_MOUNT = ("disk full", "read-only", "frozen storage", "slow storage")
WITH_CLOCK = ("clock jump", "clock jump of nodes")
WITH_NETWORK = ("cut network",)
WITH_S3 = ("restart S3", "stop S3", "cut off S3", "slow S3")
DAMAGE = ("flip", "cut", "delete")
UNDISTURBING = {
    "stop rank", "fail in save", "kill service", "kill service in append", "stop service", "cut off service",
    "disk full", "read-only", "frozen storage", "slow storage", "clock jump", "restart S3", "stop S3", "cut off S3",
    "slow S3",
}  # fmt: skip
"""No rank needs to start again because of these."""
OF_THE_SERVICE = {"kill service", "kill service in append", "stop service", "cut off service", "clock jump"}
"""These say nothing about ranks that do without the service."""


@dataclass(frozen=True)
class Fault:
    """Strike at `step`; `rank`, `node`, `place`, `how` and `seconds` say where and how, as far as the kind asks."""

    number: int
    kind: str
    step: int
    rank: int
    node: int
    place: str
    how: str
    seconds: float
    direct: bool
    """Whether the ranks that start after it do without the service."""

    def __str__(self) -> str:
        where = f"step {self.step}, rank {self.rank}, node {self.node}, {self.place}, {self.how}, {self.seconds} s"
        return f"fault {self.number}: {self.kind} ({where})"


def make_plan(seed: int, faults: int, kinds: Sequence[str]) -> list[Fault]:
    """The same for the same seed, number and kinds."""
    draw = random.Random(seed)
    order: list[str] = []
    while len(order) < faults:
        order += draw.sample(list(kinds), len(kinds))
    plan = []
    for number, kind in enumerate(order[:faults], 1):
        rank = draw.randrange(4)
        places = _places(kind, rank)
        plan.append(
            Fault(
                number=number,
                kind=kind,
                step=FIRST_STEP + (number - 1) * STEPS_PER_FAULT,
                rank=rank,
                node=draw.randint(1, 2),
                place=draw.choice(places),
                how=draw.choice(DAMAGE),
                seconds=draw.choice((0.5, 2.0, 7.0)),
                direct=draw.random() < 0.25,
            )
        )
    return list(reversed(list(_by_the_service(reversed(plan)))))


def _by_the_service(backwards: Iterable[Fault]) -> Iterator[Fault]:
    """Ranks that meet a fault of the service go by the service: so does the start before it."""
    needed = False
    for fault in backwards:
        if fault.kind in OF_THE_SERVICE:
            needed = True
        elif fault.kind not in UNDISTURBING:
            fault, needed = replace(fault, direct=fault.direct and not needed), False
        yield fault


def _places(kind: str, rank: int) -> Sequence[str]:
    """The failpoints that a fault of this kind can name. A save whose parts are all written does not fail."""
    if kind in ("kill rank in start", "kill service in append"):
        return IN_APPEND
    if kind == "fail in save":
        return IN_SAVE[:2]
    return IN_SAVE if rank else IN_SAVE_OF_RANK_0


def last_step(faults: int) -> int:
    return FIRST_STEP + faults * STEPS_PER_FAULT
