"""Checkpoints that reference objects of earlier saves: what may be borrowed, what stays for whose sake, and what it
costs when a shared object is damaged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from ckptd import layout
from ckptd.errors import Conflict, Corrupt, Invalid
from ckptd.fsck import fsck
from ckptd.history import judge
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.manifest import MAX_BORROWS, Borrowed, Manifest, ManifestRef, ObjectRef
from ckptd.records import Body, Damage, Observer
from ckptd.retaining import RetainRequest, retain
from ckptd.retention import Policy
from ckptd.second import Reading, read_here
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.upkeep_records import CheckpointReinstated, CheckpointsPurged, CheckpointsRetired, CheckpointVerified
from ckptd.verdicts import Outcome
from ckptd.wire import DamageAnswer, DamageReport
from tests.core.by_hand import (
    LIVE,
    ME,
    RUN,
    B,
    C,
    a_ledger,
    aborted,
    beginning,
    borrowing,
    committed,
    folded,
    live,
    opened,
    opening,
    other_reader,
    overwrite,
    quarantined,
    save,
    started,
    write_save,
)

FIVE = tuple(committed(1, step) for step in (1, 2, 3, 4, 5))
VERIFIED = tuple(CheckpointVerified(save=save(1, step), reader=ME) for step in (4, 5))
RETIRED = CheckpointsRetired(saves=(save(1, 1),))
TWO = Policy(keep_last=2)


def outcome(before: tuple[Body, ...], body: Body) -> Outcome:
    return judge(folded(*before), body).outcome


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def ledger(storage: MemoryStorage) -> Ledger:
    return a_ledger(storage)


@pytest.fixture
def keeper(ledger: Ledger) -> Keeper:
    return Keeper(ledger, reader=a_third_reader)


def a_third_reader(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
    """Stands for the process that verifies; the ledger has the one that reads again."""
    return Reading(reader=Observer(host="three", process="pid 3"), damage=read_here(storage, ref).damage)


def manifest(ledger: Ledger, step: int) -> Manifest:
    return ledger.manifest(ledger.checkpoint_at(RUN, step).manifest)


def commit(ledger: Ledger, step: int, *lenders: int, generation: int = 1) -> None:
    """A save that borrows writer 0's object from the saves of these steps."""
    borrowed = borrowing(*(manifest(ledger, lender) for lender in lenders))
    ledger.commit(RUN, write_save(ledger.storage, generation, step, borrowed=borrowed))


def payload_of(storage: Storage, step: int) -> list[str]:
    return storage.list(layout.payload_folder(RUN, save(1, step)))


def status(ledger: Ledger) -> dict[int, str]:
    return {info.step: info.status for info in ledger.checkpoints(RUN)}


# What counts.


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ((), Outcome.ACCEPTED),
        ((quarantined(save(1, 1)),), Outcome.VOID),
        ((quarantined(save(1, 1)), CheckpointReinstated(save=save(1, 1), who="ann", turn=1)), Outcome.ACCEPTED),
        ((*VERIFIED, RETIRED), Outcome.NEVER),
        ((*VERIFIED, RETIRED, CheckpointsPurged(saves=(save(1, 1),))), Outcome.NEVER),
    ],
)
def test_V21_a_commit_borrows_from_what_is_whole_and_stays(before: tuple[Body, ...], expected: Outcome) -> None:
    body = committed(1, 6, borrows=(save(1, 1), save(1, 2)))
    assert outcome((*LIVE, *FIVE, *before), body) is expected
    assert outcome((*LIVE, *FIVE, *before), committed(1, 6)) is Outcome.ACCEPTED


