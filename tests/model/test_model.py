"""The protocol holds on every state of the model.

| configuration | what happens in it | invariants |
|---|---|---|
| slots | puts that land late, twice or never; lost answers; old lists; replicas | I1 I2 I3 I5 I6 I7 |
| starts | incarnations in any order, two ranks each, a fallback, zombies | I5 I7 I8 I9 I10 I11 I15 I16 I17 I18 |
| quarantine | damage, repair, a faulty reader, reinstating, loading | I5 I7 I8 I9 I10 I11 I16 I17 I18 I19 I21 |
| crash loops | starts that come to nothing, reinstating, a roll-back | I5 I7 I8 I10 I11 I16 I17 I18 I21 |
| retention | damage at birth and later, verification, retirement, starts | I5 I7 I8 I10 I13 I14 I15 I16 I17 I21 |
| people | quarantine by a person, reinstating, a roll-back, pins, retirement | I5 I7 I8 I10 I13 I14 I16 I17 I21 |
| collection | payload, late uploads, aborts, retirement, old collectors | I5 I7 I8 I10 I12 I13 I14 I15 I16 I17 |
| borrowing | payload, late uploads, checkpoints that need another's, retirement, old collectors | as collection |

I4 holds by construction: the model folds bytes and nothing else. I6: what counts is in the log for good. I18: every
start may also be built by a reader that took an error for "none". I20 and I22 are no matter of order, and I21 is here
that damage can be quarantined and that one damaged checkpoint leaves a run something to start from.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.model.configurations import CONFIGURATIONS
from tests.model.machine import Machine
from tests.model.rules import Fold, Kind, Rules
from tests.model.search import explore
from tests.model.slots import SlotMachine, Ways, say_slot
from tests.model.states import Bounds
from tests.model.telling import say

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_protocol_holds_on_every_state(name: str) -> None:
    machine = Machine(Rules(), CONFIGURATIONS[name])
    found = explore(machine)
    print(f"{name}: {found.states} states, {found.depth} deep, {found.seconds:.1f} s")
    assert not found.broken, "\n" + found.told(say)
    assert found.states > 1000
    missing = _wanted(CONFIGURATIONS[name]) - _met(machine.logs.folds)
    assert not missing, f"the bounds leave out {missing}"


def test_the_log_holds_slot_by_slot() -> None:
    found = explore(SlotMachine(Ways()))
    print(f"slots: {found.states} states, {found.depth} deep, {found.seconds:.1f} s")
    assert not found.broken, "\n" + found.told(say_slot)
    assert found.states > 1000


def test_old_readers_are_covered_by_induction() -> None:
    """With each log's own past and with logs merged: neither finds anything, and both meet the same folds."""
    bounds = Bounds(fallbacks=1, saves=2, ranks=True)
    apart, merged = Machine(Rules(), bounds, merged=False), Machine(Rules(), bounds)
    found = explore(apart)
    assert not found.broken, "\n" + found.told(say)
    assert not explore(merged).broken
    assert set(apart.logs.folds) == set(merged.logs.folds)


def test_the_model_is_a_second_opinion() -> None:
    """It shares no line with what it is about: the two modules that compare them import both, and nothing them."""
    for path in set(HERE.glob("*.py")) - {HERE / "bodies.py", HERE / "test_against_history.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                text = ast.unparse(node)
                assert not re.search(r"\bckptd|\bbodies|against_history", text), f"{path.name}: {text}"


def _wanted(bounds: Bounds) -> set[Kind | str]:
    """What must have happened on some path, or the search proves nothing about it."""
    optional: dict[Kind | str, bool] = {
        Kind.ABORTED: bounds.aborts,
        Kind.QUARANTINED: bounds.quarantines > 0,
        Kind.REINSTATED: bounds.reinstates > 0,
        Kind.ROLLED_BACK: bounds.rollbacks > 0,
        Kind.VERIFIED: bounds.verifies,
        Kind.PINNED: bounds.pins > 0,
        Kind.RETIRED: bounds.retires > 0,
        Kind.PURGED: bounds.objects,
        "borrowed": bounds.borrows > 0,
        "fallback": bounds.fallbacks > 0,
        "crash loop": bounds.crash_loops,
    }
    return {Kind.STARTED, Kind.READY, Kind.COMMITTED} | {kind for kind, wanted in optional.items() if wanted}


def _met(folds: list[Fold]) -> set[Kind | str]:
    last_generations = [fold.generations[-1] for fold in folds if fold.generations]
    shown: dict[Kind | str, bool] = {
        Kind.STARTED: any(len(fold.generations) > 1 for fold in folds),
        Kind.READY: any(generation.ready for generation in last_generations),
        Kind.COMMITTED: any(len(fold.parents) > 1 for fold in folds),
        Kind.ABORTED: any(fold.aborted for fold in folds),
        Kind.QUARANTINED: any(fold.quarantined for fold in folds),
        Kind.REINSTATED: any(turn == 2 for fold in folds for turn in fold.turns),
        Kind.ROLLED_BACK: any(generation.closed for generation in last_generations),
        Kind.VERIFIED: any(fold.verified for fold in folds),
        Kind.PINNED: any(fold.pinned for fold in folds),
        Kind.RETIRED: any(fold.retired for fold in folds),
        Kind.PURGED: any(fold.purged for fold in folds),
        "borrowed": any(fold.lenders for fold in folds),
        "fallback": any(generation.fallback_of for generation in last_generations),
        "crash loop": any(fold.doubts for fold in folds),
    }
    return {kind for kind, met in shown.items() if met}
