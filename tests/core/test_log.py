"""Reading a log and appending to it, through a storage that loses answers, is late, or shows old listings."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd import layout
from ckptd.digests import ZERO_SHA256
from ckptd.encoding import MAX_RECORD_BYTES, sealed
from ckptd.errors import Conflict, Corrupt, Fenced, NotFound, NotInitialised, OutcomeUnknown, Unavailable
from ckptd.log import RunLog
from ckptd.records import Body
from ckptd.slots import all_slots
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faults import Delayed
from ckptd.testing.faulty import FaultyStorage
from tests.core.by_hand import (
    LIVE,
    RUN,
    START,
    A,
    B,
    HandLog,
    ManualClock,
    aborted,
    committed,
    created,
    opened,
    overwrite,
    ready,
    save,
    started,
)
from tests.homes import everything

DEADLINE_SECONDS = 60.0


@pytest.fixture
def inner(store: Storage) -> Storage:
    return store


@pytest.fixture
def storage(inner: Storage) -> FaultyStorage:
    return FaultyStorage(inner)


def a_log(storage: Storage, run: str = RUN) -> RunLog:
    clock = ManualClock()
    return RunLog(storage, run, actor="me", pause=clock.pause, clock=clock)


def slot(seq: int) -> str:
    return layout.log_key(RUN, seq)


def raw(storage: Storage, seq: int) -> bytes:
    return storage.get(slot(seq), MAX_RECORD_BYTES)


def append(log: RunLog, body: Body, deadline_seconds: float = 2.0) -> str:
    return log.append(lambda state: body, deadline_seconds=deadline_seconds)


def kinds(storage: Storage) -> list[str]:
    return [str(json.loads(storage.get(slot(seq), 1 << 20))["rid"]) for seq in all_slots(storage, RUN)]


def release(late: Delayed) -> None:
    late.release()


# Reading


def test_a_log_that_does_not_exist_is_empty(storage: FaultyStorage) -> None:
    assert a_log(storage).replay() == RunState()


def test_replay_reads_on_from_where_it_was(inner: Storage, storage: FaultyStorage) -> None:
    hand, log = HandLog(inner), a_log(storage)
    hand.add(*START)
    assert log.replay().seq == 3
    storage.history.clear()
    hand.add(ready(1, A), committed(1, 5))
    assert log.replay().tip == save(1, 5)
    assert [key for operation, key in storage.history if operation == "get"] == [slot(4), slot(5)]


def test_names_that_are_no_slots_are_passed_over(inner: Storage) -> None:
    HandLog(inner).add(*START)
    for name in ("README", "0000000000000009.json.tmp", "12.json", ".nfs0000"):
        inner.put(f"{layout.log_folder(RUN)}/{name}", [b"x"], 1)
        inner.put(f"{layout.segment_folder(RUN, 0)}/{name}", [b"x"], 1)
    assert a_log(inner).replay().seq == 3


def test_L1_slots_are_numbered_from_1_without_a_gap(inner: Storage) -> None:
    log = a_log(inner)
    for body in LIVE:
        append(log, body)
    assert inner.list(layout.segment_folder(RUN, 0)) == [f"{seq:016d}.json" for seq in range(1, 5)]


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_L1_a_missing_slot_before_a_filled_one_makes_the_run_read_only(inner: Storage, gone: int) -> None:
    HandLog(inner).add(*LIVE)
    inner.delete(slot(gone))
    log = a_log(inner)
    for attempt in (log.replay, lambda: append(log, committed(1, 1))):
        with pytest.raises(Corrupt, match="later slots are filled") as caught:
            attempt()
        assert caught.value.fields["object"] == slot(gone)
    assert log.state.seq == gone - 1
    assert 5 not in all_slots(inner, RUN)


@pytest.mark.parametrize("which", [1, 2, 3])
def test_L2_a_changed_slot_makes_the_run_read_only(inner: Storage, which: int) -> None:
    HandLog(inner).add(*LIVE)
    value = json.loads(raw(inner, which))
    overwrite(inner, slot(which), sealed(value | {"actor": "somebody else"}))
    with pytest.raises(Corrupt) as caught:
        a_log(inner).replay()
    assert caught.value.fields["object"] == slot(which + 1)
    assert slot(which + 1) in caught.value.message


def test_L2_each_record_carries_the_digest_of_the_bytes_before_it(inner: Storage) -> None:
    hand = HandLog(inner)
    hand.add(*START, prev="0" * 64)
    with pytest.raises(Corrupt) as caught:
        a_log(inner).replay()
    assert caught.value.fields["object"] == slot(2)
    assert json.loads(raw(inner, 1))["prev"] == ZERO_SHA256


def test_L2_unknown_keys_belong_to_the_chained_bytes(inner: Storage) -> None:
    HandLog(inner).add(*LIVE, color="red")
    assert a_log(inner).replay().seq == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"", "is damaged"),
        (b"\0" * 300, "is damaged"),
        (b"{", "is damaged"),
        (b"[]", "is damaged"),
        (b"x" * (MAX_RECORD_BYTES + 1), f"at most {MAX_RECORD_BYTES} bytes"),
    ],
)
def test_L3_a_damaged_slot_is_named(inner: Storage, damage: bytes, message: str) -> None:
    HandLog(inner).add(*LIVE)
    overwrite(inner, slot(3), damage)
    log = a_log(inner)
    with pytest.raises(Corrupt, match=message) as caught:
        log.replay()
    assert caught.value.fields["object"] == slot(3)
    assert "do not delete or edit other slots" in caught.value.do
    with pytest.raises(Corrupt):
        append(log, opened(B))
    assert log.state.seq == 2


@pytest.mark.parametrize("change", [{"kind": "run-renamed"}, {"version": 2}])
def test_L3_a_record_of_a_younger_version_makes_the_run_read_only_here(
    inner: Storage, change: dict[str, object]
) -> None:
    hand = HandLog(inner)
    hand.add(*LIVE)
    hand.add(committed(1, 1), **change)
    with pytest.raises(Corrupt, match="does not know") as caught:
        append(a_log(inner), opened(B))
    assert "Upgrade" in caught.value.do
    assert caught.value.fields["object"] == slot(5)


def test_L4_a_log_that_became_shorter_makes_the_run_read_only(inner: Storage) -> None:
    HandLog(inner).add(*LIVE)
    log = a_log(inner)
    log.replay()
    inner.delete(slot(4))
    with pytest.raises(Corrupt, match="was there before") as caught:
        log.replay()
    assert caught.value.fields["object"] == slot(4)
    with pytest.raises(Corrupt):
        append(log, committed(1, 1))


def test_L4_a_run_that_was_deleted_and_made_again_is_not_taken_for_the_old_one(inner: Storage) -> None:
    """Not even when it has as many slots: what is built on the old ones would damage the new run."""
    HandLog(inner).add(*START)
    log = a_log(inner)
    log.replay()
    for seq in (1, 2, 3):
        inner.delete(slot(seq))
    HandLog(inner).add(created(), opened(B), started(1, B))
    with pytest.raises(Corrupt, match="bytes read before"):
        append(log, ready(1, A))
    assert a_log(inner).replay().seq == 3


def test_L4_an_old_listing_is_merely_old(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    log = a_log(storage)
    log.replay()
    hidden = storage.hide(last=4)
    assert log.replay().seq == 4
    assert a_log(storage).replay().seq == 0
    assert a_log(storage).replay(to_the_end=True).seq == 4
    hidden.heal()


def test_L4_a_listing_without_a_middle_slot_is_merely_old(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    storage.hide(names=lambda name: name.endswith("2.json"))
    assert a_log(storage).replay().seq == 4


def test_L5_time_and_actor_are_for_people(inner: Storage) -> None:
    """Records that say they come from the future, the past and nobody count alike."""
    states = []
    for run, times in (("first", ["9999", "0000", "", "yesterday"]), ("second", ["1", "2", "3", "4"])):
        hand = HandLog(inner, run)
        for body, time in zip(LIVE, times, strict=True):
            hand.add(body, time=time, actor=time)
        state = a_log(inner, run).replay()
        states.append((state.accepted, state.void, state.tip))
    assert states[0] == states[1]


def test_T6_an_error_is_not_an_empty_log(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    for operation in ("list", "get"):
        fault = storage.fail_before(operation, times=None)
        log = a_log(storage)
        with pytest.raises(Unavailable):
            log.replay()
        fault.heal()
        assert log.replay().seq == 4


def test_T3_a_root_without_its_marker_has_no_empty_log(bare_store: Storage) -> None:
    log = a_log(bare_store)
    with pytest.raises(NotInitialised):
        log.replay()
    with pytest.raises(NotInitialised):
        append(log, created())
    assert not everything(bare_store)


def test_T3_a_root_that_lost_its_marker_alone_takes_nothing_and_says_so_at_once(inner: Storage) -> None:
    """The records are still there to be read, so the loss is met at the put, before anything is written."""
    HandLog(inner).add(*LIVE)
    log = a_log(inner)
    log.replay()
    before = everything(inner) - {layout.ROOT_MARKER}
    inner.delete(layout.ROOT_MARKER)
    with pytest.raises(NotInitialised):
        append(log, committed(1, 5))
    assert everything(inner) == before


def test_A5_a_root_lost_after_a_put_without_an_answer_leaves_the_outcome_unknown(
    inner: Storage, storage: FaultyStorage
) -> None:
    storage.fail_after("put", times=1)
    storage.fail_before("get", times=1)
    storage.fail_before("put", nth=2, times=None, error=NotInitialised("planned"))
    storage.fail_before("get", nth=2, times=None, error=NotInitialised("planned"))
    with pytest.raises(OutcomeUnknown):
        append(a_log(storage), created())
    assert kinds(inner) == ["create"]


# Appending


def test_A1_an_append_that_returns_is_in_the_log_and_synced(inner: Storage, storage: FaultyStorage) -> None:
    log = a_log(storage)
    for body in LIVE:
        assert append(log, body) == body.rid
        assert a_log(inner).replay().accepted[body.rid] == log.state.seq
        assert storage.history.count(("sync", slot(log.state.seq))) == 1


def test_A1_an_append_does_not_return_before_its_slot_is_durable(inner: Storage, storage: FaultyStorage) -> None:
    log = a_log(storage)
    fault = storage.fail_before("sync", times=None)
    with pytest.raises(OutcomeUnknown):
        append(log, created())
    assert kinds(inner) == ["create"]
    with pytest.raises(OutcomeUnknown):
        append(log, created())  # it is there, and still not known to be durable
    fault.heal()
    assert append(log, created()) == "create"
    assert kinds(inner) == ["create"]


@pytest.mark.parametrize("finds", ["fill", "settle"])
def test_T7_a_slot_is_read_again_between_two_syncs(inner: Storage, storage: FaultyStorage, finds: str) -> None:
    """A failed sync may have dropped from the cache what never reached the medium."""
    if finds == "settle":
        append(a_log(inner), created())
    storage.fail_before("sync", times=3)
    append(a_log(storage), created())
    touched = [operation for operation, key in storage.history if key == slot(1) and operation in ("get", "sync")]
    assert touched.count("sync") == 4
    assert all(now != ("sync", "sync") for now in itertools.pairwise(touched))


def test_T7_a_record_that_vanishes_under_a_failed_sync_is_not_called_durable(
    inner: Storage, storage: FaultyStorage
) -> None:
    append(a_log(inner), created())
    log = a_log(storage)

    def forget(seconds: float) -> None:
        inner.delete(slot(1))

    log._pause = forget
    storage.fail_before("sync")
    with pytest.raises(Corrupt, match="was there before"):
        append(log, created())


def test_A2_nothing_is_refused_on_an_old_prefix(inner: Storage, storage: FaultyStorage) -> None:
    """The listing shows a run that is not ready; the commit counts all the same."""
    HandLog(inner).add(*LIVE, opened(B), committed(1, 3))
    hidden = storage.hide(last=3)
    assert append(a_log(storage), committed(1, 5)) == committed(1, 5).rid
    assert hidden.fired
    assert a_log(inner).replay().tip == save(1, 5)


def test_A2_a_refusal_is_final_only_if_no_later_state_can_accept(inner: Storage) -> None:
    hand, log = HandLog(inner), a_log(inner)
    hand.add(*START)
    with pytest.raises(Conflict, match="not ready") as caught:
        append(log, committed(1, 5))
    assert caught.value.fields["final"] is False
    hand.add(ready(1, A), aborted(1, 6), opened(B))
    append(log, committed(1, 5))
    with pytest.raises(Conflict, match="aborted: disk full") as caught:
        append(log, committed(1, 6))
    assert caught.value.fields["final"] is True
    append(log, started(2, B, save(1, 5)))
    with pytest.raises(Fenced) as fenced:
        append(log, committed(1, 7))
    assert fenced.value.fields["final"] is True


def test_A2_build_does_not_give_up_on_an_old_prefix(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    hidden = storage.hide(last=1)

    def build(state: RunState) -> Body:
        if state.seq < 4:
            raise Corrupt("there is nothing to build on")
        return committed(1, 5)

    assert a_log(storage).append(build, deadline_seconds=1.0) == committed(1, 5).rid
    assert hidden.fired


def test_A2_an_error_while_reading_on_is_no_refusal(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*START)
    storage.fail_before("get", "4.json")
    with pytest.raises(Unavailable):
        append(a_log(storage), committed(1, 5))


def test_A3_a_lost_answer_is_found_out(inner: Storage, storage: FaultyStorage) -> None:
    storage.fail_after("put", "1.json")
    append(a_log(storage), created())
    storage.assert_all_fired()
    assert storage.calls["put"] == 1
    assert kinds(inner) == ["create"]


def test_A3_the_same_bytes_go_into_the_same_slot_until_it_is_filled(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    puts: list[tuple[str, bytes]] = []
    real = inner.put

    def seen(key: str, chunks: list[bytes], size: int) -> None:
        puts.append((key, b"".join(chunks)))
        if len(puts) < 4:
            raise Unavailable("not now")
        real(key, chunks, size)

    inner.put = seen  # type: ignore[method-assign, assignment]
    append(a_log(storage), committed(1, 5))
    assert len(puts) == 4
    assert len(set(puts)) == 1
    assert puts[0][0] == slot(5)


def test_A3_a_put_that_lands_late_is_found(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    log = a_log(storage)
    late = storage.delay_put(slot(5))
    storage.fail_before("put", slot(5), nth=2, times=None)
    log._pause = lambda seconds: release(late)
    append(log, committed(1, 5))
    assert late.fired
    assert kinds(inner)[4:] == [committed(1, 5).rid]


def test_A3_the_next_slot_is_not_tried_while_this_one_is_open(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    storage.delay_put(slot(5))
    storage.fail_before("put", slot(5), nth=2, times=None)
    with pytest.raises(OutcomeUnknown):
        append(a_log(storage), committed(1, 5))
    assert {key for operation, key in storage.history if operation == "put"} == {slot(5)}


def test_A3_a_late_put_loses_to_whoever_took_the_slot(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    late = storage.delay_put(slot(5))
    storage.fail_before("put", slot(5), nth=2, times=None)
    with pytest.raises(OutcomeUnknown):
        append(a_log(storage), committed(1, 5))
    append(a_log(inner), opened(B))
    assert late.release() is False
    assert kinds(inner)[4:] == [opened(B).rid]


def test_A3_a_late_put_that_wins_its_slot_is_the_earlier_write(inner: Storage, storage: FaultyStorage) -> None:
    """It lands between the loss of its answer and another writer, who must go on to the next slot."""
    HandLog(inner).add(*LIVE)
    log, late = a_log(storage), storage.delay_put(slot(5))
    refused = storage.fail_before("put", slot(5), nth=2, times=None)
    with pytest.raises(OutcomeUnknown):
        append(log, committed(1, 5))
    assert late.release() is True
    append(a_log(inner), opened(B))
    refused.heal()
    append(log, committed(1, 5))
    assert kinds(inner)[4:] == [committed(1, 5).rid, opened(B).rid]


def test_A4_a_repeat_finds_its_own_earlier_write(inner: Storage) -> None:
    log = a_log(inner)
    for _ in range(3):
        for body in LIVE:
            append(log, body)
            append(a_log(inner), body)
    assert kinds(inner) == [body.rid for body in LIVE]


def test_A4_a_rid_is_accepted_once(inner: Storage) -> None:
    hand = HandLog(inner)
    hand.add(*LIVE, committed(1, 5), committed(1, 5))
    state = a_log(inner).replay()
    assert state.accepted[committed(1, 5).rid] == 5
    assert list(state.void) == [6]


def test_A5_when_the_storage_does_not_tell_the_outcome_is_unknown(inner: Storage, storage: FaultyStorage) -> None:
    log = a_log(storage)
    storage.fail_after("put", times=None)
    storage.fail_before("get", times=None)
    with pytest.raises(OutcomeUnknown, match=r"not known whether create landed in .*0001\.json") as caught:
        append(log, created())
    assert "planned: the answer of put was lost" in caught.value.message  # the first cause
    assert kinds(inner) == ["create"]
    storage.heal()
    append(log, created())
    assert kinds(inner) == ["create"]


def test_A5_a_storage_that_falls_silent_after_the_put_is_an_unknown_outcome(
    inner: Storage, storage: FaultyStorage
) -> None:
    """The record lies in its slot; that it counts is not known before the log was read on."""
    log = a_log(storage)
    storage.fail_before("list", nth=2, times=None)
    with pytest.raises(OutcomeUnknown):
        append(log, created())
    storage.heal()
    append(log, created())
    assert kinds(inner) == ["create"]


def test_A5_a_short_silence_after_the_put_is_waited_out(inner: Storage, storage: FaultyStorage) -> None:
    storage.fail_before("list", nth=2, times=3)
    append(a_log(storage), created())
    storage.assert_all_fired()


def test_A5_nothing_was_written_when_the_log_could_not_be_read(storage: FaultyStorage) -> None:
    storage.fail_before("list", times=None)
    with pytest.raises(Unavailable) as caught:
        append(a_log(storage), created())
    assert not isinstance(caught.value, OutcomeUnknown)
    assert storage.calls["put"] == 0


def test_A6_the_loser_of_a_slot_goes_on_to_the_next(inner: Storage, storage: FaultyStorage) -> None:
    HandLog(inner).add(*LIVE)
    one, other = a_log(storage), a_log(inner)
    stop = storage.pause("put", slot(5))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(append, one, committed(1, 5))
        assert stop.arrived.wait(DEADLINE_SECONDS)
        append(other, opened(B))
        stop.resume.set()
        waiting.result(DEADLINE_SECONDS)
    assert kinds(inner)[4:] == [opened(B).rid, committed(1, 5).rid]


def test_A6_the_loser_is_judged_again(inner: Storage, storage: FaultyStorage) -> None:
    """Between its judgement and its put a younger generation started: the commit never lands."""
    HandLog(inner).add(*LIVE)
    one, other = a_log(storage), a_log(inner)
    stop = storage.pause("put", slot(5))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(append, one, committed(1, 5))
        assert stop.arrived.wait(DEADLINE_SECONDS)
        append(other, opened(B))
        append(other, started(2, B))
        stop.resume.set()
        with pytest.raises(Fenced):
            waiting.result(DEADLINE_SECONDS)
    assert kinds(inner)[4:] == [opened(B).rid, started(2, B).rid]


def test_A6_many_writers_that_race_all_get_a_slot(inner: Storage) -> None:
    """Eight writers with a log each, and two more that share one: in each round one record each, none lost."""
    rounds = 20 if isinstance(inner, MemoryStorage) else 3
    append(a_log(inner), created())
    shared = a_log(inner)
    logs = [a_log(inner) for _ in range(8)] + [shared, shared]
    barrier = threading.Barrier(len(logs))

    def writer(index: int) -> None:
        for turn in range(rounds):
            barrier.wait(DEADLINE_SECONDS)
            append(logs[index], opened(f"{index * 100 + turn:032x}"))

    with ThreadPoolExecutor(len(logs)) as pool:
        for done in [pool.submit(writer, index) for index in range(len(logs))]:
            done.result(DEADLINE_SECONDS)
    state = a_log(inner).replay()
    assert state.seq == 1 + rounds * len(logs)
    assert len(set(kinds(inner))) == state.seq
    assert not state.void


def test_A6_the_same_request_from_many_is_one_record(inner: Storage) -> None:
    HandLog(inner).add(*LIVE)
    barrier = threading.Barrier(8)

    def writer() -> str:
        log = a_log(inner)
        barrier.wait(DEADLINE_SECONDS)
        return append(log, committed(1, 5))

    with ThreadPoolExecutor(8) as pool:
        rids = {done.result(DEADLINE_SECONDS) for done in [pool.submit(writer) for _ in range(8)]}
    assert rids == {committed(1, 5).rid}
    assert kinds(inner)[4:] == [committed(1, 5).rid]


def test_A6_a_writer_that_always_loses_gives_up_at_its_deadline(inner: Storage) -> None:
    """And then it is known that nothing of its landed."""
    HandLog(inner).add(*LIVE)
    clock = ManualClock()

    class Crowd(FaultyStorage):
        def put(self, key: str, chunks: object, size: int) -> None:
            clock.now += 0.3
            HandLog(inner).add(opened(f"{HandLog(inner).seq:032x}"))
            super().put(key, chunks, size)  # type: ignore[arg-type]

    log = RunLog(Crowd(inner), RUN, actor="me", pause=clock.pause, clock=clock)
    with pytest.raises(Unavailable, match="took every slot") as caught:
        append(log, committed(1, 5), deadline_seconds=1.0)
    assert not isinstance(caught.value, OutcomeUnknown)
    assert committed(1, 5).rid not in kinds(inner)


def test_an_append_is_bounded_in_calls(inner: Storage, storage: FaultyStorage) -> None:
    storage.fail_before("put", times=None)
    with pytest.raises(OutcomeUnknown):
        append(a_log(storage), created(), deadline_seconds=30.0)
    assert storage.calls["put"] < 60


def test_what_build_raises_ends_the_append(inner: Storage) -> None:
    def give_up(state: RunState) -> Body:
        raise NotFound("no such thing")

    with pytest.raises(NotFound):
        a_log(inner).append(give_up, deadline_seconds=1.0)
    assert kinds(inner) == []


def test_build_sees_each_new_state(inner: Storage, storage: FaultyStorage) -> None:
    """A generation number is taken anew when another one got the slot."""
    hand = HandLog(inner)
    hand.add(created(), opened(A), opened(B))
    seen: list[int] = []

    def build(state: RunState) -> Body:
        number = (state.current.number if state.current else 0) + 1
        seen.append(number)
        return started(number, B)

    stop = storage.pause("put", slot(4))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: a_log(storage).append(build, deadline_seconds=2.0))
        assert stop.arrived.wait(DEADLINE_SECONDS)
        append(a_log(inner), started(1, A))
        stop.resume.set()
        waiting.result(DEADLINE_SECONDS)
    assert seen == [1, 2, 3]
    assert kinds(inner)[3:] == [started(1, A).rid, started(2, B).rid]


def test_a_log_is_named_and_placed_by_its_run(inner: Storage) -> None:
    make: Callable[[str], RunLog] = lambda run: RunLog(inner, run, actor="me")  # noqa: E731
    append(make("one"), created())
    append(make("two"), created())
    assert inner.list("runs") == ["one", "two"]


def test_L6_a_wrong_byte_in_the_newest_slot_stops_the_append(inner: Storage) -> None:
    """Without the sum nobody would notice, and the next record would chain to bytes that are not stored."""
    HandLog(inner).add(*LIVE)
    storage = FaultyStorage(inner)
    flip = storage.flip(slot(4), at=30)
    log = a_log(storage)
    with pytest.raises(Corrupt, match=slot(4)):
        log.append(lambda state: aborted(1, 5), deadline_seconds=1.0)
    assert flip.fired
    storage.heal()
    assert a_log(inner).replay().seq == 4
