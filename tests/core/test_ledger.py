"""What can be done to a run, by ledgers that share a storage and nothing else."""

from __future__ import annotations

import pytest

from ckptd import layout
from ckptd.errors import (
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    NotFound,
    NotInitialised,
    OutcomeUnknown,
    Unavailable,
    Unreachable,
)
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest, ObjectRef
from ckptd.reading import observe
from ckptd.records import Damage
from ckptd.storage import open_storage
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from ckptd.wire import AbortRequest, Answer, CommitRequest, DamageReport
from tests.core.by_hand import (
    ME,
    OTHER,
    RUN,
    A,
    B,
    C,
    HandLog,
    a_ledger,
    beginning,
    live,
    opening,
    overwrite,
    quarantined,
    save,
    write_manifest,
    write_save,
)
from tests.homes import everything, unmounted


@pytest.fixture
def inner(store: Storage) -> Storage:
    return store


@pytest.fixture
def storage(inner: Storage) -> FaultyStorage:
    return FaultyStorage(inner)


@pytest.fixture
def ledger(storage: FaultyStorage) -> Ledger:
    return a_ledger(storage)


def commit(ledger: Ledger, generation: int, step: int, *, count: int = 1) -> CommitRequest:
    request = write_save(ledger.storage, generation, step, count=count)
    ledger.commit(RUN, request)
    return request


def objects(ledger: Ledger, request: CommitRequest) -> list[ObjectRef]:
    return list(ledger.manifest(request.manifest).objects())


def damage(ledger: Ledger, request: CommitRequest, writer: int = 0) -> DamageReport:
    """Flip a byte of a writer's payload for good, and what a rank that loads it reports."""
    ref = objects(ledger, request)[writer]
    data = bytearray(ledger.storage.get(ref.key, ref.size))
    data[20] ^= 1
    overwrite(ledger.storage, ref.key, bytes(data))
    found = observe(ledger.storage, ref)
    assert found is not None
    return DamageReport(save=request.save, damage=found, reader=ME)


def begin(ledger: Ledger, attempt: str, *, fallback_of: int | None = None) -> Answer:
    return ledger.begin(RUN, beginning(attempt, fallback_of=fallback_of))


# Start


def test_a_new_run_is_none_and_starts_at_generation_1(ledger: Ledger) -> None:
    ledger.open(RUN, opening(A))
    answer = begin(ledger, A)
    assert (answer.answer, answer.generation, answer.checkpoint, answer.candidates) == ("none", 1, None, ())
    assert answer.storage_uuid == ledger.uuid


def test_a_second_incarnation_finds_what_the_first_left(ledger: Ledger) -> None:
    live(ledger)
    request = commit(ledger, 1, 5)
    ledger.open(RUN, opening(B))
    answer = begin(ledger, B)
    assert (answer.answer, answer.generation) == ("found", 2)
    assert answer.checkpoint is not None
    assert (answer.checkpoint.step, answer.checkpoint.manifest) == (5, request.manifest)
    assert [c.valid for c in answer.candidates] == [True]


def test_S1_an_attempt_that_was_not_opened_does_not_begin(ledger: Ledger) -> None:
    ledger.open(RUN, opening(A))
    with pytest.raises(Conflict, match="was not opened"):
        begin(ledger, B)


def test_open_and_begin_may_be_repeated(inner: Storage) -> None:
    answers = set()
    for _ in range(3):
        ledger = a_ledger(inner)
        ledger.open(RUN, opening(A))
        answers.add(begin(ledger, A).stored())
    assert len(answers) == 1
    assert a_ledger(inner).run_info(RUN).records == 3


def test_join_waits_for_begin_and_then_gives_equal_bytes(inner: Storage) -> None:
    rank0, rank1 = a_ledger(inner), a_ledger(inner)
    assert rank1.join(RUN, A) is None
    rank0.open(RUN, opening(A))
    assert rank1.join(RUN, A) is None
    answer = begin(rank0, A)
    joined = rank1.join(RUN, A)
    assert joined is not None
    assert joined.stored() == answer.stored()


