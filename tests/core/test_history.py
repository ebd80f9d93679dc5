"""The table of verdicts, row by row. Every rule is judged on records alone."""

from __future__ import annotations

import itertools
import random

import pytest

from ckptd.digests import sha256_hex
from ckptd.encoding import Record, encode, record
from ckptd.history import advance, fold, judge
from ckptd.lineage import candidates, lineage, resume_point
from ckptd.records import MAX_CANDIDATES, Body
from ckptd.state import RunState
from ckptd.verdicts import Outcome
from tests.core.by_hand import (
    LIVE,
    ME,
    START,
    A,
    B,
    C,
    aborted,
    committed,
    created,
    folded,
    opened,
    quarantined,
    ready,
    save,
    started,
    verdict,
)

ACCEPTED, VOID, NEVER, FENCED = Outcome.ACCEPTED, Outcome.VOID, Outcome.NEVER, Outcome.FENCED


def test_V1_the_run_is_created_in_slot_1_and_nowhere_else() -> None:
    assert verdict((), created()).outcome is ACCEPTED
    assert verdict((created(),), created()).outcome is NEVER
    assert verdict((opened(A),), created()).outcome is NEVER


@pytest.mark.parametrize(
    "body", [opened(A), started(1, A), ready(1, A), committed(1, 1), aborted(1, 1), quarantined(save(1, 1))]
)
def test_V1_nothing_counts_before_the_run_is_created(body: Body) -> None:
    assert verdict((), body).outcome is VOID
    assert verdict((opened(A),), body).outcome is VOID


def test_V2_an_attempt_counts_always_and_its_slot_is_its_age() -> None:
    state = folded(*LIVE, opened(B))
    assert (state.attempts[A].seq, state.attempts[B].seq) == (2, 5)
    assert verdict((*LIVE, opened(B)), opened(B)).outcome is NEVER


def test_V2_an_attempt_that_was_never_opened_does_not_begin() -> None:
    assert verdict((created(),), started(1, A)).outcome is VOID


def test_V2_a_younger_attempt_takes_over() -> None:
    assert verdict((*LIVE, opened(B)), started(2, B)).outcome is ACCEPTED


def test_V2_an_older_attempt_that_wakes_up_late_is_fenced() -> None:
    before = (created(), opened(A), opened(B), started(1, B))
    assert verdict(before, started(2, A)).outcome is FENCED


def test_V2_an_attempt_begins_once() -> None:
    assert verdict(START, started(2, A)).outcome is NEVER


@pytest.mark.parametrize(("number", "outcome"), [(1, VOID), (2, ACCEPTED), (3, VOID)])
def test_V3_generations_are_numbered_without_a_gap(number: int, outcome: Outcome) -> None:
    assert verdict((*LIVE, opened(B)), started(number, B)).outcome is outcome


@pytest.mark.parametrize(("number", "outcome"), [(1, ACCEPTED), (2, VOID)])
def test_V3_the_first_generation_is_1(number: int, outcome: Outcome) -> None:
    assert verdict((created(), opened(A)), started(number, A)).outcome is outcome


def test_V4_a_generation_counts_only_from_the_resume_point() -> None:
    before = (*LIVE, committed(1, 5), committed(1, 9), opened(B))
    assert verdict(before, started(2, B, save(1, 9))).outcome is ACCEPTED
    assert verdict(before, started(2, B, save(1, 5))).outcome is VOID
    assert verdict(before, started(2, B, None)).outcome is VOID
    assert verdict(before, started(2, B, save(1, 7))).outcome is VOID


def test_V4_the_resume_point_becomes_the_tip() -> None:
    state = folded(
        *LIVE, committed(1, 5), committed(1, 9), quarantined(save(1, 9)), opened(B), started(2, B, save(1, 5))
    )
    assert state.tip == save(1, 5)
    assert [c.step for c in lineage(state)] == [5]


def test_V5_a_run_starts_from_nothing_while_its_line_has_no_commit() -> None:
    assert verdict((created(), opened(A)), started(1, A)).outcome is ACCEPTED
    assert verdict((*LIVE, opened(B)), started(2, B)).outcome is ACCEPTED


def test_V5_a_run_whose_checkpoints_are_all_damaged_is_never_a_fresh_start() -> None:
    before = (*LIVE, committed(1, 5), quarantined(save(1, 5)), opened(B))
    assert verdict(before, started(2, B, None)).outcome is VOID
    assert resume_point(folded(*before)) is None


def test_V6_the_fallback_is_begun_by_the_current_attempt_while_it_is_not_ready() -> None:
    before = (*LIVE, committed(1, 5), opened(B), started(2, B, save(1, 5)))
    fallback = started(3, B, save(1, 5), fallback_of=2)
    assert verdict(before, fallback).outcome is ACCEPTED
    assert verdict((*before, ready(2, B)), fallback).outcome is NEVER
    assert verdict((*before, opened(C)), started(3, C, save(1, 5), fallback_of=2)).outcome is NEVER
    assert verdict(
        (*before, opened(C), started(3, C, save(1, 5))), started(4, B, save(1, 5), fallback_of=2)
    ).outcome is (FENCED)
    assert verdict((created(), opened(A)), started(1, A, fallback_of=1)).outcome is VOID


