"""`python -m tests.model [--deep] [--weakened]`: search all states and say how many there were."""

from __future__ import annotations

import argparse
import sys
import time

from tests.model.configurations import CONFIGURATIONS, DEEP
from tests.model.machine import Machine
from tests.model.rules import Rules
from tests.model.search import explore
from tests.model.slots import SlotMachine, Ways, say_slot
from tests.model.telling import say
from tests.model.weakened import VARIANTS


def _line(name: str, states: int, depth: int, seconds: float, broken: str) -> None:
    rate = states / max(seconds, 0.001)
    verdict = broken or "OK"
    print(f"{name:12}{states:9} states, {depth:3} deep {seconds:7.1f} s {rate:8.0f}/s  {verdict}", flush=True)


def protocol(*, deep: bool) -> bool:
    """The whole protocol holds."""
    slots = explore(SlotMachine(Ways(), 4 if deep else 3))
    _line("slots", slots.states, slots.depth, slots.seconds, slots.broken)
    holds = not slots.broken
    if slots.broken:
        print(slots.told(say_slot))
    for name, bounds in (DEEP if deep else CONFIGURATIONS).items():
        found = explore(Machine(Rules(), bounds))
        _line(name, found.states, found.depth, found.seconds, found.broken)
        if found.broken:
            print(found.told(say))
            holds = False
    return holds


def weakened() -> bool:
    """Each weakened variant is caught; prints its shortest trace."""
    caught = True
    for variant in VARIANTS:
        invariant, told = variant.search()
        print(f"\n{variant.name} ({variant.rule})\n{told}", flush=True)
        caught = caught and invariant == variant.breaks
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="wider bounds, minutes instead of seconds")
    parser.add_argument("--weakened", action="store_true", help="the weakened variants, with their traces")
    chosen = parser.parse_args()
    began = time.perf_counter()
    holds = weakened() if chosen.weakened else protocol(deep=chosen.deep)
    print(f"{'OK' if holds else 'BROKEN'} after {time.perf_counter() - began:.0f} s")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