def test_S3_an_answer_stays_the_same_to_the_byte(ledger: Ledger, inner: Storage) -> None:
    """Later commits, quarantines and generations change nothing of it."""
    live(ledger)
    request = commit(ledger, 1, 5)
    ledger.open(RUN, opening(B))
    first = begin(ledger, B).stored()
    ledger.ready(RUN, B, 2)
    commit(ledger, 2, 6)
    ledger.report_damage(RUN, damage(ledger, request))
    ledger.open(RUN, opening(C))
    begin(ledger, C)
    for asked in (ledger, a_ledger(inner)):
        joined = asked.join(RUN, B)
        assert joined is not None
        assert joined.stored() == first
        assert begin(asked, B).stored() == first


def test_V2_an_incarnation_that_wakes_up_late_is_fenced(ledger: Ledger) -> None:
    ledger.open(RUN, opening(A))
    live(ledger, B)
    with pytest.raises(Fenced):
        begin(ledger, A)
    with pytest.raises(Fenced, match="never began"):
        ledger.join(RUN, A)
    commit(ledger, 1, 5)


def test_V5_corrupt_when_no_checkpoint_is_valid(ledger: Ledger) -> None:
    live(ledger)
    for step in (5, 6):
        request = commit(ledger, 1, step)
        ledger.report_damage(RUN, damage(ledger, request))
    ledger.open(RUN, opening(B))
    with pytest.raises(Corrupt, match="2 checkpoints and none") as caught:
        begin(ledger, B)
    assert "not started from zero" in caught.value.message
    assert [c["step"] for c in caught.value.fields["candidates"]] == [6, 5]
    assert ledger.latest(RUN).answer == "corrupt"
    assert ledger.current(RUN).generation == 1


def test_A2_corrupt_is_not_said_on_an_old_listing(inner: Storage, storage: FaultyStorage) -> None:
    """All that the listing shows is damaged; the checkpoint that is whole came after."""
    ledger = a_ledger(inner)
    live(ledger)
    ledger.report_damage(RUN, damage(ledger, commit(ledger, 1, 5)))
    ledger.open(RUN, opening(B))
    commit(ledger, 1, 6)
    storage.hide("log", last=1)
    answer = begin(a_ledger(storage), B)
    assert answer.checkpoint is not None
    assert answer.checkpoint.step == 6


def test_V6_a_fallback_goes_to_the_checkpoint_before(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1, 5)
    newest = commit(ledger, 1, 6)
    ledger.open(RUN, opening(B))
    assert begin(ledger, B).generation == 2
    report = damage(ledger, newest)
    assert ledger.report_damage(RUN, report).confirmed
    answer = begin(ledger, B, fallback_of=2)
    assert answer.checkpoint is not None
    assert (answer.generation, answer.fallback_of, answer.checkpoint.step) == (3, 2, 5)
    assert [(c.step, c.valid) for c in answer.candidates] == [(6, False), (5, True)]
    joined = ledger.join(RUN, B, 2)
    assert joined is not None
    assert joined.stored() == answer.stored()
    with pytest.raises(Fenced):
        ledger.ready(RUN, B, 2)
    ledger.ready(RUN, B, 3)
    with pytest.raises(Conflict):
        begin(ledger, B, fallback_of=3)


def test_S7_a_run_with_commits_is_never_none(inner: Storage, storage: FaultyStorage) -> None:
    """Neither for a reader whose listing is so old that it shows nothing of them, nor for a starter."""
    live(a_ledger(inner))
    commit(a_ledger(inner), 1, 5)
    for hidden in range(6):
        fault = storage.hide("log", last=hidden)
        latest = a_ledger(storage).latest(RUN)
        assert (latest.answer, latest.checkpoint and latest.checkpoint.step) == ("found", 5), hidden
        fault.heal()
    storage.hide("log", last=5)
    late = a_ledger(storage)
    late.open(RUN, opening(B))
    assert begin(late, B).answer == "found"


