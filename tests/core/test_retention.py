"""Retention policies: pure, deterministic, and unable to take what must stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ckptd.history import judge
from ckptd.lineage import MIN_KEEP, min_keep, resume_point
from ckptd.records import Body
from ckptd.retention import Decision, Policy, plan
from ckptd.state import RunState
from ckptd.upkeep_records import CheckpointPinned, CheckpointsRetired, CheckpointVerified
from ckptd.upkeep_records import RolledBack as RollBack
from tests.core.by_hand import LIVE, ME, committed, folded, quarantined, save


def commits(*steps: int) -> tuple[Body, ...]:
    return tuple(committed(1, step) for step in steps)


def verified(*steps: int) -> tuple[Body, ...]:
    return tuple(CheckpointVerified(save=save(1, step), reader=ME) for step in steps)


def kept(state: RunState, policy: Policy) -> list[int]:
    return [decision.step for decision in plan(state, policy) if decision.keep]


def test_the_newest_stay_by_step_as_a_number() -> None:
    state = folded(*LIVE, *commits(9, 10, 100), *verified(10, 100))
    assert kept(state, Policy(keep_last=2)) == [10, 100]


def test_the_first_of_every_so_many_steps_stays_for_good() -> None:
    state = folded(*LIVE, *commits(*range(5, 100, 5)), *verified(90, 95))
    policy = Policy(keep_last=2, keep_every=30)
    assert kept(state, policy) == [5, 30, 60, 90, 95]
    gone = [d.save for d in plan(state, policy) if not d.keep]
    later = folded(*LIVE, *commits(*range(5, 100, 5)), *verified(90, 95), CheckpointsRetired(saves=tuple(gone)))
    assert kept(later, policy) == [5, 30, 60, 90, 95]


def test_every_decision_says_which_rule_made_it() -> None:
    state = folded(*LIVE, *commits(1, 2, 3, 4, 5, 6), *verified(2, 5), CheckpointPinned(save=save(1, 1), who="ann"))
    rules = {decision.step: decision.rule for decision in plan(state, Policy(keep_last=3))}
    assert rules == {
        1: "pinned by ann",
        2: "one of the 2 newest verified ones of the line",
        3: "no rule keeps it",
        4: "one of the last 3 of the line",
        5: "one of the 2 newest verified ones of the line",
        6: "the resume point",
    }


def test_what_a_roll_back_left_behind_does_not_go_at_once() -> None:
    state = folded(*LIVE, *commits(1, 2, 3, 4), *verified(1, 2), RollBack(to=save(1, 2), who="ann"))
    assert kept(state, Policy(keep_last=2)) == [1, 2, 3, 4]


def test_quarantined_ones_do_not_count_as_the_last_of_the_line() -> None:
    state = folded(*LIVE, *commits(1, 2, 3, 4), *verified(1, 2), quarantined(save(1, 4)), quarantined(save(1, 3)))
    assert kept(state, Policy(keep_last=2)) == [1, 2, 3, 4]


@pytest.mark.parametrize("values", [{"keep_last": 1}, {"keep_last": 0}, {"keep_last": -1}, {"keep_every": 0}])
def test_a_policy_that_keeps_too_little_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Policy(**values)


@given(
    steps=st.lists(st.integers(0, 200), min_size=1, max_size=30, unique=True).map(sorted),
    seen=st.sets(st.integers(0, 29)),
    bad=st.sets(st.integers(0, 29)),
    back=st.none() | st.integers(0, 29),
    keep_last=st.integers(2, 6),
    keep_every=st.none() | st.integers(1, 60),
)
def test_no_policy_takes_what_must_stay(
    steps: list[int], seen: set[int], bad: set[int], back: int | None, keep_last: int, keep_every: int | None
) -> None:
    chosen = [step for i, step in enumerate(steps) if i in seen]
    spoilt = [quarantined(save(1, step)) for i, step in enumerate(steps) if i in bad]
    turned = [RollBack(to=save(1, steps[back]), who="ann")] if back is not None and back < len(steps) else []
    state = folded(*LIVE, *commits(*steps), *verified(*chosen), *spoilt, *turned)
    policy = Policy(keep_last=keep_last, keep_every=keep_every)
    decisions = plan(state, policy)
    assert [d.save for d in decisions] == [save(1, step) for step in steps]
    assert plan(state, policy) == decisions
    gone = {d.save for d in decisions if not d.keep}
    point = resume_point(state)
    assert point is None or point.save not in gone
    assert not gone & set(min_keep(state))
    assert len(decisions) - len(gone) >= min(keep_last, len(steps))
    _carried_out(state, decisions, gone)


def _carried_out(state: RunState, decisions: list[Decision], gone: set[str]) -> None:
    """The verdict lets the plan pass whenever two verified ones are left and the generation runs."""
    if gone:
        verdict = judge(state, CheckpointsRetired(saves=tuple(d.save for d in decisions if not d.keep)))
        running = state.current is not None and state.current.ready and not state.current.closed
        assert verdict.accepted == (running and len(min_keep(state)) == MIN_KEEP)
