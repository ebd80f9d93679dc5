"""The auditor finds what is wrong, and nothing else. The wrong runs are made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd import history, layout, lineage
from ckptd.encoding import sealed
from ckptd.errors import Unavailable
from ckptd.keeper import Keeper
from ckptd.manifest import Manifest
from ckptd.records import Body
from ckptd.retaining import RetainRequest, retain
from ckptd.state import Checkpoint, RunState
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryReader, MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faulty import FaultyStorage
from ckptd.upkeep_records import CheckpointsPurged, CheckpointsRetired, RunClosed, RunReopened
from ckptd.verdicts import ACCEPTED, Verdict
from ckptd.wire import CommitRequest
from tests.core.by_hand import (
    LIVE,
    ME,
    RUN,
    START,
    A,
    B,
    C,
    HandLog,
    a_ledger,
    aborted,
    beginning,
    borrowing,
    committed,
    live,
    opened,
    opening,
    other_reader,
    overwrite,
    quarantined,
    ready,
    save,
    started,
    write_manifest,
    write_save,
)


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def credulous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that lets every record count, so that the auditor sees what no rule would let through."""

    def believe(state: RunState, body: Body) -> Verdict:
        return ACCEPTED

    monkeypatch.setattr(history, "judge", believe)


def rules(auditor: Auditor, **told: list[str]) -> set[str]:
    return {finding.rule for finding in auditor.check(**told)}


def log_rules(*bodies: Body) -> set[str]:
    """What is found in a log of these records, but for the objects nobody wrote."""
    storage = MemoryStorage()
    HandLog(storage).add(*bodies)
    return rules(Auditor(storage, RUN)) - {"I12"}


def slot(seq: int) -> str:
    return layout.log_key(RUN, seq)


def a_run(storage: MemoryStorage | LocalStorage) -> list[CommitRequest]:
    """Two generations, three checkpoints, one of them passed over."""
    ledger = a_ledger(storage)
    live(ledger)
    requests = [write_save(storage, 1, step) for step in (5, 6)]
    for request in requests:
        ledger.commit(RUN, request)
    ledger.open(RUN, opening(B))
    ledger.begin(RUN, beginning(B))
    HandLog(storage).add(quarantined(save(1, 6)))
    ledger.begin(RUN, beginning(B, fallback_of=2))
    ledger.ready(RUN, B, 3)
    requests.append(write_save(storage, 3, 7))
    ledger.commit(RUN, requests[-1])
    return requests


def test_a_healthy_run_has_no_findings(storage: MemoryStorage) -> None:
    auditor = Auditor(storage, RUN)
    assert auditor.check() == []
    requests = a_run(storage)
    for _ in range(2):
        auditor.assert_clean(acknowledged=[request.save for request in requests] + [5, 7])