def test_S7_latest_has_a_reason_for_every_candidate(ledger: Ledger) -> None:
    assert ledger.latest(RUN).answer == "none"
    live(ledger)
    assert ledger.latest(RUN).answer == "none"
    commit(ledger, 1, 5)
    ledger.report_damage(RUN, damage(ledger, commit(ledger, 1, 6)))
    latest = ledger.latest(RUN)
    assert (latest.answer, latest.generation) == ("found", 1)
    assert [(c.step, c.valid) for c in latest.candidates] == [(6, False), (5, True)]
    assert "quarantined" in latest.candidates[0].reason
    assert "newest valid" in latest.candidates[1].reason


def test_S7_latest_looks_at_the_objects_and_changes_nothing(inner: Storage, ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1, 5)
    request = commit(ledger, 1, 6)
    inner.delete(ledger.manifest(request.manifest).objects()[0].key)
    records = ledger.run_info(RUN).records
    latest = ledger.latest(RUN)
    assert (latest.answer, latest.checkpoint and latest.checkpoint.step) == ("found", 5)
    assert [(c.step, c.valid) for c in latest.candidates] == [(6, False), (5, True)]
    assert "the next start will quarantine it" in latest.candidates[0].reason
    assert "missing" in latest.candidates[0].reason
    assert ledger.run_info(RUN).records == records
    ledger.open(RUN, opening(B))
    begun = begin(ledger, B)
    assert begun.checkpoint is not None
    assert begun.checkpoint.step == 5


def test_S7_unreachable_is_not_none(inner: Storage, storage: FaultyStorage) -> None:
    live(a_ledger(inner))
    commit(a_ledger(inner), 1, 5)
    ledger = a_ledger(storage)
    ledger.open(RUN, opening(B))
    storage.fail_before("size", times=None)
    with pytest.raises(Unreachable, match="step 5 cannot be looked at") as caught:
        begin(ledger, B)
    assert caught.value.fields["candidates"][0]["step"] == 5
    assert ledger.current(RUN).generation == 1
    storage.heal()
    assert begin(ledger, B).answer == "found"


@pytest.mark.parametrize("operation", ["list", "get"])
def test_T6_no_question_reads_an_error_as_absence(inner: Storage, storage: FaultyStorage, operation: str) -> None:
    live(a_ledger(inner))
    request = commit(a_ledger(inner), 1, 5)
    storage.fail_before(operation, times=None)  # type: ignore[arg-type]
    ledger = a_ledger(storage)
    report = DamageReport(save=request.save, damage=Damage(object="o", expected="a", observed="b"), reader=ME)
    for ask in (
        lambda: ledger.latest(RUN),
        lambda: ledger.join(RUN, A),
        lambda: ledger.checkpoints(RUN),
        lambda: ledger.checkpoint_at(RUN, 5),
        lambda: ledger.run_info(RUN),
        lambda: ledger.current(RUN),
        lambda: ledger.save_status(RUN, request.save),
        lambda: ledger.report_damage(RUN, report),
        lambda: begin(ledger, A),
    ):
        with pytest.raises(Unavailable):
            ask()


def test_T3_a_root_that_is_not_mounted_is_not_a_new_run(home: str) -> None:
    storage = open_storage(home)
    ledger = a_ledger(storage)
    live(ledger)
    commit(ledger, 1, 5)
    with unmounted(home):
        for call in (
            lambda: ledger.open(RUN, opening(B)),
            lambda: begin(ledger, A),
            lambda: ledger.latest(RUN),
            lambda: ledger.runs(),
            lambda: a_ledger(storage),
        ):
            with pytest.raises(NotInitialised):
                call()
    assert ledger.latest(RUN).answer == "found"