def test_V6_the_resume_point_never_moves_inside_a_generation() -> None:
    bodies = (*LIVE, committed(1, 5), committed(1, 9), opened(B), started(2, B, save(1, 9)), quarantined(save(1, 9)))
    state = folded(*bodies)
    assert state.current is not None
    assert state.current.resume_from == save(1, 9)
    state = folded(*bodies, started(3, B, save(1, 5), fallback_of=2))
    assert [g.resume_from for g in state.generations] == [None, save(1, 9), save(1, 5)]


def test_V7_no_commit_before_ready() -> None:
    assert verdict(START, committed(1, 1)).outcome is VOID
    assert verdict(LIVE, committed(1, 1)).outcome is ACCEPTED
    assert verdict((*LIVE, opened(B), started(2, B)), committed(2, 1)).outcome is VOID


def test_V7_only_its_own_attempt_declares_a_generation_ready() -> None:
    assert verdict((*START, opened(B)), ready(1, B)).outcome is NEVER
    assert verdict(START, ready(2, A)).outcome is VOID
    assert verdict((*START, opened(B), started(2, B)), ready(1, A)).outcome is FENCED
    assert verdict(LIVE, ready(1, A)).outcome is NEVER


def test_V8_no_commit_after_a_younger_generation_started() -> None:
    before = (*LIVE, opened(B), started(2, B))
    assert verdict(before, committed(1, 1)).outcome is FENCED
    assert verdict((*before, ready(2, B)), committed(1, 1)).outcome is FENCED
    assert verdict((*before, ready(2, B)), aborted(1, 1)).outcome is FENCED
    assert verdict((*before, ready(2, B)), committed(3, 1)).outcome is VOID


def test_V8_an_attempt_that_only_opened_fences_nobody() -> None:
    assert verdict((*LIVE, opened(B)), committed(1, 1)).outcome is ACCEPTED


def test_V8_the_fence_is_with_the_reader() -> None:
    """A commit that lies in the log behind the fence, however it came there, does not count for anybody."""
    state = folded(*LIVE, committed(1, 5), opened(B), started(2, B, save(1, 5)), committed(1, 9))
    assert list(state.checkpoints) == [save(1, 5)]
    assert state.tip == save(1, 5)
    assert "generation 2 started" in state.void[8]


def test_V9_a_save_is_committed_once_and_an_aborted_one_never() -> None:
    assert verdict((*LIVE, committed(1, 5)), committed(1, 5)).outcome is NEVER
    assert verdict((*LIVE, committed(1, 5)), committed(1, 5, content="other")).outcome is NEVER
    assert verdict((*LIVE, aborted(1, 5)), committed(1, 5)).outcome is NEVER
    assert verdict((*LIVE, committed(1, 5)), aborted(1, 5)).outcome is NEVER
    assert verdict((*LIVE, aborted(1, 5)), committed(1, 5, 2)).outcome is ACCEPTED


@pytest.mark.parametrize(("step", "outcome"), [(4, NEVER), (5, ACCEPTED), (6, ACCEPTED)])
def test_V10_a_step_is_not_below_the_tips(step: int, outcome: Outcome) -> None:
    assert verdict((*LIVE, committed(1, 5)), committed(1, step, 2)).outcome is outcome


def test_V10_a_second_save_of_a_step_follows_the_first() -> None:
    state = folded(*LIVE, committed(1, 5), committed(1, 5, 2))
    assert [c.save for c in lineage(state)] == [save(1, 5, 2), save(1, 5, 1)]


def test_V11_the_resume_point_is_the_first_valid_one_of_the_line() -> None:
    bodies: tuple[Body, ...] = (*LIVE, committed(1, 5), committed(1, 7), committed(1, 9))
    for damaged, step in [((), 9), ((9,), 7), ((9, 7), 5), ((7,), 9), ((9, 5), 7)]:
        point = resume_point(folded(*bodies, *(quarantined(save(1, s)) for s in damaged)))
        assert point is not None
        assert point.step == step, damaged


def test_V11_a_line_that_was_left_behind_never_comes_back() -> None:
    """Steps 7 and 9 were damaged when training went on from 5: the line is 5, 6 and no higher step."""
    bodies = (
        *LIVE,
        *(committed(1, step) for step in (5, 7, 9)),
        quarantined(save(1, 9)),
        quarantined(save(1, 7)),
        opened(B),
        started(2, B, save(1, 5)),
        ready(2, B),
        committed(2, 6),
    )
    state = folded(*bodies)
    assert [c.step for c in lineage(state)] == [6, 5]
    point = resume_point(folded(*bodies, quarantined(save(2, 6))))
    assert point is not None
    assert point.step == 5


def test_V11_each_candidate_passed_over_has_a_reason() -> None:
    state = folded(*LIVE, committed(1, 5), committed(1, 9), quarantined(save(1, 9)))
    damaged, valid = candidates(state)
    assert (damaged.step, damaged.valid, valid.step, valid.valid) == (9, False, 5, True)
    assert "some object, expected aa, observed bb" in damaged.reason


