"""What is done to checkpoints after their commit: by people, by verification, by retention and collection."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd import layout
from ckptd.errors import Conflict, Fenced, Invalid, NotFound
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.lineage import CRASH_LOOP_STARTS
from ckptd.manifest import ManifestRef, ObjectRef
from ckptd.retention import Policy
from ckptd.second import Reading, read_here
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faulty import FaultyStorage
from tests.core.by_hand import OTHER, RUN, A, B, a_ledger, beginning, live, opening, overwrite, save, write_save

TWO = Policy(keep_last=2)


@pytest.fixture
def inner() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def storage(inner: MemoryStorage) -> FaultyStorage:
    return FaultyStorage(inner)


@pytest.fixture
def ledger(storage: FaultyStorage) -> Ledger:
    return a_ledger(storage)


def a_second(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
    """Stands for the process that verifies; `a_ledger` has the one that reads again."""
    return Reading(reader=OTHER.model_copy(update={"process": "the verifier"}), damage=read_here(storage, ref).damage)


@pytest.fixture
def keeper(ledger: Ledger) -> Keeper:
    return Keeper(ledger, reader=a_second)


def commit(ledger: Ledger, storage: Storage, *steps: int, generation: int = 1) -> list[str]:
    for step in steps:
        ledger.commit(RUN, write_save(storage, generation, step))
    return [save(generation, step) for step in steps]


def objects(storage: Storage, name: str) -> list[str]:
    """Every object of a save."""
    folders = (layout.manifest_folder(RUN, name), layout.payload_folder(RUN, name))
    return [f"{folder}/{item}" for folder in folders for item in storage.list(folder)]


# People.


def test_a_quarantine_by_hand_and_back(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    commit(ledger, inner, 1, 2)
    for _ in range(2):  # both are as good twice as once
        keeper.quarantine(RUN, save(1, 2), who="ann", reason="diverged")
    latest = ledger.latest(RUN)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1
    assert "diverged" in latest.candidates[0].reason
    for _ in range(2):
        keeper.reinstate(RUN, save(1, 2), who="ann", reason="it was the plot")
    latest = ledger.latest(RUN)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 2
    assert ledger.state(RUN).void == {}


def test_a_roll_back_fences_the_running_job(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    commit(ledger, inner, 1, 2, 3)
    keeper.rollback(RUN, save(1, 1), who="ann", reason="the loss explodes")
    assert ledger.current(RUN).ended == "rolled back"
    with pytest.raises(Fenced, match="rolled back"):
        ledger.commit(RUN, write_save(inner, 1, 4))
    assert ledger.save_status(RUN, save(1, 4)).status == "fenced"
    ledger.open(RUN, opening(B))
    answer = ledger.begin(RUN, beginning(B))
    assert answer.checkpoint is not None
    assert answer.checkpoint.save == save(1, 1)
    assert not ledger.current(RUN).ended
    Auditor(inner, RUN).assert_clean()


def test_a_roll_back_to_nothing_valid_is_refused(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    commit(ledger, inner, 1, 2)
    with pytest.raises(NotFound, match="no checkpoint"):
        keeper.rollback(RUN, save(1, 7), who="ann", reason="")
    keeper.quarantine(RUN, save(1, 1), who="ann", reason="")
    with pytest.raises(Conflict, match="no valid checkpoint"):
        keeper.rollback(RUN, save(1, 1), who="ann", reason="")


def test_pins_and_holds_are_shown_and_end(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    commit(ledger, inner, 1)
    for _ in range(2):
        keeper.pin(RUN, save(1, 1), "ann")
        keeper.hold(RUN, save(1, 1), "eval-7")
    info = ledger.checkpoint_at(RUN, 1)
    assert (info.pinned_by, info.held_by) == (("ann",), ("eval-7",))
    for _ in range(2):
        keeper.unpin(RUN, save(1, 1), "ann")
        keeper.release(RUN, save(1, 1), "eval-7")
    info = ledger.checkpoint_at(RUN, 1)
    assert (info.pinned_by, info.held_by) == ((), ())
    keeper.pin(RUN, save(1, 1), "ann")
    assert ledger.checkpoint_at(RUN, 1).pinned_by == ("ann",)


# Verification.


def test_what_was_read_whole_is_verified(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    commit(ledger, inner, 1)
    assert keeper.verify(RUN, save(1, 1)) is None
    assert ledger.checkpoint_at(RUN, 1).verified
    assert keeper.verify(RUN, save(1, 1)) is None
    assert ledger.state(RUN).turns[f"verify:{save(1, 1)}"] == 2


@pytest.mark.parametrize("which", ["manifest", "payload"])
def test_damage_found_by_verification_is_read_again(
    ledger: Ledger, keeper: Keeper, inner: Storage, which: str
) -> None:
    live(ledger)
    commit(ledger, inner, 1, 2)
    keys = objects(inner, save(1, 2))
    key = next(k for k in keys if ("/manifest-" in k) == (which == "manifest") and "/part-" not in k)
    overwrite(inner, key, bytes(inner.size(key)))
    answer = keeper.verify(RUN, save(1, 2))
    assert answer is not None
    assert answer.confirmed
    assert not ledger.checkpoint_at(RUN, 2).verified
    latest = ledger.latest(RUN)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 1


def test_V15_nothing_is_decided_about_a_state_that_nobody_saw(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    """A quarantine was taken back and made again between a person's look and the record."""
    live(ledger)
    (name,) = commit(ledger, inner, 1)
    keeper.quarantine(RUN, name, who="ann", reason="")
    other = a_ledger(inner)
    states = [ledger.state(RUN)]
    keeper.reinstate(RUN, name, who="bob", reason="")
    keeper.quarantine(RUN, name, who="bob", reason="now really")
    states.append(ledger.state(RUN))
    other.state = lambda run: states.pop(0)  # type: ignore[method-assign]
    Keeper(other).reinstate(RUN, name, who="ann", reason="")  # what she asked for is what bob did first
    assert name in ledger.state(RUN).quarantined