def test_S8_what_is_evidently_gone_is_passed_over(ledger: Ledger, inner: Storage) -> None:
    live(ledger)
    whole, cut, gone, torn = (commit(ledger, 1, step) for step in (5, 6, 7, 8))
    ref = objects(ledger, cut)[1]
    overwrite(inner, ref.key, inner.get(ref.key, ref.size)[:-1])
    inner.delete(objects(ledger, gone)[0].key)
    overwrite(inner, torn.manifest.key, b"{}")
    ledger.open(RUN, opening(B))
    answer = begin(ledger, B)
    assert answer.checkpoint is not None
    assert answer.checkpoint.save == whole.save
    assert [(c.step, c.valid) for c in answer.candidates] == [(8, False), (7, False), (6, False), (5, True)]
    for candidate, words in zip(answer.candidates, (torn.manifest.key, "missing", ref.key), strict=False):
        assert words in candidate.reason


def test_S8_what_only_we_see_gone_is_left_to_the_ranks(inner: Storage, storage: FaultyStorage) -> None:
    live(a_ledger(inner))
    request = commit(a_ledger(inner), 1, 5)
    ref = objects(a_ledger(inner), request)[0]
    storage.truncate(ref.key, size=3, cached_only=True)
    ledger = a_ledger(storage)
    ledger.open(RUN, opening(B))
    answer = begin(ledger, B)
    assert answer.checkpoint is not None
    assert answer.checkpoint.save == request.save


def test_A4_a_repeated_begin_finds_its_own_even_if_its_checkpoint_went_bad(
    inner: Storage, storage: FaultyStorage
) -> None:
    live(a_ledger(inner))
    request = commit(a_ledger(inner), 1, 5)
    ledger = a_ledger(storage)
    ledger.open(RUN, opening(B))
    lost = storage.fail_before("sync", times=None)
    with pytest.raises(OutcomeUnknown):
        begin(ledger, B)
    lost.heal()
    inner.delete(objects(ledger, request)[0].key)
    answer = begin(ledger, B)
    assert answer.checkpoint is not None
    assert answer.checkpoint.save == request.save
    assert a_ledger(inner).run_info(RUN).records == 7


# Save


def test_a_commit_makes_a_save_a_checkpoint(ledger: Ledger) -> None:
    live(ledger)
    name = save(1, 5)
    assert ledger.save_status(RUN, name).status == "pending"
    request = commit(ledger, 1, 5)
    assert ledger.save_status(RUN, name).status == "durable"
    (info,) = ledger.checkpoints(RUN)
    assert (info.save, info.step, info.writers, info.parent) == (name, 5, 2, None)
    assert info.payload_bytes == sum(ref.size for ref in objects(ledger, request))
    assert (info.is_tip, info.is_resume_point, info.status) == (True, True, "valid")


def test_parts_lists_the_writers_that_are_there(ledger: Ledger) -> None:
    assert ledger.parts(RUN, save(1, 5)).parts == {}
    write_save(ledger.storage, 1, 5, writers=3)
    found = ledger.parts(RUN, save(1, 5)).parts
    assert sorted(found) == ["0", "1", "2"]
    assert all(layout.writer_of(key.rpartition("/")[2]) == int(writer) for writer, key in found.items())


def test_V7_a_commit_before_ready_does_not_count(ledger: Ledger) -> None:
    ledger.open(RUN, opening(A))
    begin(ledger, A)
    with pytest.raises(Conflict, match="not ready"):
        commit(ledger, 1, 5)
    ledger.ready(RUN, A, 1)
    commit(ledger, 1, 6)


