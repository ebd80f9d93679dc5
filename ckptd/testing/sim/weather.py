"""Which faults a seed has, and how often: some seeds have a few of them, some all, some none (so that what needs long
quiet stretches happens too)."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

FAULTS = {
    "refused": "a call fails and nothing happened",
    "lost": "a call is carried out and its answer is lost",
    "delayed": "a put fails, and lands later, perhaps much later",
    "doubled": "a put is carried out, and once more later",
    "echoed": "a put is told that its key is taken, by itself",
    "stale": "a listing is one of an earlier moment",
    "negative": "a log slot is told to be absent to a reader that looked before it was filled",
    "full": "the drive is full for a while",
    "outage": "a process is cut off from the storage for a while",
    "killed": "a process dies at a storage call",
    "stopped": "a process stops at a storage call and goes on later, perhaps much later",
    "damaged": "a stored object is flipped, cut or removed at rest",
    "misread": "a process reads wrong bytes from some folders, or from all, for a while",
}
"""What a seed may have, each in words."""

OFTEN = {"killed": 0.003, "stopped": 0.003, "damaged": 0.4, "full": 0.002, "outage": 0.003, "misread": 0.003}


@dataclass(frozen=True)
class Weather:
    """The chance of each fault at each place where it can happen."""

    refused: float = 0.0
    lost: float = 0.0
    delayed: float = 0.0
    doubled: float = 0.0
    echoed: float = 0.0
    stale: float = 0.0
    negative: float = 0.0
    full: float = 0.0
    outage: float = 0.0
    killed: float = 0.0
    stopped: float = 0.0
    damaged: float = 0.0
    misread: float = 0.0

    def without(self, names: Collection[str]) -> Weather:
        return replace(self, **dict.fromkeys(names, 0.0))

    def words(self) -> str:
        chances = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{name} {chance:.4f}" for name, chance in chances if chance) or "calm"


CALM = Weather()


def draw(rng: random.Random) -> Weather:
    """The weather of one seed."""
    share = rng.choice((0.0, 0.3, 0.6, 1.0))
    chances = {}
    for name in FAULTS:
        strength = rng.random() ** 2 * OFTEN.get(name, 0.08)
        chances[name] = strength if rng.random() < share else 0.0
    return Weather(**chances)