def test_a_new_hold_of_a_reader_that_was_silent_stays(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    (name,) = commit(ledger, inner, 1)
    keeper.hold(RUN, name, "eval")
    keeper.release(RUN, name, "eval")
    keeper.hold(RUN, name, "eval")
    keeper.release_silent(RUN, name, "eval", 1)  # the end of the hold that has ended
    assert ledger.state(RUN).held == {name: {"eval"}}


# Retention and collection.


def test_K1_retired_bytes_go_and_the_rest_stays(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3, 4)
    for name in names[2:]:
        keeper.verify(RUN, name)
    assert [d.step for d in keeper.retire(RUN, TWO)] == [1, 2]
    collected = keeper.collect(RUN)
    assert collected.purged == tuple(names[:2])
    assert [objects(inner, name) for name in names[:2]] == [[], []]
    assert all(objects(inner, name) for name in names[2:])
    assert [c.status for c in ledger.checkpoints(RUN)] == ["purged", "purged", "valid", "valid"]
    assert keeper.retire(RUN, TWO) == []
    assert keeper.collect(RUN).objects == 0
    Auditor(inner, RUN).assert_clean(acknowledged=names[2:])


def test_nothing_is_retired_before_two_are_verified(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3, 4)
    with pytest.raises(Conflict, match="verified"):
        keeper.retire(RUN, TWO)
    order = []
    while (name := keeper.unverified(RUN, TWO)) is not None:
        order.append(name)
        keeper.verify(RUN, name)
    assert order == [names[3], names[2]]
    assert len(keeper.retire(RUN, TWO)) == 2


def test_K2_an_ended_generation_leaves_nothing_behind(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    commit(ledger, inner, 1)
    lost = write_save(inner, 1, 2)
    assert keeper.collect(RUN).objects == 0  # it may still be committed
    ledger.open(RUN, opening(B))
    ledger.begin(RUN, beginning(B))
    assert keeper.collect(RUN).objects > 0
    assert objects(inner, lost.save) == []
    assert objects(inner, save(1, 1))
    write_save(inner, 1, 3)  # a zombie goes on writing
    assert keeper.collect(RUN).objects > 0
    assert objects(inner, save(1, 3)) == []
    with pytest.raises(Fenced):
        ledger.commit(RUN, lost)
    Auditor(inner, RUN).assert_clean(acknowledged=[save(1, 1)])


def test_K2_what_a_killed_writer_left_without_a_name_goes_with_its_generation(
    ledger: Ledger, keeper: Keeper, inner: Storage
) -> None:
    live(ledger)
    ledger.open(RUN, opening(B))
    ledger.begin(RUN, beginning(B))
    keys = [layout.payload_key(RUN, save(g, 1), 0, "n") for g in (1, 2)]
    keys += [layout.manifest_key(RUN, save(g, 1), "0" * 64) for g in (1, 2)]
    left = [f"{layout.tmp_folder(key)}/nonce-{number}" for number, key in enumerate(keys)]
    record = f"{layout.tmp_folder(layout.log_key(RUN, 1))}/nonce"
    for key in (*left, record):
        inner.put(key, [b"x"], 1)
    assert keeper.collect(RUN).objects == 2
    for key in (left[0], left[2]):
        with pytest.raises(NotFound):
            inner.size(key)
    assert {inner.size(key) for key in (left[1], left[3], record)} == {1}


def test_K2_what_a_killed_writer_left_of_a_record_goes_when_its_slots_are_full(
    ledger: Ledger, keeper: Keeper, inner: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SEGMENT_SLOTS", 4)
    live(ledger)  # four records: slots 1 to 3 are in segment 0, slot 4 in segment 1
    left = [f"{layout.tmp_folder(layout.log_key(RUN, seq))}/nonce" for seq in (3, 4)]
    for key in left:
        inner.put(key, [b"x"], 1)
    assert keeper.collect(RUN).objects == 1
    with pytest.raises(NotFound):
        inner.size(left[0])
    assert inner.size(left[1]) == 1  # whoever wrote it may still name it
    commit(ledger, inner, 1, 2, 3)  # up to slot 7
    assert keeper.collect(RUN).objects == 1
    assert inner.list(layout.unnamed_folder(RUN)) == []


def test_K1_killed_between_record_and_deletion_the_next_pass_goes_on(
    ledger: Ledger, keeper: Keeper, storage: FaultyStorage, inner: Storage
) -> None:
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3, 4)
    for name in names[2:]:
        keeper.verify(RUN, name)
    keeper.retire(RUN, TWO)
    inner.delete(objects(inner, names[0])[0])  # as far as the one before it came
    other = Keeper(a_ledger(inner), reader=a_second)
    assert other.collect(RUN).purged == tuple(names[:2])
    assert objects(inner, names[0]) == objects(inner, names[1]) == []
    assert keeper.collect(RUN).objects == 0


def test_K1_what_comes_back_after_the_purge_goes_too(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    """A put that was thought lost lands after the deletion."""
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3)
    for name in names[1:]:
        keeper.verify(RUN, name)
    late = objects(inner, names[0])[-1]
    keeper.retire(RUN, TWO)
    keeper.collect(RUN)
    inner.put(late, [b"late"], 4)
    assert keeper.collect(RUN).objects == 1
    assert objects(inner, names[0]) == []


def test_two_keepers_at_once_do_it_once(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    """Both planned before either of them retired: of equal plans one record, of different ones the first counts."""
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3, 4, 5)
    for name in names[2:]:
        keeper.verify(RUN, name)
    other = a_ledger(inner)
    state = ledger.state(RUN)
    late = Keeper(other, reader=a_second)
    other.state = lambda run: state  # type: ignore[method-assign]
    keeper.retire(RUN, TWO)
    assert len(late.retire(RUN, TWO)) == 3
    with pytest.raises(Conflict):
        late.retire(RUN, Policy(keep_last=3))
    assert ledger.state(RUN).turns["retire"] == 1
    Auditor(inner, RUN).assert_clean()


def test_of_two_roll_backs_at_once_one_is_refused(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3)
    other = a_ledger(inner)
    state = ledger.state(RUN)
    other.state = lambda run: state  # type: ignore[method-assign]
    keeper.rollback(RUN, names[0], who="ann", reason="")
    with pytest.raises(Conflict):
        Keeper(other).rollback(RUN, names[1], who="bob", reason="")
    Keeper(other).rollback(RUN, names[0], who="bob", reason="")  # what holds already
    assert ledger.state(RUN).tip == names[0]


def test_a_pin_that_comes_between_plan_and_record_wins(ledger: Ledger, keeper: Keeper, inner: Storage) -> None:
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3, 4)
    for name in names[2:]:
        keeper.verify(RUN, name)
    other = a_ledger(inner)
    state = other.state(RUN)
    other.state = lambda run: state  # type: ignore[method-assign]
    keeper.pin(RUN, names[0], "ann")
    with pytest.raises(Conflict, match="pinned by ann"):
        Keeper(other, reader=a_second).retire(RUN, TWO)


@pytest.mark.parametrize(
    "act",
    [
        lambda keeper, name: keeper.quarantine(RUN, name, who="ann", reason=""),
        lambda keeper, name: keeper.pin(RUN, name, "ann"),
        lambda keeper, name: keeper.hold(RUN, name, "ann"),
    ],
)
def test_what_is_retired_is_told_so(
    ledger: Ledger, keeper: Keeper, inner: Storage, act: Callable[[Keeper, str], None]
) -> None:
    live(ledger)
    names = commit(ledger, inner, 1, 2, 3)
    for name in names[1:]:
        keeper.verify(RUN, name)
    keeper.retire(RUN, TWO)
    with pytest.raises(Invalid, match="retired"):
        act(keeper, names[0])


def test_a_lost_answer_is_found_out_and_not_doubled(
    ledger: Ledger, keeper: Keeper, storage: FaultyStorage, inner: Storage
) -> None:
    live(ledger)
    names = commit(ledger, inner, 1)
    seq = ledger.state(RUN).seq
    lost = storage.fail_after("put", layout.log_key(RUN, seq + 1))
    keeper.pin(RUN, names[0], "ann")
    assert lost.fired
    assert ledger.state(RUN).pinned == {names[0]: {"ann"}}
    assert ledger.state(RUN).seq == seq + 1


# The crash loop.


def test_V20_a_start_that_died_too_often_goes_to_the_checkpoint_before(ledger: Ledger, inner: Storage) -> None:
    live(ledger)
    commit(ledger, inner, 1, 2)
    steps, reasons = [], []
    for number in range(CRASH_LOOP_STARTS + 2):
        attempt = f"{number + 1:032x}"
        ledger.open(RUN, opening(attempt))
        answer = ledger.begin(RUN, beginning(attempt))
        assert answer.checkpoint is not None
        steps.append(answer.checkpoint.step)
        reasons.append(answer.candidates[0].reason)
        ledger.ready(RUN, attempt, answer.generation)
    assert steps == [2] * CRASH_LOOP_STARTS + [1, 1]
    assert "crash-loop" in reasons[CRASH_LOOP_STARTS]
    Auditor(inner, RUN).assert_clean(acknowledged=[save(1, 1)])


def test_V20_progress_clears_the_doubt(ledger: Ledger, inner: Storage) -> None:
    live(ledger, A)
    commit(ledger, inner, 1, 2)
    step = 2
    for number in range(CRASH_LOOP_STARTS * 3):
        attempt = f"{number + 1:032x}"
        ledger.open(RUN, opening(attempt))
        answer = ledger.begin(RUN, beginning(attempt))
        assert answer.checkpoint is not None
        assert answer.checkpoint.step == step
        ledger.ready(RUN, attempt, answer.generation)
        if number % CRASH_LOOP_STARTS == CRASH_LOOP_STARTS - 1:
            step += 1
            ledger.commit(RUN, write_save(inner, answer.generation, step))
    assert ledger.state(RUN).quarantined == {}