def test_V8_a_commit_of_a_fenced_generation_does_not_count(ledger: Ledger) -> None:
    live(ledger)
    request = write_save(ledger.storage, 1, 5)
    live(ledger, B)
    with pytest.raises(Fenced, match="generation 2 started"):
        ledger.commit(RUN, request)
    status = ledger.save_status(RUN, request.save)
    assert (status.status, status.detail) == ("fenced", "generation 2 started before it")
    with pytest.raises(Fenced):
        ledger.abort(RUN, request.save, AbortRequest(generation=1, reason="late"))


def test_V9_an_aborted_save_stays_off(ledger: Ledger) -> None:
    live(ledger)
    request = write_save(ledger.storage, 1, 5)
    for _ in range(2):
        ledger.abort(RUN, request.save, AbortRequest(generation=1, reason="rank 1: disk full"))
    status = ledger.save_status(RUN, request.save)
    assert (status.status, status.detail) == ("aborted", "rank 1: disk full")
    with pytest.raises(Conflict, match="disk full"):
        ledger.commit(RUN, request)
    again = commit(ledger, 1, 5, count=2)
    with pytest.raises(Conflict, match="committed"):
        ledger.abort(RUN, again.save, AbortRequest(generation=1, reason="too late"))


@pytest.mark.parametrize("which", ["payload", "manifest"])
@pytest.mark.parametrize("how", ["gone", "cut", "longer"])
def test_W4_what_is_not_there_in_its_full_size_is_not_committed(
    ledger: Ledger, inner: Storage, which: str, how: str
) -> None:
    live(ledger)
    request = write_save(inner, 1, 5)
    key = objects(ledger, request)[1].key if which == "payload" else request.manifest.key
    data = inner.get(key, 1 << 20)
    inner.delete(key)
    if how != "gone":
        changed = data[:-1] if how == "cut" else data + b"x"
        inner.put(key, [changed], len(changed))
    with pytest.raises(Corrupt) as caught:
        ledger.commit(RUN, request)
    assert caught.value.fields["object"] == key
    assert ledger.save_status(RUN, request.save).status == "pending"
    overwrite(inner, key, data)
    ledger.commit(RUN, request)


def test_W4_an_error_while_looking_commits_nothing(ledger: Ledger, storage: FaultyStorage) -> None:
    live(ledger)
    request = write_save(storage, 1, 5)
    storage.fail_before("size")
    with pytest.raises(Unavailable):
        ledger.commit(RUN, request)
    assert ledger.save_status(RUN, request.save).status == "pending"
    ledger.commit(RUN, request)


def test_W4_the_manifest_is_read_back_byte_for_byte(ledger: Ledger, inner: Storage) -> None:
    live(ledger)
    request = write_save(inner, 1, 5)
    data = inner.get(request.manifest.key, 1 << 20)
    overwrite(inner, request.manifest.key, data.replace(b'"world":2', b'"world":3'))
    with pytest.raises(Corrupt, match="damaged"):
        ledger.commit(RUN, request)


@pytest.mark.parametrize("writers", [1, 3])
def test_W3_a_commit_is_of_exactly_its_writers(ledger: Ledger, writers: int) -> None:
    live(ledger)
    request = write_save(ledger.storage, 1, 5)
    with pytest.raises(Invalid, match="the manifest"):
        ledger.commit(RUN, request.model_copy(update={"writers": writers}))


def test_W3_a_commit_is_of_its_own_run_generation_save_and_step(ledger: Ledger) -> None:
    live(ledger)
    live(ledger, run="other")
    request = write_save(ledger.storage, 1, 5)
    foreign = write_save(ledger.storage, 1, 6, run="other")
    with pytest.raises(Invalid, match="not of step 6"):
        ledger.commit(RUN, request.model_copy(update={"step": 6}))
    with pytest.raises(Invalid, match="not of generation 2"):
        ledger.commit(RUN, request.model_copy(update={"generation": 2}))
    for changed in (
        foreign,
        request.model_copy(update={"manifest": foreign.manifest}),
        request.model_copy(update={"save": save(1, 7)}),
    ):
        with pytest.raises(Invalid, match="manifest key"):
            ledger.commit(RUN, changed)
    assert ledger.checkpoints(RUN) == []


