"""Closing a run and reopening it: what is fenced, what does not start, and what goes on."""

from __future__ import annotations

import pytest

from ckptd.errors import Conflict, Fenced, NotFound
from ckptd.fsck import fsck
from ckptd.history import judge
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.lineage import resume_point
from ckptd.records import Body
from ckptd.retaining import RetainRequest, retain
from ckptd.second import Reading, read_here
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.upkeep_records import CheckpointPinned, CheckpointsRetired, CheckpointVerified, RunClosed, RunReopened
from ckptd.verdicts import Outcome
from ckptd.why import why
from tests.core.by_hand import (
    LIVE,
    ME,
    OTHER,
    RUN,
    A,
    B,
    a_ledger,
    aborted,
    beginning,
    committed,
    folded,
    live,
    opened,
    opening,
    quarantined,
    ready,
    save,
    started,
    write_save,
)

FIVE = tuple(committed(1, step) for step in (1, 2, 3, 4, 5))
CLOSED = RunClosed(who="ann", reason="it is trained")
REOPENED = RunReopened(who="ann", turn=1)
VERIFIED = tuple(CheckpointVerified(save=save(1, step), reader=ME) for step in (4, 5))


def outcome(before: tuple[Body, ...], body: Body) -> Outcome:
    return judge(folded(*before), body).outcome


@pytest.fixture
def ledger() -> Ledger:
    return a_ledger(MemoryStorage())


@pytest.fixture
def keeper(ledger: Ledger) -> Keeper:
    third = OTHER.model_copy(update={"process": "pid 3"})
    return Keeper(ledger, reader=lambda storage, ref: Reading(reader=third, damage=read_here(storage, ref).damage))


@pytest.mark.parametrize("body", [committed(1, 6), aborted(1, 6)])
def test_V22_a_closed_run_takes_nothing_of_the_generation_that_was_running(body: Body) -> None:
    assert outcome((*LIVE, *FIVE), body) is Outcome.ACCEPTED
    assert outcome((*LIVE, *FIVE, CLOSED), body) is Outcome.FENCED
    assert outcome((*LIVE, *FIVE, CLOSED, REOPENED), body) is Outcome.FENCED


def test_V22_a_generation_that_is_starting_is_ended_too() -> None:
    starting = (*LIVE, *FIVE, opened(B), started(2, B, save(1, 5)), CLOSED)
    assert outcome(starting, ready(2, B)) is Outcome.FENCED
    fallback = started(3, B, save(1, 5), fallback_of=2)
    assert outcome(starting, fallback) is Outcome.VOID


def test_V22_nothing_starts_until_the_run_is_reopened() -> None:
    body = started(2, B, save(1, 5))
    assert outcome((*LIVE, *FIVE, CLOSED, opened(B)), body) is Outcome.VOID
    assert outcome((*LIVE, *FIVE, CLOSED, opened(B), REOPENED), body) is Outcome.ACCEPTED
    assert outcome((*LIVE, *FIVE, CLOSED, REOPENED), started(2, A, save(1, 5))) is Outcome.NEVER  # the job of before


def test_V22_closing_and_reopening_take_turns() -> None:
    assert outcome(LIVE, REOPENED.model_copy(update={"turn": 0})) is Outcome.VOID
    assert outcome((*LIVE, CLOSED), CLOSED) is Outcome.NEVER
    assert outcome((*LIVE, CLOSED), CLOSED.model_copy(update={"turn": 1})) is Outcome.VOID
    assert outcome((*LIVE, CLOSED, REOPENED), CLOSED) is Outcome.NEVER
    assert outcome((*LIVE, CLOSED, REOPENED), CLOSED.model_copy(update={"turn": 2})) is Outcome.ACCEPTED


def test_V22_the_line_stays_as_it_was() -> None:
    for bodies in ((CLOSED,), (CLOSED, REOPENED)):
        point = resume_point(folded(*LIVE, *FIVE, *bodies))
        assert point is not None
        assert point.save == save(1, 5)