def test_V21_a_retired_lender_lends_on_while_another_borrower_stays(ledger: Ledger, keeper: Keeper) -> None:
    """What is frozen is written once and borrowed for as long as it does not change."""
    live(ledger)
    commit(ledger, 1)
    for step in range(2, 9):
        commit(ledger, step, 1)
        retain(keeper, RUN, RetainRequest(keep_last=2))
    assert status(ledger)[1] == "retired"
    assert len(payload_of(ledger.storage, 1)) == 2
    assert fsck(ledger.storage, RUN, deep=True).findings == ()
    request = write_save(ledger.storage, 1, 12, borrowed=borrowing(manifest(ledger, 1)))
    for step in (9, 10, 11):
        commit(ledger, step)
        keeper.verify(RUN, save(1, step))
    retain(keeper, RUN, RetainRequest(keep_last=2))
    assert payload_of(ledger.storage, 1) == []
    with pytest.raises(Conflict, match="which is retired") as refusal:
        ledger.commit(RUN, request)
    assert refusal.value.fields["final"]
    Auditor(ledger.storage, RUN).assert_clean()


def test_V21_what_is_not_committed_cannot_be_borrowed_from() -> None:
    body = committed(1, 6, borrows=(save(1, 5, 2),))
    assert outcome((*LIVE, *FIVE), body) is Outcome.VOID
    assert outcome((*LIVE, *FIVE, committed(1, 5, 2)), body) is Outcome.ACCEPTED
    assert outcome((*LIVE, *FIVE, aborted(1, 5, 2)), body) is Outcome.NEVER


def test_V21_what_was_left_behind_can_be_borrowed_from() -> None:
    """It is off the line, and its bytes are as good."""
    before = (*LIVE, *FIVE, quarantined(save(1, 5)), opened(B), started(2, B, save(1, 4)))
    state = folded(*before, CheckpointReinstated(save=save(1, 5), who="ann", turn=1))
    ready_now = state.generations[-1]
    ready_now.ready = True
    assert judge(state, committed(2, 5, borrows=(save(1, 5),))).accepted


def test_V21_the_record_names_other_saves_sorted_each_once() -> None:
    for borrows in ((save(1, 2), save(1, 1)), (save(1, 1), save(1, 1)), (save(1, 6),)):
        with pytest.raises(ValidationError, match="sorted and each once"):
            committed(1, 6, borrows=borrows)
    with pytest.raises(ValidationError, match="at most"):
        committed(1, 999, borrows=tuple(save(1, step) for step in range(MAX_BORROWS + 1)))


def test_V19_what_is_borrowed_is_not_purged_before_the_last_borrower_is_retired() -> None:
    base = (*LIVE, *FIVE[:3], committed(1, 4, borrows=(save(1, 1),)), *(committed(1, step) for step in (5, 6)))
    base += tuple(CheckpointVerified(save=save(1, step), reader=ME) for step in (5, 6))
    purge = CheckpointsPurged(saves=(save(1, 1),))
    assert outcome((*base, RETIRED), purge) is Outcome.VOID
    last = CheckpointsRetired(saves=(save(1, 4),), turn=1)
    assert outcome((*base, RETIRED, last), purge) is Outcome.ACCEPTED


# The manifest.