def test_W5_an_unknown_commit_is_asked_for_again_and_nothing_is_cleaned_up(
    inner: Storage, storage: FaultyStorage
) -> None:
    ledger = a_ledger(storage)
    live(ledger)
    request = write_save(storage, 1, 5)
    silent = storage.fail_before("get", layout.log_key(RUN, 5), nth=2, times=None)
    with pytest.raises(OutcomeUnknown):
        ledger.commit(RUN, request)
    assert storage.calls["delete"] == 0
    silent.heal()
    ledger.commit(RUN, request)
    ledger.commit(RUN, request)
    assert a_ledger(inner).run_info(RUN).records == 5
    assert storage.calls["delete"] == 0


def test_W5_a_repeat_finds_its_commit_even_if_the_payload_went_bad(ledger: Ledger, inner: Storage) -> None:
    live(ledger)
    request = commit(ledger, 1, 5)
    inner.delete(objects(ledger, request)[0].key)
    ledger.commit(RUN, request)
    old = FaultyStorage(inner)
    old.hide("log", last=3)
    a_ledger(old).commit(RUN, request)


# Damage


def test_V12_damage_that_another_reader_confirms_is_quarantined(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1, 5)
    request = commit(ledger, 1, 6)
    report = damage(ledger, request)
    answer = ledger.report_damage(RUN, report)
    assert (answer.confirmed, report.damage.object in answer.detail) == (True, True)
    assert [info.status for info in ledger.checkpoints(RUN)] == ["valid", "quarantined"]
    latest = ledger.latest(RUN)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 5
    assert all(ledger.storage.size(ref.key) == ref.size for ref in objects(ledger, request))
    assert ledger.report_damage(RUN, report).confirmed


def test_V12_a_reader_cannot_confirm_itself(ledger: Ledger) -> None:
    live(ledger)
    report = damage(ledger, commit(ledger, 1, 5))
    with pytest.raises(Conflict, match="one reader alone"):
        ledger.report_damage(RUN, report.model_copy(update={"reader": OTHER}))
    assert ledger.latest(RUN).answer == "found"


def test_S5_a_reader_that_is_wrong_alone_quarantines_nothing(ledger: Ledger) -> None:
    live(ledger)
    request = commit(ledger, 1, 5)
    key = objects(ledger, request)[0].key
    found = Damage(object=key, chunk=0, expected="aa", observed="bb")
    answer = ledger.report_damage(RUN, DamageReport(save=request.save, damage=found, reader=ME))
    assert (answer.confirmed, "is whole" in answer.detail) == (False, True)
    assert ledger.latest(RUN).answer == "found"


def test_S5_a_real_other_process_confirms_what_is_on_the_drive(home: str) -> None:
    ledger = Ledger(open_storage(home))
    live(ledger)
    whole, request = commit(ledger, 1, 5), commit(ledger, 1, 6)
    report = damage(ledger, request)
    wrong = Damage(object=objects(ledger, whole)[0].key, chunk=0, expected="aa", observed="bb")
    assert not ledger.report_damage(RUN, DamageReport(save=whole.save, damage=wrong, reader=ME)).confirmed
    assert ledger.report_damage(RUN, report).confirmed
    assert [info.status for info in ledger.checkpoints(RUN)] == ["valid", "quarantined"]


def test_S5_a_second_reading_that_fails_quarantines_nothing() -> None:
    """Storage in memory has no other process that could read it."""
    inner = MemoryStorage()
    live(a_ledger(inner))
    report = damage(a_ledger(inner), commit(a_ledger(inner), 1, 5))
    with pytest.raises(Unavailable, match="second reading"):
        Ledger(inner).report_damage(RUN, report)
    assert a_ledger(inner).latest(RUN).answer == "found"


