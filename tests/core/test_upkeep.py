"""Quarantine and its end, roll-back, pins and holds, verification, retention: which of their records count."""

from __future__ import annotations

import pytest

from ckptd.history import judge
from ckptd.lineage import CRASH_LOOP_STARTS, candidates, in_crash_loop, lineage, resume_point
from ckptd.records import Body
from ckptd.state import RunState
from ckptd.upkeep_records import (
    CheckpointHeld,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReinstated,
    CheckpointReleased,
    CheckpointsPurged,
    CheckpointsRetired,
    CheckpointUnpinned,
    CheckpointVerified,
)
from ckptd.upkeep_records import RolledBack as RollBack
from ckptd.verdicts import Outcome
from tests.core.by_hand import LIVE, ME, B, committed, folded, opened, quarantined, ready, save, started

FIVE = tuple(committed(1, step) for step in (1, 2, 3, 4, 5))


def verified(*steps: int) -> tuple[Body, ...]:
    return tuple(CheckpointVerified(save=save(1, step), reader=ME) for step in steps)


def retired(*steps: int, turn: int = 0) -> CheckpointsRetired:
    return CheckpointsRetired(saves=tuple(save(1, step) for step in steps), turn=turn)


def outcome(state: RunState, body: Body) -> Outcome:
    return judge(state, body).outcome


def point(state: RunState) -> str | None:
    found = resume_point(state)
    return found.save if found is not None else None


# Quarantine and reinstatement.


def test_V12_a_person_may_quarantine_alone() -> None:
    body = CheckpointQuarantined(save=save(1, 5), ground="operator", who="ann", reason="diverged")
    state = folded(*LIVE, *FIVE, body)
    assert point(state) == save(1, 4)
    assert "operator" in candidates(state)[0].reason
    assert "diverged" in candidates(state)[0].reason


def test_V12_damage_needs_both_readings() -> None:
    with pytest.raises(ValueError, match="two readers"):
        CheckpointQuarantined(save=save(1, 5), ground="damage", reported_by=ME)


def test_V15_a_quarantine_can_be_taken_back_and_made_again() -> None:
    steps: list[Body] = [quarantined(save(1, 5))]
    back = CheckpointReinstated(save=save(1, 5), who="ann", turn=1)
    assert point(folded(*LIVE, *FIVE, *steps)) == save(1, 4)
    assert point(folded(*LIVE, *FIVE, *steps, back)) == save(1, 5)
    again = CheckpointQuarantined(save=save(1, 5), ground="operator", turn=2)
    assert point(folded(*LIVE, *FIVE, *steps, back, again)) == save(1, 4)


def test_V15_a_late_repeat_of_a_taken_back_quarantine_is_void() -> None:
    body = quarantined(save(1, 5))
    state = folded(*LIVE, *FIVE, body, CheckpointReinstated(save=save(1, 5), who="ann", turn=1))
    assert outcome(state, body) is Outcome.NEVER
    other = CheckpointQuarantined(save=save(1, 5), ground="operator", turn=0)
    assert outcome(state, other) is Outcome.NEVER


def test_V15_only_what_is_in_quarantine_is_reinstated() -> None:
    state = folded(*LIVE, *FIVE)
    assert outcome(state, CheckpointReinstated(save=save(1, 5), who="ann")) is Outcome.VOID


# Roll-back.


def test_V16_a_roll_back_moves_the_tip_and_ends_the_generation() -> None:
    state = folded(*LIVE, *FIVE, RollBack(to=save(1, 2), who="ann"))
    assert point(state) == save(1, 2)
    assert [c.step for c in lineage(state)] == [2, 1]
    assert outcome(state, committed(1, 6)) is Outcome.FENCED
    assert outcome(
        folded(*LIVE, *FIVE, RollBack(to=save(1, 2), who="ann"), opened(B)), started(2, B, save(1, 2))
    ) is (Outcome.ACCEPTED)


def test_V16_a_generation_that_is_starting_is_ended_too() -> None:
    starting = (*LIVE, *FIVE, opened(B), started(2, B, save(1, 5)))
    state = folded(*starting, RollBack(to=save(1, 2), who="ann"))
    assert outcome(state, ready(2, B)) is Outcome.FENCED


def test_V16_it_may_go_forward_again_to_what_was_left_behind() -> None:
    state = folded(*LIVE, *FIVE, RollBack(to=save(1, 2), who="ann"), RollBack(to=save(1, 5), who="ann", turn=1))
    assert point(state) == save(1, 5)


@pytest.mark.parametrize("spoil", [quarantined(save(1, 2)), None])
def test_V16_only_to_a_valid_checkpoint(spoil: Body | None) -> None:
    state = folded(*LIVE, *FIVE, *([spoil] if spoil else []))
    target = save(1, 2) if spoil else save(1, 9)
    assert outcome(state, RollBack(to=target, who="ann")) is Outcome.VOID