@pytest.mark.parametrize(
    "body",
    [
        CheckpointPinned(save=save(1, 1), who="ann"),
        CheckpointVerified(save=save(1, 3), reader=ME),
        quarantined(save(1, 5)),
        CheckpointsRetired(saves=(save(1, 1),)),
    ],
    ids=lambda body: body.kind,
)
def test_V22_upkeep_goes_on_in_a_closed_run(body: Body) -> None:
    assert outcome((*LIVE, *FIVE, *VERIFIED, CLOSED), body) is Outcome.ACCEPTED


def test_V22_after_reopening_nothing_is_retired_before_a_generation_is_ready() -> None:
    before = (*LIVE, *FIVE, *VERIFIED, CLOSED, REOPENED)
    retired = CheckpointsRetired(saves=(save(1, 1),))
    assert outcome(before, retired) is Outcome.VOID
    begun = (*before, opened(B), started(2, B, save(1, 5)))
    assert outcome(begun, retired) is Outcome.VOID
    assert outcome((*begun, ready(2, B)), retired) is Outcome.ACCEPTED


def test_V22_an_old_plan_to_retire_is_void_in_a_reopened_run_that_is_starting() -> None:
    """The plan was right while the run was closed; then somebody started."""
    plan = CheckpointsRetired(saves=(save(1, 5),))
    assert outcome((*LIVE, *FIVE, *VERIFIED, CLOSED), plan) is Outcome.VOID  # the resume point stays in any case


def test_V22_a_job_is_fenced_and_a_start_is_told_how_to_reopen(ledger: Ledger, keeper: Keeper) -> None:
    live(ledger)
    for step in (1, 2, 3):
        ledger.commit(RUN, write_save(ledger.storage, 1, step))
    for _ in range(2):
        keeper.close(RUN, who="ann", reason="it is trained")
    assert ledger.current(RUN).ended == "closed"
    late = write_save(ledger.storage, 1, 4)
    with pytest.raises(Fenced, match="was closed"):
        ledger.commit(RUN, late)
    assert ledger.save_status(RUN, late.save).detail == "the run was closed before it"
    ledger.open(RUN, opening(B))
    with pytest.raises(Conflict, match="closed by ann: it is trained") as refusal:
        ledger.begin(RUN, beginning(B))
    assert refusal.value.do.startswith(f"`ckptd reopen {RUN}`")
    assert not refusal.value.fields["final"]
    assert why(ledger, RUN).closed == "closed by ann: it is trained"
    assert (ledger.run_info(RUN).closed, ledger.latest(RUN).answer) == (True, "found")
    for _ in range(2):
        keeper.reopen(RUN, who="bob", reason="")
    answer = ledger.begin(RUN, beginning(B))
    assert (answer.generation, answer.checkpoint and answer.checkpoint.step) == (2, 3)
    assert (ledger.current(RUN).ended, why(ledger, RUN).closed, ledger.run_info(RUN).closed) == ("", "", False)
    assert ledger.state(RUN).void == {}
    Auditor(ledger.storage, RUN).assert_clean(acknowledged=[1, 2, 3])


def test_V22_a_start_that_began_before_is_told_its_answer_again(ledger: Ledger, keeper: Keeper) -> None:
    """Its first answer was lost; then the run was closed. It hears what it had begun, and that it is ended."""
    ledger.open(RUN, opening(A))
    answer = ledger.begin(RUN, beginning(A))
    keeper.close(RUN, who="ann", reason="")
    assert ledger.begin(RUN, beginning(A)) == answer
    with pytest.raises(Fenced, match="was closed"):
        ledger.ready(RUN, A, answer.generation)


def test_K2_what_a_closed_run_left_uncommitted_is_collected(ledger: Ledger, keeper: Keeper) -> None:
    live(ledger)
    for step in (1, 2, 3):
        ledger.commit(RUN, write_save(ledger.storage, 1, step))
    write_save(ledger.storage, 1, 4)
    assert keeper.collect(RUN).objects == 0
    keeper.close(RUN, who="ann", reason="")
    answer = retain(keeper, RUN, RetainRequest(keep_last=2))
    assert answer.purged == (save(1, 1),)
    assert fsck(ledger.storage, RUN, deep=True).findings == ()
    Auditor(ledger.storage, RUN).assert_clean(acknowledged=[2, 3])


def test_only_a_run_that_exists_is_closed(keeper: Keeper) -> None:
    with pytest.raises(NotFound, match="no run"):
        keeper.close("nobody", who="ann", reason="")