def test_a_report_about_something_else_is_refused(ledger: Ledger) -> None:
    live(ledger)
    request = commit(ledger, 1, 5)
    foreign = Damage(object="runs/other/data/x", expected="a", observed="b")
    with pytest.raises(Invalid, match="no object of checkpoint"):
        ledger.report_damage(RUN, DamageReport(save=request.save, damage=foreign, reader=ME))
    with pytest.raises(NotFound, match="no checkpoint"):
        ledger.report_damage(RUN, DamageReport(save=save(1, 9), damage=foreign, reader=ME))


def test_T6_a_report_is_not_refused_on_an_old_listing(inner: Storage, storage: FaultyStorage) -> None:
    live(a_ledger(inner))
    report = damage(a_ledger(inner), commit(a_ledger(inner), 1, 5))
    storage.hide("log", last=2)
    assert a_ledger(storage).report_damage(RUN, report).confirmed


def test_D2_a_damaged_manifest_is_damage_of_its_checkpoint(ledger: Ledger, inner: Storage) -> None:
    live(ledger)
    commit(ledger, 1, 5)
    request = commit(ledger, 1, 6)
    data = bytearray(inner.get(request.manifest.key, 1 << 20))
    data[10] ^= 1
    overwrite(inner, request.manifest.key, bytes(data))
    with pytest.raises(Corrupt) as caught:
        ledger.manifest(request.manifest)
    found = Damage.model_validate({name: caught.value.fields.get(name) for name in Damage.model_fields})
    assert found.object == request.manifest.key
    assert ledger.report_damage(RUN, DamageReport(save=request.save, damage=found, reader=ME)).confirmed


def test_D1_damage_names_the_object_and_the_chunk(ledger: Ledger) -> None:
    live(ledger)
    request = commit(ledger, 1, 5)
    report = damage(ledger, request, writer=1)
    ref = objects(ledger, request)[1]
    assert (report.damage.object, report.damage.chunk, report.damage.expected) == (ref.key, 1, ref.chunks[1])


def test_D2_one_chained_record_vouches_for_every_byte(ledger: Ledger) -> None:
    """From the commit record alone to each byte of payload; a change anywhere breaks the way."""
    live(ledger)
    request = commit(ledger, 1, 5)
    (info,) = ledger.checkpoints(RUN)
    manifest = ledger.manifest(info.manifest)
    assert [observe(ledger.storage, ref) for ref in manifest.objects()] == [None, None]
    other = write_manifest(ledger.storage, manifest.model_copy(update={"producer": "another"}))
    assert other.manifest.key != request.manifest.key
    with pytest.raises(Conflict, match="another manifest"):
        ledger.commit(RUN, other)


# Questions


def test_the_checkpoints_of_a_run_in_the_order_of_their_commits(ledger: Ledger) -> None:
    live(ledger)
    for step in (5, 6):
        commit(ledger, 1, step)
    commit(ledger, 1, 6, count=2)
    found = ledger.checkpoints(RUN)
    assert [(info.step, info.parent) for info in found] == [(5, None), (6, save(1, 5)), (6, save(1, 6))]
    assert [info.is_tip for info in found] == [False, False, True]


def test_checkpoint_at_prefers_the_current_line(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1, 5)
    ledger.report_damage(RUN, damage(ledger, commit(ledger, 1, 6)))
    live(ledger, B)
    assert ledger.checkpoint_at(RUN, 6).save == save(1, 6)
    commit(ledger, 2, 6)
    assert ledger.checkpoint_at(RUN, 6).save == save(2, 6)
    with pytest.raises(NotFound, match=r"no checkpoint of step 7; it has \[5, 6\]"):
        ledger.checkpoint_at(RUN, 7)
    with pytest.raises(Invalid, match="step -1"):
        ledger.checkpoint_at(RUN, -1)