def test_a_healthy_run_on_a_drive_has_no_findings(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    storage.initialise()
    a_run(storage)
    Auditor(storage, RUN).assert_clean(acknowledged=[7])


def test_void_records_are_no_finding(storage: MemoryStorage) -> None:
    a_run(storage)
    HandLog(storage).add(committed(1, 9), started(9, A), aborted(1, 5), committed(3, 6))
    Auditor(storage, RUN).assert_clean()


def test_I1_a_slot_that_changed_or_is_gone(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    auditor = Auditor(storage, RUN)
    auditor.assert_clean()
    value = json.loads(storage.get(slot(4), 1 << 20))
    overwrite(storage, slot(4), sealed(value | {"actor": "another"}))
    assert rules(auditor) == {"I1"}
    assert rules(Auditor(storage, RUN)) == set()
    storage.delete(slot(4))
    assert rules(auditor) == {"I1"}


def test_I2_a_gap(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    storage.delete(slot(2))
    assert rules(Auditor(storage, RUN)) == {"I2"}


def test_I3_a_broken_chain(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    value = json.loads(storage.get(slot(2), 1 << 20))
    overwrite(storage, slot(2), sealed(value | {"actor": "another"}))
    assert rules(Auditor(storage, RUN)) == {"I3"}


def test_L3_a_record_that_cannot_be_read(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    overwrite(storage, slot(4), b"{}")
    assert rules(Auditor(storage, RUN)) == {"L3"}


def test_I5_a_rid_that_counts_twice(credulous: None) -> None:
    assert log_rules(*LIVE, opened(B), opened(B)) == {"I5"}


@pytest.mark.parametrize(
    "bodies",
    [
        (*LIVE, opened(B), started(3, B)),
        (*LIVE, started(2, B)),
        (*START, opened(B), started(2, B), started(3, A)),
        (*START, started(2, A, fallback_of=7)),
    ],
)
def test_I8_generations_out_of_order(credulous: None, bodies: tuple[Body, ...]) -> None:
    assert "I8" in log_rules(*bodies)


def test_I8_a_fallback_has_its_attempts_age(credulous: None) -> None:
    assert log_rules(*START, started(2, A, fallback_of=1)) == set()


def test_I10_a_commit_behind_the_fence(credulous: None) -> None:
    bodies = (*LIVE, opened(B), started(2, B), committed(1, 5))
    assert log_rules(*bodies) == {"I10"}


def test_I11_a_commit_before_ready(credulous: None) -> None:
    assert log_rules(*START, committed(1, 5)) == {"I11"}


def test_I15_a_resume_step_that_goes_back(credulous: None) -> None:
    assert log_rules(*LIVE, committed(1, 5), committed(1, 4)) == {"I15"}
    assert log_rules(*LIVE, committed(1, 5), committed(1, 6), quarantined(save(1, 6))) == set()


def test_I16_a_start_that_is_not_from_the_resume_point(credulous: None) -> None:
    older = (*LIVE, committed(1, 5), committed(1, 6), opened(B), started(2, B, save(1, 5)))
    assert log_rules(*older) == {"I15", "I16"}
    left_behind = (
        *LIVE,
        committed(1, 5),
        committed(1, 6),
        quarantined(save(1, 6)),
        opened(B),
        started(2, B, save(1, 5)),
    )
    assert log_rules(*left_behind) == set()
    assert log_rules(*left_behind, opened(C), started(3, C, save(1, 6))) == {"I16"}


def test_I16_a_reader_that_resumes_from_the_highest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def highest(state: RunState) -> Checkpoint | None:
        return max(state.checkpoints.values(), key=lambda c: c.step, default=None)

    monkeypatch.setattr(lineage, "resume_point", highest)
    assert "I16" in log_rules(*LIVE, committed(1, 5), committed(1, 6), quarantined(save(1, 6)))


def test_I17_a_start_from_nothing_with_commits(credulous: None) -> None:
    assert "I17" in log_rules(*LIVE, committed(1, 5), opened(B), started(2, B, None))


def test_I19_a_quarantine_by_one_reader(credulous: None) -> None:
    assert log_rules(*LIVE, committed(1, 5), quarantined(save(1, 5), confirmed_by=ME)) == {"I19"}


def test_I6_what_was_acknowledged_and_is_not_there(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    assert rules(Auditor(storage, RUN), acknowledged=[save(1, 5)]) == {"I6"}


def test_I7_what_was_refused_and_counts(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    assert rules(Auditor(storage, RUN), refused=[ready(1, A).rid]) == {"I7"}


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
@pytest.mark.parametrize("which", ["manifest", "payload"])
def test_I12_and_I13_objects_that_are_not_as_committed(
    storage: MemoryStorage, which: str, how: str, seen_before: bool
) -> None:
    """What was never whole is I12, what was whole when it was looked at before is I13."""
    request = a_run(storage)[0]
    auditor = Auditor(storage, RUN)
    if seen_before:
        auditor.assert_clean()
    ref = a_ledger(storage).manifest(request.manifest).objects()[1]
    key = ref.key if which == "payload" else request.manifest.key
    data = bytearray(storage.get(key, 1 << 20))
    storage.delete(key)
    data[20] ^= 1
    if how != "gone":
        changed = bytes(data[:-1] if how == "cut" else data)
        storage.put(key, [changed], len(changed))
    assert [(finding.rule, finding.where) for finding in auditor.check()] == [("I13" if seen_before else "I12", key)]
    assert auditor.check(damaged=[key]) == auditor.check(damaged=[request.save]) == []


def test_I12_a_commit_of_too_many_writers(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    request = write_save(storage, 1, 5)
    body = committed(1, 5).model_copy(update={"manifest": request.manifest, "writers": 3})
    HandLog(storage).add(body)
    assert rules(Auditor(storage, RUN)) == {"I12"}


def test_I20_an_object_outside_the_run(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    manifest = a_ledger(storage).manifest(write_save(storage, 1, 5).manifest)
    part = manifest.parts[0]
    assert part.payload is not None
    outside = part.model_copy(update={"payload": part.payload.model_copy(update={"key": layout.ROOT_MARKER})})
    request = write_manifest(storage, Manifest.model_construct(**(dict(manifest) | {"parts": (outside,)})))
    HandLog(storage).add(committed(1, 5).model_copy(update={"manifest": request.manifest}))
    assert rules(Auditor(storage, RUN)) == {"I20"}


def test_a_quarantined_checkpoint_may_be_damaged(storage: MemoryStorage) -> None:
    requests = a_run(storage)
    storage.delete(requests[1].manifest.key)
    Auditor(storage, RUN).assert_clean(acknowledged=[requests[1].save])


def test_what_is_quarantined_for_damage_is_passed_over_and_named(storage: MemoryStorage) -> None:
    ledger = a_ledger(storage)
    live(ledger)
    for step in (1, 2):
        ledger.commit(RUN, write_save(storage, 1, step))
    auditor = Auditor(storage, RUN)
    auditor.assert_clean()
    assert list(auditor.passed_over) == []
    HandLog(storage).add(quarantined(save(1, 2)))
    auditor.assert_clean()
    assert list(auditor.passed_over) == [save(1, 2)]


def test_I13_what_a_person_quarantined_is_as_whole_as_any(storage: MemoryStorage) -> None:
    ledger = a_ledger(storage)
    live(ledger)
    requests = [write_save(storage, 1, step) for step in (1, 2)]
    for request in requests:
        ledger.commit(RUN, request)
    auditor = Auditor(storage, RUN)
    auditor.assert_clean()
    Keeper(ledger).quarantine(RUN, save(1, 2), who="ann", reason="diverged")
    auditor.assert_clean()
    storage.delete(ledger.manifest(requests[1].manifest).objects()[0].key)
    assert rules(auditor) == {"I13"}


class Busy(MemoryStorage):
    """At the first look at an object's bytes something else happens."""

    happens: Callable[[], object] | None = None

    def reader(self, key: str, *, fresh: bool = False) -> MemoryReader:
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return super().reader(key, fresh=fresh)


@pytest.mark.parametrize("borrowed", [False, True])
def test_what_is_given_up_and_collected_during_an_audit_is_no_finding(borrowed: bool) -> None:
    """Beside a live service bytes may go between the auditor's look at the log and its look at them."""
    storage = Busy()
    ledger = a_ledger(storage)
    live(ledger)
    for step in (1, 2, 3, 4):
        lenders = borrowing(ledger.manifest(ledger.checkpoint_at(RUN, 1).manifest)) if borrowed and step == 2 else ()
        ledger.commit(RUN, write_save(storage, 1, step, borrowed=lenders))
    auditor = Auditor(storage, RUN)
    auditor.assert_clean()
    collected: list[str] = []

    def retention() -> None:
        keeper = Keeper(ledger, reader=other_reader)
        collected.extend(retain(keeper, RUN, RetainRequest(keep_last=2)).purged)

    storage.happens = retention
    auditor.assert_clean(acknowledged=[3, 4])
    assert collected == [save(1, 1), save(1, 2)]


def test_I13_what_is_deleted_during_an_audit_and_not_given_up_is_one() -> None:
    storage = Busy()
    ledger = a_ledger(storage)
    live(ledger)
    request = write_save(storage, 1, 1)
    ledger.commit(RUN, request)
    auditor = Auditor(storage, RUN)
    auditor.assert_clean()
    key = ledger.manifest(request.manifest).objects()[0].key
    storage.happens = lambda: storage.delete(key)
    assert rules(auditor) == {"I13"}


def test_I12_a_commit_that_borrows_from_what_is_not_there(credulous: None) -> None:
    borrower = committed(1, 6, borrows=(save(1, 5),))
    assert "borrows from" in str(_log_findings(*LIVE, borrower))
    assert "borrows from" in str(_log_findings(*LIVE, committed(1, 5), quarantined(save(1, 5)), borrower))
    assert "borrows from" not in str(_log_findings(*LIVE, committed(1, 5), borrower))
    retired = (*LIVE, committed(1, 5), CheckpointsRetired(saves=(save(1, 5),)))
    assert "borrows from" in str(_log_findings(*retired, borrower))
    lent = (*LIVE, committed(1, 5), committed(1, 5, 2, borrows=(save(1, 5),)))
    assert "borrows from" not in str(_log_findings(*lent, CheckpointsRetired(saves=(save(1, 5),)), borrower))


def _log_findings(*bodies: Body) -> list[str]:
    storage = MemoryStorage()
    HandLog(storage).add(*bodies)
    return [str(finding) for finding in Auditor(storage, RUN).check()]


def test_I13_bytes_that_are_purged_while_somebody_borrows_them(credulous: None) -> None:
    lent = (*LIVE, committed(1, 5), committed(1, 6, borrows=(save(1, 5),)), CheckpointsRetired(saves=(save(1, 5),)))
    assert "I13" in log_rules(*lent, CheckpointsPurged(saves=(save(1, 5),)))
    late = (CheckpointsRetired(saves=(save(1, 6),), turn=1), CheckpointsPurged(saves=(save(1, 5),)))
    assert "I13" not in log_rules(*lent, *late)


def test_I10_a_start_in_a_closed_run(credulous: None) -> None:
    closed = (*LIVE, RunClosed(who="ann"), opened(B))
    assert "I10" in log_rules(*closed, started(2, B))
    assert log_rules(*closed, RunReopened(who="ann", turn=1), started(2, B)) == set()
    assert "I10" in log_rules(*LIVE, RunClosed(who="ann"), committed(1, 5))


def test_the_auditor_reads_and_does_nothing_else(storage: MemoryStorage) -> None:
    a_run(storage)
    watched = FaultyStorage(storage)
    Auditor(watched, RUN).assert_clean()
    assert set(watched.calls) <= {"list", "get", "reader", "read"}


def test_an_audit_that_could_not_read_has_no_result(storage: MemoryStorage) -> None:
    a_run(storage)
    watched = FaultyStorage(storage)
    watched.fail_before("reader")
    with pytest.raises(Unavailable):
        Auditor(watched, RUN).check()


def test_findings_are_told_one_a_line(storage: MemoryStorage) -> None:
    HandLog(storage).add(*LIVE)
    with pytest.raises(AssertionError, match=r"2 findings\n  I6 5: was acknowledged.*\n  I6 6: was acknowledged"):
        Auditor(storage, RUN).assert_clean(acknowledged=[5, 6])