def test_W4_a_manifest_lists_what_it_borrows_once(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    (borrowed,) = borrowing(manifest(ledger, 1))
    twice = (borrowed, borrowed.model_copy(update={"names": ("shared.v",)}))
    ledger.commit(RUN, write_save(ledger.storage, 1, 2, borrowed=twice))
    found = manifest(ledger, 2)
    assert [ref.key for ref in found.objects()] == [*(ref.key for ref in found.written()), borrowed.object.key]
    info = ledger.checkpoint_at(RUN, 2)
    assert (info.borrows, info.borrowed_bytes) == ((save(1, 1),), borrowed.object.size)
    assert info.payload_bytes == sum(ref.size for ref in found.written())
    assert ledger.checkpoint_at(RUN, 1).needed_by == (save(1, 2),)
    assert ledger.run_info(RUN).stored_bytes == info.payload_bytes + ledger.checkpoint_at(RUN, 1).payload_bytes


def _of_another_save(borrowed: Borrowed) -> Borrowed:
    return borrowed.model_copy(update={"save": save(1, 2)})


def _outside(borrowed: Borrowed) -> Borrowed:
    ref = borrowed.object.model_copy(update={"key": f"{layout.payload_folder(RUN, save(1, 1))}/../x"})
    return borrowed.model_copy(update={"object": ref})


def _of_another_run(borrowed: Borrowed) -> Borrowed:
    ref = borrowed.object.model_copy(update={"key": borrowed.object.key.replace(f"/{RUN}/", "/other/", 1)})
    return borrowed.model_copy(update={"object": ref})


@pytest.mark.parametrize("spoil", [_of_another_save, _outside, _of_another_run])
def test_W4_a_manifest_borrows_only_from_the_places_of_its_run(
    ledger: Ledger, spoil: Callable[[Borrowed], Borrowed]
) -> None:
    live(ledger)
    commit(ledger, 1)
    (borrowed,) = borrowing(manifest(ledger, 1))
    with pytest.raises(ValidationError, match="which is no object of"):
        write_save(ledger.storage, 1, 3, borrowed=(spoil(borrowed),))


def test_W4_a_manifest_borrows_from_a_bounded_number_of_saves(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    (one,) = borrowing(manifest(ledger, 1))

    def of(step: int) -> Borrowed:
        key = layout.payload_key(RUN, save(1, step), 0, "0" * 16)
        return one.model_copy(update={"save": save(1, step), "object": one.object.model_copy(update={"key": key})})

    with pytest.raises(ValidationError, match=f"{MAX_BORROWS + 1} saves"):
        write_save(ledger.storage, 1, 999, borrowed=tuple(of(step) for step in range(MAX_BORROWS + 1)))


# The commit.


def _other_digest(ref: ObjectRef) -> ObjectRef:
    return ref.model_copy(update={"chunks": ("00" * 8, *ref.chunks[1:])})


def test_W4_what_is_borrowed_is_what_its_save_wrote(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    (borrowed,) = borrowing(manifest(ledger, 1))
    wrong = borrowed.model_copy(update={"object": _other_digest(borrowed.object)})
    with pytest.raises(Invalid, match="is not among the objects"):
        ledger.commit(RUN, write_save(ledger.storage, 1, 2, borrowed=(wrong,)))


def test_W4_no_chains_what_a_save_borrowed_cannot_be_borrowed_from_it(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    commit(ledger, 2, 1)
    chained = manifest(ledger, 2).borrowed()
    ((key, (_, ref)),) = chained.items()
    with pytest.raises(ValidationError, match="which is no object of"):
        write_save(ledger.storage, 1, 3, borrowed=(Borrowed(save=save(1, 2), object=ref, names=("shared.w",)),))
    assert key.startswith(layout.payload_folder(RUN, save(1, 1)))


def test_W4_a_borrowed_object_that_is_gone_or_cut_stops_the_commit(ledger: Ledger, storage: Storage) -> None:
    live(ledger)
    commit(ledger, 1)
    (borrowed,) = borrowing(manifest(ledger, 1))
    overwrite(storage, borrowed.object.key, b"cut")
    with pytest.raises(Corrupt, match="found 3 bytes"):
        ledger.commit(RUN, write_save(storage, 1, 2, borrowed=(borrowed,)))


def test_V21_a_lender_that_was_collected_meanwhile_is_refused_for_good(ledger: Ledger, keeper: Keeper) -> None:
    """The client wrote its save when the lender was still there; it hears that it must write in full."""
    live(ledger)
    for step in (1, 2, 3):
        commit(ledger, step)
    request = write_save(ledger.storage, 1, 4, borrowed=borrowing(manifest(ledger, 1)))
    assert retain(keeper, RUN, RetainRequest(keep_last=2)).purged == (save(1, 1),)
    with pytest.raises(Conflict, match="which is retired") as refusal:
        ledger.commit(RUN, request)
    assert refusal.value.fields["final"]
    Auditor(ledger.storage, RUN).assert_clean()


# Retention and collection.


def test_K3_the_bytes_of_a_lender_stay_until_nobody_needs_them(ledger: Ledger, keeper: Keeper) -> None:
    live(ledger)
    commit(ledger, 1)
    for step in (2, 3, 4):
        commit(ledger, step, 1)
    (told,) = [d.rule for d in keeper.plan(RUN, TWO) if d.step == 1]
    assert told == "no rule keeps it; its bytes stay for the sake of 2 that borrow from it, the newest of step 4"
    answer = retain(keeper, RUN, RetainRequest(keep_last=2))
    assert (answer.retired, answer.purged) == ((save(1, 1), save(1, 2)), (save(1, 2),))
    assert [(lent.save, lent.needed_by) for lent in answer.lent] == [(save(1, 1), (save(1, 3), save(1, 4)))]
    assert len(payload_of(ledger.storage, 1)) == 2
    assert fsck(ledger.storage, RUN, deep=True).findings == ()
    for step in (5, 6):
        commit(ledger, step)
        keeper.verify(RUN, save(1, step))
    answer = retain(keeper, RUN, RetainRequest(keep_last=2))
    assert set(answer.purged) == {save(1, 1), save(1, 3), save(1, 4)}
    assert (payload_of(ledger.storage, 1), answer.lent) == ([], ())
    Auditor(ledger.storage, RUN).assert_clean()


class Watched(MemoryStorage):
    """Before the first deletion something else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.before_deletion: Callable[[], None] | None = None

    def delete(self, key: str) -> None:
        happens, self.before_deletion = self.before_deletion, None
        if happens is not None:
            happens()
        super().delete(key)


def test_K3_nobody_can_begin_to_borrow_while_a_collector_deletes() -> None:
    storage = Watched()
    ledger, other = a_ledger(storage), a_ledger(storage)
    keeper = Keeper(ledger, reader=a_third_reader)
    live(ledger)
    for step in (1, 2, 3):
        commit(ledger, step)
    request = write_save(storage, 1, 4, borrowed=borrowing(manifest(ledger, 1)))
    refused: list[str] = []

    def borrow() -> None:
        with pytest.raises(Conflict, match="which is retired") as refusal:
            other.commit(RUN, request)
        refused.append(refusal.value.message)

    storage.before_deletion = borrow
    assert retain(keeper, RUN, RetainRequest(keep_last=2)).purged == (save(1, 1),)
    assert len(refused) == 1
    Auditor(storage, RUN).assert_clean()


# Damage.


def damage(ledger: Ledger, step: int, of: int, writer: int = 0) -> DamageAnswer:
    """Somebody loads the checkpoint of `step` and finds the object that the one of step `of` wrote damaged."""
    key = manifest(ledger, of).written()[writer].key
    data = bytearray(ledger.storage.get(key, 1 << 20))
    data[20] ^= 1
    overwrite(ledger.storage, key, bytes(data))
    found = Damage(object=key, chunk=1, expected="aa", observed="bb")
    return ledger.report_damage(RUN, DamageReport(save=save(1, step), damage=found, reader=ME))


def test_D5_one_damaged_object_costs_one_fallback_though_many_need_it(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    commit(ledger, 2)
    for step in (3, 4, 5, 6, 7):
        commit(ledger, step, 2)
    ledger.open(RUN, opening(B))
    first = ledger.begin(RUN, beginning(B))
    assert (first.checkpoint and first.checkpoint.step) == 7
    assert damage(ledger, 7, 2).confirmed
    second = ledger.begin(RUN, beginning(B, fallback_of=first.generation))
    assert (second.checkpoint and second.checkpoint.step) == 1
    ledger.ready(RUN, B, second.generation)
    state = ledger.state(RUN)
    assert set(state.quarantined) == {save(1, step) for step in (2, 3, 4, 5, 6, 7)}
    assert {body.confirmed_by.process for body in state.quarantined.values() if body.confirmed_by} == {"pid 2"}
    assert state.void == {}
    Auditor(ledger.storage, RUN).assert_clean(damaged=list(state.quarantined))


def test_D5_who_does_not_need_the_object_keeps_its_step(ledger: Ledger) -> None:
    """Writer 1's object is lent to nobody; those that borrow writer 0's from the same save are whole."""
    live(ledger)
    commit(ledger, 1)
    commit(ledger, 2, 1)
    commit(ledger, 3)
    assert damage(ledger, 1, 1, writer=1).confirmed
    assert status(ledger) == {1: "quarantined", 2: "valid", 3: "valid"}


def test_D5_damage_that_is_missing_is_found_before_anything_is_promised(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    commit(ledger, 2)
    for step in (3, 4, 5, 6):
        commit(ledger, step, 2)
    ledger.storage.delete(manifest(ledger, 2).written()[0].key)
    ledger.open(RUN, opening(B))
    answer = ledger.begin(RUN, beginning(B))
    assert (answer.checkpoint and answer.checkpoint.step) == 1
    assert answer.generation == 2


def test_D5_all_need_the_object_the_run_is_corrupt_and_never_new(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    commit(ledger, 2, 1)
    assert damage(ledger, 2, 1).confirmed
    assert ledger.latest(RUN).answer == "corrupt"
    ledger.open(RUN, opening(C))
    with pytest.raises(Corrupt, match="not started from zero"):
        ledger.begin(RUN, beginning(C))


def test_D5_what_one_reader_alone_sees_gives_none_of_them_up(ledger: Ledger) -> None:
    live(ledger)
    commit(ledger, 1)
    commit(ledger, 2, 1)
    found = Damage(object=manifest(ledger, 1).written()[0].key, chunk=1, expected="aa", observed="bb")
    answer = ledger.report_damage(RUN, DamageReport(save=save(1, 2), damage=found, reader=ME))
    assert (answer.confirmed, status(ledger)) == (False, {1: "valid", 2: "valid"})


class Interrupted:
    """A second reader during whose reading something else happens."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def __call__(self, storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
        reading = other_reader(storage, ref)
        self.happens()
        return reading


def test_D5_who_is_committed_during_the_second_reading_is_found_too(storage: MemoryStorage) -> None:
    other = a_ledger(storage)
    live(other)
    commit(other, 1)
    commit(other, 2, 1)
    ledger = a_ledger(storage)
    ledger._second_reader = Interrupted(lambda: commit(other, 3, 1))
    assert damage(ledger, 2, 1).confirmed
    assert status(ledger) == {1: "quarantined", 2: "quarantined", 3: "quarantined"}
    with pytest.raises(Conflict, match="which is in quarantine"):
        commit(other, 4, 1)


def test_D5_what_a_person_reinstated_during_the_reading_stays_so(storage: MemoryStorage) -> None:
    """Whoever decides later knows more; the reading is older than that."""
    ledger, other = a_ledger(storage), a_ledger(storage)
    live(other)
    commit(other, 1)
    commit(other, 2, 1)
    commit(other, 3, 1)
    keeper = Keeper(other)

    def decide() -> None:
        keeper.quarantine(RUN, save(1, 2), who="ann", reason="?")
        keeper.reinstate(RUN, save(1, 2), who="ann", reason="it is mended")

    ledger._second_reader = Interrupted(decide)
    assert damage(ledger, 3, 1).confirmed
    assert status(ledger) == {1: "quarantined", 2: "valid", 3: "quarantined"}


def test_verify_and_fsck_find_the_damage_in_each_that_needs_it(ledger: Ledger, keeper: Keeper) -> None:
    live(ledger)
    commit(ledger, 1)
    commit(ledger, 2, 1)
    key = manifest(ledger, 1).written()[0].key
    overwrite(ledger.storage, key, b"x" * ledger.storage.size(key))
    answer = fsck(ledger.storage, RUN, deep=True)
    assert [(f.object, f.save) for f in answer.findings] == [(key, save(1, 1)), (key, save(1, 2))]
    assert answer.objects == 2 + 2 + 2  # manifests, and each object once
    finding = keeper.verify(RUN, save(1, 2))
    assert finding is not None
    assert finding.confirmed
    assert status(ledger) == {1: "quarantined", 2: "quarantined"}
    assert {f.severity for f in fsck(ledger.storage, RUN, deep=True).findings} == {"known"}