def test_a_run_in_one_line(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1, 5)
    ledger.report_damage(RUN, damage(ledger, commit(ledger, 1, 6)))
    info = ledger.run_info(RUN)
    assert (info.generation, info.ready, info.records, info.void_records, info.checkpoints) == (1, True, 7, 0, 2)
    assert (info.resume_step, info.tip_step, info.problem) == (5, 6, None)
    HandLog(ledger.storage).add(quarantined(save(1, 6)))
    assert ledger.run_info(RUN).void_records == 1


def test_runs_are_listed_by_name(ledger: Ledger) -> None:
    assert ledger.runs() == []
    for run in ("b", "a"):
        ledger.open(run, opening(A))
    assert ledger.runs() == ["a", "b"]


def test_a_run_that_does_not_exist_is_not_found(ledger: Ledger) -> None:
    for ask in (ledger.checkpoints, ledger.run_info, lambda run: ledger.checkpoint_at(run, 1)):
        with pytest.raises(NotFound, match="there is no run absent"):
            ask("absent")
    assert ledger.latest("absent").answer == "none"
    assert ledger.current("absent").generation == 0
    assert ledger.storage.list("runs") == []


def test_L2_damage_in_the_log_is_told_with_the_slot(ledger: Ledger, inner: Storage) -> None:
    live(ledger)
    overwrite(inner, layout.log_key(RUN, 3), b"{}")
    fresh = a_ledger(inner)
    problem = fresh.run_info(RUN).problem
    assert problem is not None
    assert layout.log_key(RUN, 3) in problem
    for call in (
        lambda: fresh.latest(RUN),
        lambda: fresh.open(RUN, opening(B)),
        lambda: begin(fresh, A),
        lambda: commit(fresh, 1, 5),
    ):
        with pytest.raises(Corrupt, match="read-only"):
            call()


@pytest.mark.parametrize("run", ["..", "../x", "a/b", "", "A"])
def test_T5_no_request_leads_out_of_a_runs_folder(ledger: Ledger, inner: Storage, run: str) -> None:
    before = everything(inner)
    request = write_save(inner, 1, 5)
    report = DamageReport(save=request.save, damage=Damage(object="o", expected="a", observed="b"), reader=ME)
    for call in (
        lambda: ledger.open(run, opening(A)),
        lambda: ledger.begin(run, beginning(A)),
        lambda: ledger.join(run, A),
        lambda: ledger.ready(run, A, 1),
        lambda: ledger.commit(run, request),
        lambda: ledger.abort(run, request.save, AbortRequest(generation=1, reason="")),
        lambda: ledger.parts(run, request.save),
        lambda: ledger.save_status(run, request.save),
        lambda: ledger.report_damage(run, report),
        lambda: ledger.latest(run),
        lambda: ledger.checkpoints(run),
        lambda: ledger.run_info(run),
    ):
        with pytest.raises(Invalid, match="run name"):
            call()
    assert {key for key in everything(inner) - before if not key.startswith(f"runs/{RUN}/")} == set()


def test_T5_a_manifest_that_names_an_object_elsewhere_is_not_committed(ledger: Ledger, inner: Storage) -> None:
    live(ledger)
    request = write_save(inner, 1, 5)
    manifest = ledger.manifest(request.manifest)
    part = manifest.parts[0]
    assert part.payload is not None
    outside = part.model_copy(update={"payload": part.payload.model_copy(update={"key": layout.ROOT_MARKER})})
    bad = write_manifest(
        inner, Manifest.model_construct(**(dict(manifest) | {"parts": (outside, manifest.parts[1])}))
    )
    with pytest.raises(Corrupt, match="outside its place"):
        ledger.commit(RUN, bad)


def test_a_ledger_forgets_runs_and_loses_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.ledger.MAX_CACHED_RUNS", 2)
    for run in "abcdef":
        ledger.open(run, opening(A))
    assert len(ledger._logs) <= 3
    assert [ledger.run_info(run).records for run in "abcdef"] == [2] * 6