# Pins and holds.


@pytest.mark.parametrize(
    ("keep", "end"), [(CheckpointPinned, CheckpointUnpinned), (CheckpointHeld, CheckpointReleased)]
)
def test_V17_what_somebody_keeps_stays_until_the_last_one_lets_go(
    keep: type[CheckpointPinned | CheckpointHeld], end: type[CheckpointUnpinned | CheckpointReleased]
) -> None:
    base = (*LIVE, *FIVE, *verified(4, 5))
    first, second = keep(save=save(1, 1), who="ann"), keep(save=save(1, 1), who="bob")
    state = folded(*base, first, second, end(save=save(1, 1), who="ann", turn=1))
    assert outcome(state, retired(1)) is Outcome.VOID
    state = folded(*base, first, second, *(end(save=save(1, 1), who=who, turn=1) for who in ("ann", "bob")))
    assert outcome(state, retired(1)) is Outcome.ACCEPTED
    assert outcome(state, keep(save=save(1, 1), who="ann", turn=2)) is Outcome.ACCEPTED
    assert outcome(state, first) is Outcome.NEVER


def test_V17_what_is_retired_cannot_be_kept() -> None:
    state = folded(*LIVE, *FIVE, *verified(4, 5), retired(1))
    assert outcome(state, CheckpointPinned(save=save(1, 1), who="ann")) is Outcome.NEVER


# Retention.


def test_V18_retired_checkpoints_are_walked_past() -> None:
    state = folded(*LIVE, *FIVE, *verified(4, 5), retired(1, 2, 3))
    assert point(state) == save(1, 5)
    state = folded(*LIVE, *FIVE, *verified(1, 5), retired(2, 3, 4), quarantined(save(1, 5)))
    assert point(state) == save(1, 1)
    assert [c.reason.split()[0] for c in candidates(state)] == [
        "quarantined",
        "retired",
        "retired",
        "retired",
        "newest",
    ]


@pytest.mark.parametrize(
    ("seen", "steps"),
    [
        ((), (1,)),  # nothing is verified
        (verified(5), (1,)),  # one is not enough
        (verified(4, 5), (5,)),  # the resume point
        (verified(4, 5), (4,)),  # one of the two newest verified ones
        (verified(1, 5), (1,)),  # also if it is an old one
        (verified(4, 5), (1, 1)),
    ],
)
def test_V18_retention_leaves_the_resume_point_and_two_verified_ones(
    seen: tuple[Body, ...], steps: tuple[int, ...]
) -> None:
    assert outcome(folded(*LIVE, *FIVE, *seen), retired(*steps)) is not Outcome.ACCEPTED


def test_V18_a_quarantined_one_is_no_verified_one() -> None:
    state = folded(*LIVE, *FIVE, *verified(3, 4, 5), quarantined(save(1, 5)))
    assert outcome(state, retired(3)) is Outcome.VOID
    assert outcome(state, retired(1)) is Outcome.ACCEPTED


def test_V18_nothing_is_retired_while_a_generation_is_starting() -> None:
    starting = (*LIVE, *FIVE, *verified(4, 5), opened(B), started(2, B, save(1, 5)))
    assert outcome(folded(*starting), retired(1)) is Outcome.VOID
    assert outcome(folded(*starting, ready(2, B)), retired(1)) is Outcome.ACCEPTED
    rolled_back = RollBack(to=save(1, 2), who="ann")
    assert outcome(folded(*starting, ready(2, B), rolled_back), retired(1)) is Outcome.VOID


def test_V18_a_resume_verifies_what_it_resumed_from() -> None:
    state = folded(*LIVE, *FIVE, *verified(4), opened(B), started(2, B, save(1, 5)), ready(2, B))
    assert outcome(state, retired(1)) is Outcome.ACCEPTED


def test_V18_judged_by_the_reader_an_old_plan_is_void() -> None:
    """The plan was right when it was made; then the checkpoints it wanted to leave were given up."""
    plan = retired(3)
    assert outcome(folded(*LIVE, *FIVE, *verified(3, 4, 5)), plan) is Outcome.ACCEPTED
    late = folded(*LIVE, *FIVE, *verified(3, 4, 5), quarantined(save(1, 5)), quarantined(save(1, 4)), plan)
    assert point(late) == save(1, 3)


def test_V18_what_is_retired_stays_retired() -> None:
    state = folded(*LIVE, *FIVE, *verified(4, 5), retired(1))
    for body in (
        retired(1, turn=1),
        quarantined(save(1, 1)),
        CheckpointReinstated(save=save(1, 1), who="ann"),
    ):
        assert outcome(state, body) is Outcome.NEVER
    assert outcome(state, RollBack(to=save(1, 1), who="ann")) is Outcome.VOID


