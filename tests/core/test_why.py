"""Why a run is where it is: each reason that there can be, told of a real history."""

from __future__ import annotations

import pytest

from ckptd import layout
from ckptd.errors import NotFound
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.lineage import CRASH_LOOP_STARTS
from ckptd.records import Damage
from ckptd.retaining import RetainRequest, retain
from ckptd.second import read_here
from ckptd.storage.memory import MemoryStorage
from ckptd.why import why
from ckptd.wire import DamageReport
from tests.core.by_hand import ME, RUN, A, B, C, HandLog, a_ledger, beginning, live, opening, ready, save, write_save


@pytest.fixture
def ledger() -> Ledger:
    ledger = a_ledger(MemoryStorage())
    live(ledger)
    return ledger


@pytest.fixture
def keeper(ledger: Ledger) -> Keeper:
    return Keeper(ledger, reader=read_here)


def commit(ledger: Ledger, *steps: int, generation: int = 1) -> None:
    for step in steps:
        ledger.commit(RUN, write_save(ledger.storage, generation, step))


def test_a_run_that_only_trains(ledger: Ledger) -> None:
    commit(ledger, 1, 2)
    found = why(ledger, RUN)
    assert [(t.checkpoint.step, t.verdict) for t in found.line] == [(2, "resume"), (1, "older")]
    assert found.beside == ()
    assert (found.void_records, found.next_start) == (0, "")
    assert found.generation is not None
    told = found.generation
    assert (told.generation, told.job, told.host) == (1, "job", "host")
    assert (told.state, told.resume_step) == ("training", None)


def test_a_run_before_anything_was_committed_and_one_that_is_none(ledger: Ledger) -> None:
    assert why(ledger, RUN).latest.answer == "none"
    ledger.open("other", opening(A))
    assert why(ledger, "other").generation is None
    with pytest.raises(NotFound):
        why(ledger, "nothing")


def test_what_a_roll_back_left_behind_says_who_did_it(ledger: Ledger, keeper: Keeper) -> None:
    commit(ledger, 1, 2, 3)
    keeper.rollback(RUN, save(1, 1), who="ann", reason="the loss explodes")
    assert why(ledger, RUN).generation.state == "rolled back"  # type: ignore[union-attr]
    live(ledger, B)
    commit(ledger, 2, generation=2)
    found = why(ledger, RUN)
    assert [t.checkpoint.save for t in found.line] == [save(2, 2), save(1, 1)]
    assert [t.checkpoint.step for t in found.beside] == [3, 2]
    assert all(t.verdict == "left" for t in found.beside)
    slot = ledger.state(RUN).accepted[f"rollback:0:{save(1, 1)}"]
    reason = f"left behind in slot {slot}: rolled back to step 1 by ann: the loss explodes"
    assert {t.reason for t in found.beside} == {reason}
    keeper.rollback(RUN, save(1, 3), who="bob", reason="")
    found = why(ledger, RUN)
    assert [t.checkpoint.save for t in found.line] == [save(1, 3), save(1, 2), save(1, 1)]
    assert [(t.checkpoint.save, "by bob" in t.reason) for t in found.beside] == [(save(2, 2), True)]


def test_damage_is_told_with_its_readers_on_the_line_and_after_it_was_left(ledger: Ledger) -> None:
    commit(ledger, 1, 2)
    folder = layout.payload_folder(RUN, save(1, 2))
    key = f"{folder}/{ledger.storage.list(folder)[0]}"
    ledger.storage.delete(key)
    glanced = why(ledger, RUN)
    assert [(t.checkpoint.step, t.verdict) for t in glanced.line] == [(2, "no"), (1, "resume")]
    assert "the next start will quarantine it" in glanced.line[0].reason
    damage = Damage(object=key, expected="x", observed="y")
    assert ledger.report_damage(RUN, DamageReport(save=save(1, 2), damage=damage, reader=ME)).confirmed
    reason = why(ledger, RUN).line[0].reason
    assert "in quarantine for damage, read by pid 1 on one and pid 2 on two: " in reason
    assert key in reason
    live(ledger, B)
    (left,) = why(ledger, RUN).beside
    assert "generation 2 started from step 1; in quarantine for damage, read by pid 1 on one" in left.reason


def test_a_persons_quarantine_and_what_was_retired(ledger: Ledger, keeper: Keeper) -> None:
    commit(ledger, 1, 2, 3, 4)
    retain(keeper, RUN, RetainRequest(keep_last=2))
    keeper.quarantine(RUN, save(1, 4), who="ann", reason="diverged")
    reasons = [t.reason for t in why(ledger, RUN).line]
    assert reasons[0] == "in quarantine (operator by ann): diverged"
    assert reasons[1] == "the newest valid checkpoint of the line"
    assert all("retired in slot" in reason and "bytes were collected" in reason for reason in reasons[2:])
    keeper.quarantine(RUN, save(1, 3), who="ann", reason="")
    assert why(ledger, RUN).latest.answer == "corrupt"


def test_a_crash_loop_is_told_before_and_when_it_is_one(ledger: Ledger) -> None:
    commit(ledger, 1, 2)
    for number in range(CRASH_LOOP_STARTS):
        attempt = f"{number + 1:032x}"
        ledger.open(RUN, opening(attempt))
        ledger.begin(RUN, beginning(attempt))
        found = why(ledger, RUN)
        assert found.line[0].starts == number + 1
        assert found.next_start.startswith(f"{number + 1} generations started from {save(1, 2)}")
        doubted = number + 1 == CRASH_LOOP_STARTS
        assert ("the next start puts it in quarantine" in found.next_start) == doubted
        assert found.generation is not None
        assert found.generation.state == "loading"


def test_a_crash_loop_of_the_only_checkpoint(ledger: Ledger) -> None:
    commit(ledger, 1)
    for number in range(CRASH_LOOP_STARTS):
        ledger.open(RUN, opening(f"{number + 1:032x}"))
        ledger.begin(RUN, beginning(f"{number + 1:032x}"))
    assert "no other on its line, so it stays" in why(ledger, RUN).next_start


def test_records_that_did_not_count_are_listed_with_their_reasons(ledger: Ledger) -> None:
    ledger.open(RUN, opening(C))
    slot = HandLog(ledger.storage).add(ready(1, C))
    found = why(ledger, RUN)
    assert found.void_records == 1
    assert [(void.slot, void.reason) for void in found.void] == [(slot, "generation 1 is another attempt's")]
