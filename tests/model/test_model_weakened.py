"""The model can fail: each rule is taken away in turn, and the invariant that it is there for breaks."""

from __future__ import annotations

import pytest

from tests.model.machine import Machine
from tests.model.rules import Rules
from tests.model.search import explore
from tests.model.slots import Ways
from tests.model.states import Bounds
from tests.model.telling import say
from tests.model.weakened import VARIANTS, Variant

BOUNDS = {variant.bounds: variant.name for variant in VARIANTS if variant.bounds is not None}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_weakened_protocol_is_caught(variant: Variant) -> None:
    invariant, told = variant.search()
    print(told)
    assert invariant == variant.breaks, "\n" + told


@pytest.mark.parametrize("bounds", BOUNDS, ids=BOUNDS.values())
def test_the_whole_protocol_holds_where_a_weakened_one_does_not(bounds: Bounds) -> None:
    found = explore(Machine(Rules(), bounds))
    assert not found.broken, "\n" + found.told(say)


def test_each_rule_of_the_model_is_taken_away_once() -> None:
    whole, ways = Rules(), Ways()
    for field in Rules._fields:
        changed = [v.name for v in VARIANTS if getattr(v.rules, field) != getattr(whole, field)]
        assert len(changed) == 1 or field in ("crash_loop_starts", "max_doubts"), f"{field}: {changed}"
    for field in Ways._fields:
        assert [v.name for v in VARIANTS if getattr(v.ways, field) != getattr(ways, field)], field