def test_V19_only_what_is_retired_is_purged_and_once() -> None:
    state = folded(*LIVE, *FIVE, *verified(4, 5), retired(1))
    purge = CheckpointsPurged(saves=(save(1, 1),))
    assert outcome(state, CheckpointsPurged(saves=(save(1, 2),))) is Outcome.VOID
    assert outcome(state, purge) is Outcome.ACCEPTED
    state = folded(*LIVE, *FIVE, *verified(4, 5), retired(1), purge)
    assert outcome(state, CheckpointsPurged(saves=(save(1, 1),), turn=1)) is Outcome.NEVER


def test_V18_who_is_reinstated_has_to_be_read_again() -> None:
    back = CheckpointReinstated(save=save(1, 4), who="ann", turn=1)
    before = (*LIVE, *FIVE, *verified(4, 5), quarantined(save(1, 4)), back)
    state = folded(*before)
    assert outcome(state, retired(1)) is Outcome.VOID
    late = CheckpointVerified(save=save(1, 4), reader=ME, turn=1)
    assert outcome(state, late) is Outcome.VOID  # read before it was given up
    read = CheckpointVerified(save=save(1, 4), reader=ME, turn=1, quarantines=2)
    assert outcome(folded(*before, read), retired(1)) is Outcome.ACCEPTED


def test_V18_a_start_does_not_verify_what_was_given_up_meanwhile() -> None:
    back = CheckpointReinstated(save=save(1, 5), who="ann", turn=1)
    starting = (*LIVE, *FIVE, *verified(4), opened(B), started(2, B, save(1, 5)))
    state = folded(*starting, quarantined(save(1, 5)), back, ready(2, B))
    assert outcome(state, retired(1)) is Outcome.VOID


# The crash loop.


def attempts(count: int, resume_from: str, first: int = 2) -> list[Body]:
    """So many incarnations that begin from `resume_from` and commit nothing."""
    found: list[Body] = []
    for number in range(first, first + count):
        name = f"{number:032x}"
        found += [opened(name), started(number, name, resume_from), ready(number, name)]
    return found


def doubt(name: str, turn: int = 0) -> CheckpointQuarantined:
    return CheckpointQuarantined(save=name, ground="crash-loop", reason="so many starts", turn=turn)


def test_V20_a_checkpoint_is_doubted_after_starts_that_came_to_nothing() -> None:
    few = folded(*LIVE, *FIVE, *attempts(CRASH_LOOP_STARTS - 1, save(1, 5)))
    assert in_crash_loop(few) is None
    assert outcome(few, doubt(save(1, 5))) is Outcome.VOID
    many = folded(*LIVE, *FIVE, *attempts(CRASH_LOOP_STARTS, save(1, 5)))
    assert in_crash_loop(many) == save(1, 5)
    assert outcome(many, doubt(save(1, 4))) is Outcome.VOID
    state = folded(*LIVE, *FIVE, *attempts(CRASH_LOOP_STARTS, save(1, 5)), doubt(save(1, 5)))
    assert point(state) == save(1, 4)


def test_V20_a_commit_ends_the_count() -> None:
    number = 1 + CRASH_LOOP_STARTS
    progress = committed(number, 6)
    state = folded(*LIVE, *FIVE, *attempts(CRASH_LOOP_STARTS, save(1, 5)), progress)
    assert in_crash_loop(state) is None
    assert outcome(state, doubt(save(1, 5))) is Outcome.VOID


def test_V20_the_only_checkpoint_is_never_doubted() -> None:
    state = folded(*LIVE, committed(1, 1), *attempts(CRASH_LOOP_STARTS + 3, save(1, 1)))
    assert in_crash_loop(state) is None


def test_V20_at_most_two_in_a_row_are_doubted() -> None:
    """Whatever is wrong is not in the checkpoints then."""
    bodies: list[Body] = [*LIVE, *FIVE]
    number = 2
    for step in (5, 4):
        bodies += [*attempts(CRASH_LOOP_STARTS, save(1, step), number), doubt(save(1, step))]
        number += CRASH_LOOP_STARTS
    bodies += attempts(CRASH_LOOP_STARTS * 2, save(1, 3), number)
    state = folded(*bodies)
    assert state.void == {}
    assert point(state) == save(1, 3)
    assert outcome(state, doubt(save(1, 3))) is Outcome.VOID


def test_V20_fallbacks_of_one_start_count_once() -> None:
    body = [opened(B), started(2, B, save(1, 5)), started(3, B, save(1, 5), fallback_of=2)]
    assert folded(*LIVE, *FIVE, *body).starts == {save(1, 5): 1}
