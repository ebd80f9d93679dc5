"""The slots of a log in folders: finding its end, and going on into the next folder."""

from __future__ import annotations

import pytest

from ckptd import layout
from ckptd.errors import Corrupt, Unavailable
from ckptd.log import RunLog
from ckptd.slots import all_slots, last_slot, last_slot_after
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from ckptd.testing.histories import WHOLE_RECORDS, write_history
from tests.core.by_hand import RUN, aborted, save


def put(storage: MemoryStorage, *keys: str) -> None:
    for key in keys:
        storage.put(key, [b"x"], 1)


def filled(*slots: int) -> FaultyStorage:
    inner = MemoryStorage()
    put(inner, *(layout.log_key(RUN, seq) for seq in slots))
    return FaultyStorage(inner)


@pytest.mark.parametrize("last", [1, 98, 99, 100, 101, 200, 123_456])
def test_the_end_is_found_in_two_listings(last: int) -> None:
    storage = filled(*range(max(1, last - 30), last + 1))
    assert last_slot(storage, RUN) == last
    assert storage.calls == {"list": 2}


@pytest.mark.parametrize(
    ("seq", "last", "listings"),
    [(1, 5, 1), (5, 5, 1), (5, 98, 1), (5, 99, 2), (99, 99, 2), (99, 130, 2), (130, 130, 1), (5, 250, 3)],
)
def test_who_has_read_on_lists_no_more_than_is_new(seq: int, last: int, listings: int) -> None:
    storage = filled(*range(1, last + 1))
    assert last_slot_after(storage, RUN, seq) == last
    assert storage.calls == {"list": listings}


def test_an_append_looks_behind_a_folder_that_is_gone() -> None:
    """Whoever only reads goes on with what is there; nothing is put into the gap."""
    inner = MemoryStorage()
    write_history(inner, RUN, records=250)
    copy = MemoryStorage()
    write_history(copy, RUN, records=90)
    log = RunLog(copy, RUN, actor="me")
    log.replay()
    for seq in range(200, 251):
        data = inner.get(layout.log_key(RUN, seq), 1 << 20)
        copy.put(layout.log_key(RUN, seq), [data], len(data))
    with pytest.raises(Corrupt, match="later slots are filled"):
        log.append(lambda state: aborted(9, 1), deadline_seconds=2.0)
    assert 91 not in all_slots(copy, RUN)


def test_a_log_without_slots_ends_at_0() -> None:
    assert last_slot(filled(), RUN) == 0


def test_an_empty_folder_at_the_end_is_passed_over() -> None:
    """A write that failed made it, or its listing is old."""
    storage = filled(98, 99, 100)
    storage.hide(layout.segment_folder(RUN, 1), last=1)
    assert last_slot(storage, RUN) == 99
    storage.hide(layout.segment_folder(RUN, 0), last=2)
    assert last_slot(storage, RUN) == 0


def test_an_old_listing_of_the_folders_is_an_earlier_end() -> None:
    storage = filled(98, 99, 100, 200)
    storage.hide(layout.log_folder(RUN), last=1)
    assert last_slot(storage, RUN) == 100


def test_other_names_are_no_slots() -> None:
    inner = MemoryStorage()
    folder = layout.log_folder(RUN)
    put(
        inner,
        layout.log_key(RUN, 1),
        f"{folder}/00000000000009",
        f"{folder}/9/{5:016d}.json",
        f"{folder}/{7:016d}.json",
    )
    put(inner, f"{layout.segment_folder(RUN, 0)}/{101:016d}.json")  # not where that slot lies
    assert last_slot(inner, RUN) == 1
    assert list(all_slots(inner, RUN)) == [1]


def test_all_slots_come_in_order() -> None:
    slots = [1, 2, 99, 100, 101, 250]
    assert list(all_slots(filled(*slots), RUN)) == slots


def test_the_first_slot_of_a_folder_knows_the_folder_before() -> None:
    for seq in (1, 99, 101, 199):
        assert layout.segment_before(layout.log_key(RUN, seq)) is None
    assert layout.segment_before(layout.log_key(RUN, 100)) == layout.segment_folder(RUN, 0)
    assert layout.segment_before(layout.log_key(RUN, 4100)) == layout.segment_folder(RUN, 40)
    assert layout.segment_before(layout.manifest_key(RUN, save(1, 1), "0" * 64)) is None


# Across the boundary.


@pytest.fixture
def storage() -> FaultyStorage:
    """A log whose next slot is 99."""
    inner = MemoryStorage()
    write_history(inner, RUN, records=98)
    return FaultyStorage(inner)


def a_log(storage: FaultyStorage) -> RunLog:
    return RunLog(storage, RUN, actor="me", pause=lambda seconds: None)


def append(log: RunLog, step: int) -> str:
    generation = log.replay().generations[-1].number
    return log.append(lambda state: aborted(generation, step, count=9), deadline_seconds=2.0)


def test_L1_slots_go_on_in_the_next_folder_without_a_gap(storage: FaultyStorage) -> None:
    writer, follower = a_log(storage), a_log(storage)
    follower.replay()
    for step in range(5):
        append(writer, step)
        assert follower.replay().seq == 99 + step
    assert list(all_slots(storage, RUN)) == list(range(1, 104))
    assert storage.inner.list(layout.segment_folder(RUN, 1)) == [f"{seq:016d}.json" for seq in range(100, 104)]
    assert a_log(storage).replay() == writer.state


def test_L1_a_gap_before_a_folder_makes_the_run_read_only(storage: FaultyStorage) -> None:
    writer = a_log(storage)
    for step in range(3):
        append(writer, step)
    storage.inner.delete(layout.log_key(RUN, 99))
    with pytest.raises(Corrupt, match="later slots are filled"):
        RunLog(storage, RUN, actor="me", snapshot_records=10**6).replay()


def test_L4_a_listing_without_the_newest_folder_is_merely_old(storage: FaultyStorage) -> None:
    log = a_log(storage)
    for step in range(3):
        append(log, step)
    storage.hide(layout.log_folder(RUN), last=1)
    assert log.replay().seq == 101
    other = a_log(storage)
    assert other.replay().seq == 99
    assert other.replay(to_the_end=True).seq == 101  # as before anybody is told that something is not there
    append(other, 7)
    assert list(all_slots(storage.inner, RUN))[-1] == 102


def test_A5_a_folder_that_could_not_be_made_is_tried_again(storage: FaultyStorage) -> None:
    log = a_log(storage)
    append(log, 0)
    storage.fail_before("put", layout.log_key(RUN, 100), times=2, error=Unavailable("planned: mkdir failed"))
    append(log, 1)
    assert last_slot(storage, RUN) == 100


def test_the_newest_checkpoints_of_a_made_history_are_whole() -> None:
    storage = MemoryStorage()
    digest = write_history(storage, RUN, records=4 * WHOLE_RECORDS)
    state = RunLog(storage, RUN, actor="me").replay()
    assert (state.seq, state.digest) == (4 * WHOLE_RECORDS, digest)
    assert len(state.void) == len(state.generations) - 1  # the late commit of each generation but the last
    for checkpoint in state.checkpoints.values():
        if checkpoint.seq > 3 * WHOLE_RECORDS:
            assert storage.size(checkpoint.manifest.key) == checkpoint.manifest.size
    assert len(state.retired) == len(state.purged) > len(state.checkpoints) - 10