def test_V11_of_many_candidates_the_last_are_told() -> None:
    steps = range(1, 2 * MAX_CANDIDATES)
    state = folded(*LIVE, *(committed(1, s) for s in steps), *(quarantined(save(1, s)) for s in steps if s > 1))
    found = candidates(state)
    assert [c.step for c in found] == list(range(MAX_CANDIDATES, 0, -1))
    assert found[-1].valid


def test_V12_quarantine_wants_two_readers() -> None:
    before = (*LIVE, committed(1, 5))
    assert verdict(before, quarantined(save(1, 5))).outcome is ACCEPTED
    assert verdict(before, quarantined(save(1, 5), confirmed_by=ME)).outcome is VOID
    assert verdict(before, quarantined(save(1, 6))).outcome is VOID
    assert verdict((*before, quarantined(save(1, 5))), quarantined(save(1, 5))).outcome is NEVER


def test_V12_quarantine_deletes_nothing() -> None:
    state = folded(*LIVE, committed(1, 5), quarantined(save(1, 5)))
    assert save(1, 5) in state.checkpoints
    assert state.tip == save(1, 5)


def test_V13_a_void_record_changes_nothing_and_is_counted() -> None:
    before, after = folded(*LIVE, committed(1, 5)), folded(*LIVE, committed(1, 5), committed(1, 4))
    assert list(after.void) == [6]
    assert "before step 5" in after.void[6]
    assert after.checkpoints == before.checkpoints
    assert (after.tip, after.accepted, after.seq) == (before.tip, before.accepted, before.seq + 1)


def _random_records(seed: int) -> list[tuple[Record, str]]:
    """A log of bodies drawn without regard for whether they count."""
    dice, records, digest = random.Random(seed), [], RunState().digest
    attempts = [A, B, C]
    for seq in range(1, 60):
        generation, step, attempt = dice.randint(1, 4), dice.randint(1, 5), dice.choice(attempts)
        point = dice.choice([None, save(generation, step)])
        choices: list[Body] = [
            opened(attempt),
            started(generation, attempt, point),
            started(generation, attempt, point, fallback_of=dice.randint(1, 3)),
            ready(generation, attempt),
            committed(generation, step, dice.randint(1, 2)),
            aborted(generation, step, dice.randint(1, 2)),
            quarantined(save(generation, step)),
        ]
        body: Body = created() if seq == 1 else dice.choice(choices)
        item = record(seq, digest, body, actor=f"actor {seq}", time=f"{seq}")
        digest = sha256_hex(encode(item))
        records.append((item, digest))
    return records


@pytest.mark.parametrize("seed", range(20))
def test_V14_a_verdict_depends_on_the_records_before_it_alone(seed: int) -> None:
    """Whoever folds a prefix, in whatever pieces, comes to the same state and verdicts."""
    records = _random_records(seed)
    whole, verdicts = RunState(), []
    for item, digest in records:
        asked_before = judge(whole, item.body)
        verdicts.append(advance(whole, item, digest))
        assert asked_before == verdicts[-1]
    for end in range(0, len(records), 7):
        state = fold(records[:end])
        again = [advance(state, item, digest) for item, digest in records[end:]]
        assert again == verdicts[end:]
        assert state == whole
    assert len(whole.accepted) + len(whole.void) == len(records)


@pytest.mark.parametrize("seed", range(20))
def test_A2_what_is_final_is_never_accepted_by_a_later_state(seed: int) -> None:
    """The verdicts that an append may refuse with, checked against all that can follow."""
    records = _random_records(seed)
    bodies = [item.body for item, _ in records]
    state, refused = RunState(), set[int]()
    for item, digest in records:
        now = {index: judge(state, body) for index, body in enumerate(bodies)}
        for index, found in now.items():
            already = bodies[index].rid in state.accepted
            assert not (index in refused and found.accepted), (bodies[index], found)
            if found.final and not already:
                refused.add(index)
        advance(state, item, digest)


def test_every_void_reason_is_a_sentence() -> None:
    for seed in range(20):
        state = fold(_random_records(seed))
        assert all(len(reason) > 10 for reason in state.void.values())


def test_a_body_without_a_rule_is_a_fault() -> None:
    class Strange(Body):
        kind = "strange"

        @property
        def rid(self) -> str:
            return "strange"

    with pytest.raises(TypeError, match="no rule for Strange"):
        judge(folded(*LIVE), Strange())


def test_generations_follow_the_age_of_their_attempts() -> None:
    """Of all orders in which three attempts may open and begin, the numbers follow the age."""
    for order in itertools.permutations((A, B, C)):
        state = folded(created(), opened(A), opened(B), opened(C))
        begun: list[str] = []
        for attempt in order:
            body = started(len(begun) + 1, attempt)
            if judge(state, body).accepted:
                begun.append(attempt)
                item = record(state.seq + 1, state.digest, body, actor="hand", time="never")
                advance(state, item, sha256_hex(encode(item)))
        assert begun == sorted(begun)
        assert begun[0] == order[0]
