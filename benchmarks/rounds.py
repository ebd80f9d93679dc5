"""Contenders take turns: one after the other in every round, so that whatever slows the machine meets them all.

The first round warms up and does not count. Each round starts with the next contender, because who comes first after
a pause has an advantage. Garbage is collected before, never during, a turn.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.costs import Meter
from benchmarks.results import Row

Tell = Callable[[str], None]
log = logging.getLogger("benchmarks")


def nothing() -> None:
    """What comes before and after a turn unless said otherwise."""


@dataclass(frozen=True)
class Contender:
    """`run` is what is measured. It may return figures of its own, which go before those measured around it. `before`
    and `after` are not measured. A `peer` may fail, which is shown; anything else that fails ends the benchmark."""

    name: str
    run: Callable[[], Mapping[str, float] | None]
    before: Callable[[], None] = nothing
    after: Callable[[], None] = nothing
    peer: bool = False
    missing: str = ""


def take_turns(
    contenders: Sequence[Contender],
    rounds: int,
    tell: Tell,
    *,
    each_round: Callable[[], None] = nothing,
    warm_up: int = 1,
) -> list[Row]:
    """One row for each contender, with a sample for each round that counts."""
    missing = {c.name: c.missing for c in contenders if c.missing}
    samples: dict[str, list[dict[str, float]]] = {c.name: [] for c in contenders}
    gc.collect()
    gc.freeze()  # what is there already need not be looked through before every turn
    for number in range(warm_up + rounds):
        each_round()
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            if contender.name in missing:
                continue
            tell(f"round {number + 1} of {warm_up + rounds}: {contender.name}")
            try:
                found = _turn(contender)
            except Exception as error:
                if not contender.peer:
                    raise
                log.exception("%s failed", contender.name)
                missing[contender.name] = f"failed: {type(error).__name__}: {error}"[:200]
                continue
            if number >= warm_up:
                samples[contender.name].append(found)
    gc.unfreeze()
    return [_row(c.name, samples[c.name], missing.get(c.name, "")) for c in contenders]


def _turn(contender: Contender) -> dict[str, float]:
    contender.before()
    gc.collect()
    gc.disable()
    try:
        meter = Meter()
        own = contender.run()
        found = meter.read() | dict(own or {})
    finally:
        gc.enable()
        contender.after()
    return found


def _row(name: str, turns: list[dict[str, float]], missing: str) -> Row:
    if missing:
        return Row(name=name, missing=missing)
    keys = turns[0] if turns else {}
    return Row(name=name, samples={key: tuple(turn[key] for turn in turns) for key in keys})
