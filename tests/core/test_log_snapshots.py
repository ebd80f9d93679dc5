"""Snapshots of the fold: they spare reading and change no answer, whatever happens to them."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import zlib
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import answers, layout, log_snapshots
from ckptd.digests import sha256_hex
from ckptd.encoding import encode, record
from ckptd.errors import CkptdError, Corrupt
from ckptd.fsck import fsck
from ckptd.history import advance
from ckptd.ledger import Ledger
from ckptd.log import RunLog
from ckptd.manifest import ManifestRef
from ckptd.records import Candidate
from ckptd.snapshotting import Snapshotter
from ckptd.state import Checkpoint, Generation, OpenedAttempt, RunState
from ckptd.storage.base import Storage
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faulty import FaultyStorage
from ckptd.testing.histories import history, write_history
from ckptd.upkeep_records import CheckpointQuarantined, RunClosed
from tests.core.by_hand import RUN, A, HandLog, aborted, committed, live, opening, overwrite, save, write_save

RECORDS = 120
EVERY = 10


@cache
def a_history(records: int = RECORDS) -> MemoryStorage:
    """Read only."""
    storage = MemoryStorage()
    write_history(storage, RUN, records=records)
    return storage


@cache
def states() -> list[RunState]:
    """The state after each number of records."""
    log, found = RunState(), [RunState()]
    for seq, body in enumerate(islice(history(RUN), RECORDS), 1):
        item = record(seq, log.digest, body, actor="hand", time="never")
        advance(log, item, sha256_hex(encode(item)))
        found.append(log.snapshot())
    return found


@pytest.fixture
def storage() -> FaultyStorage:
    """A history with snapshots after slots 60 and 100."""
    inner = MemoryStorage()
    write_history(inner, RUN, records=RECORDS)
    for seq in (60, 100):
        log_snapshots.write(inner, RUN, state_at(inner, seq))
    return FaultyStorage(inner)


def a_log(storage: Storage, records: int = EVERY) -> RunLog:
    return RunLog(storage, RUN, actor="me", snapshot_records=records)


def whole(storage: Storage) -> RunState:
    """The state, read from slot 1 on."""
    return a_log(storage, 10**6).replay(to_the_end=True)


def state_at(storage: Storage, seq: int) -> RunState:
    """The state after slot `seq`, from a copy of the log so far."""
    copy = MemoryStorage()
    for slot in range(1, seq + 1):
        key = layout.log_key(RUN, slot)
        data = storage.get(key, 1 << 20)
        copy.put(key, [data], len(data))
    return whole(copy)


def names(storage: Storage) -> list[str]:
    return log_snapshots.listed(storage, RUN)


def key(name: str) -> str:
    return f"{layout.snapshots_folder(RUN)}/{name}"


def assert_answers_as_the_log_says(storage: Storage) -> RunLog:
    log = a_log(storage)
    assert log.replay(to_the_end=True) == whole(storage)
    return log


# What is in one.


def full_state() -> RunState:
    """Something in every field."""
    quarantined = CheckpointQuarantined(save=save(1, 1), ground="operator", who="me", reason="why")
    checkpoint = Checkpoint(
        save=save(1, 1),
        seq=4,
        step=1,
        generation=1,
        parent=save(1, 0),
        manifest=ManifestRef(key="runs/r/manifests/x", size=3, sha256="ab" * 32),
        payload_bytes=7,
        writers=2,
        metrics={"loss": float("inf"), "small": 1e-300, "third": 1 / 3},
        time="now",
        borrows=(save(1, 0),),
        borrowed_bytes=5,
    )
    generation = Generation(
        number=1,
        attempt=A,
        world=2,
        resume_from=save(1, 0),
        fallback_of=3,
        candidates=(Candidate(save=save(1, 0), step=0, valid=True, reason="ä \u2028 \\"),),
        digest="cd" * 32,
        time="then",
        ready=True,
        quarantines=2,
        closed="rolled back",
    )
    return RunState(
        seq=9,
        digest="ef" * 32,
        fingerprint=A,
        attempts={A: OpenedAttempt(1, "job", "host")},
        generations=[generation],
        checkpoints={save(1, 1): checkpoint},
        aborted={save(1, 2): "disk full"},
        quarantined={save(1, 1): quarantined},
        retired={save(1, 0): 7},
        purged={save(1, 0), save(1, 9), save(1, 8)},
        pinned={save(1, 1): {"b", "a", "c"}},
        held={save(1, 1): {"d"}},
        verified={save(1, 1): 8},
        starts={save(1, 1): 2},
        doubts=1,
        turns={"rollback": 1},
        closed=RunClosed(who="me"),
        lent={save(1, 0): [save(1, 1)]},
        tip=save(1, 1),
        accepted={"create": 1},
        void={5: "a younger attempt"},
    )


def test_nothing_of_a_state_is_forgotten() -> None:
    """Whoever adds a field to the state, or to what is in it, fills it in above."""
    state = full_state()
    inner = (state, state.generations[0], state.checkpoints[save(1, 1)])
    for value in inner:
        for field in dataclasses.fields(value):
            empty = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            assert getattr(value, field.name) != empty, f"{type(value).__name__}.{field.name} is not filled in"
    data = log_snapshots.dump(RUN, state)
    again = log_snapshots.load(RUN, layout.snapshot_key(RUN, 9, sha256_hex(data)).rpartition("/")[2], data)
    assert again == state
    for field in dataclasses.fields(state):
        assert type(getattr(again, field.name)) is type(getattr(state, field.name)), field.name


def test_a_copy_of_a_state_does_not_change_with_it() -> None:
    state = full_state()
    copy, before = state.snapshot(), full_state()
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        for inner in value.values() if isinstance(value, dict) else ():
            if isinstance(inner, set):
                inner.add("another")
            elif isinstance(inner, list):
                inner.append("another")
        if isinstance(value, dict | set):
            value.clear()
    state.generations[-1].ready, state.generations[-1].closed = False, ""
    assert copy == before


def test_the_bytes_are_the_same_whoever_writes_them() -> None:
    """Sets have an order of their own in each process."""
    state = full_state()
    stored = json.loads(zlib.decompress(log_snapshots.dump(RUN, state).partition(b"\n")[2]))["state"]
    assert stored["purged"] == sorted(state.purged)
    assert stored["pinned"] == {save(1, 1): ["a", "b", "c"]}


def test_a_state_with_another_field_is_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = log_snapshots._Holder.model_json_schema()
    version = log_snapshots.format_version()
    other = {**fields, "more": {"type": "integer"}}
    monkeypatch.setattr(log_snapshots._Holder, "model_json_schema", lambda: other)
    assert log_snapshots.format_version.__wrapped__() != version
    monkeypatch.setattr(log_snapshots._Holder, "model_json_schema", lambda: {**fields, "description": "for people"})
    assert log_snapshots.format_version.__wrapped__() == version
    monkeypatch.setattr(log_snapshots, "__version__", "99")
    assert log_snapshots.format_version.__wrapped__() != version


# Reading.


@settings(max_examples=40, deadline=None)
@given(st.integers(EVERY + 1, RECORDS), st.data())
def test_L7_from_a_snapshot_at_any_slot_the_rest_gives_the_same_state(end: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, end))
    storage = MemoryStorage()
    for seq in range(1, end + 1):
        slot = a_history().get(layout.log_key(RUN, seq), 1 << 20)
        storage.put(layout.log_key(RUN, seq), [slot], len(slot))
    expected = whole(storage)
    log_snapshots.write(storage, RUN, state_at(storage, at))
    log = a_log(storage)
    assert log.replay(to_the_end=True) == expected
    assert log.snapshot_seq == at
    for generation in expected.generations:
        told = [answers.pinned(RUN, "uuid", state, generation) for state in (log.state, expected)]
        assert told[0] == told[1]
    assert answers.latest(RUN, log.state, {}) == answers.latest(RUN, expected, {})
    assert list(log.state.checkpoints) == list(expected.checkpoints)  # people are told them in this order


def test_what_a_snapshot_covers_is_not_read_again(storage: FaultyStorage) -> None:
    log = assert_answers_as_the_log_says(storage)
    assert log.snapshot_seq == 100
    storage.history.clear()
    a_log(storage).replay()
    slots = [key for operation, key in storage.history if operation == "get" and "/log/" in key]
    assert slots == [layout.log_key(RUN, seq) for seq in range(100, RECORDS + 1)]


def test_a_short_log_looks_for_no_snapshot(storage: FaultyStorage) -> None:
    a_log(storage, RECORDS).replay()
    assert not any("snapshots" in key for _, key in storage.history)


PARTS = ("format", "run", "seq", "slot", "newline", "packed", "packed head", "end")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mask", [1, 0x80, 0xFF])
def test_L7_a_damaged_snapshot_is_passed_over(storage: FaultyStorage, part: str, mask: int) -> None:
    name = names(storage)[0]
    data = storage.get(key(name), 1 << 20)
    body = data.index(b"\n") + 1
    places = {"newline": body - 1, "packed": len(data) // 2, "packed head": body, "end": len(data) - 1}
    at = places.get(part, data.find(f'"{part}":'.encode()) + len(part) + 4)
    storage.flip(key(name), at=at, mask=mask)
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 60
    assert "strange" in {finding.severity for finding in fsck(storage, RUN).findings}


@pytest.mark.parametrize("size", [0, 1, 50, 300, -1])
def test_L7_a_torn_snapshot_is_passed_over(storage: FaultyStorage, size: int) -> None:
    name = names(storage)[0]
    storage.truncate(key(name), size=size if size >= 0 else len(storage.get(key(name), 1 << 20)) - 1)
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 60


def rewritten(storage: FaultyStorage, change: Callable[[bytes], bytes]) -> None:
    """The newest snapshot holds other bytes, under a name that fits them."""
    data = change(storage.get(key(names(storage)[0]), 1 << 20))
    storage.inner.delete(key(names(storage)[0]))
    storage.inner.put(layout.snapshot_key(RUN, 100, sha256_hex(data)), [data], len(data))


BOMB = zlib.compress(b"[" * 100_000)
CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "another version": lambda data: data.replace(log_snapshots.format_version().encode(), b"0" * 12),
    "another run": lambda data: data.replace(f'"{RUN}"'.encode(), b'"other"'),
    "another slot's name": lambda data: data.replace(b'"seq":100', b'"seq":99'),
    "another slot": lambda data: data.replace(b'"slot":"', b'"slot":"0'),
    "no head": lambda data: data.partition(b"\n")[2],
    "a head that is a list": lambda data: b"[]\n" + data.partition(b"\n")[2],
    "nothing": lambda data: b"",
    "a head alone": lambda data: data.partition(b"\n")[0] + b"\n",
    "another state": lambda data: data.partition(b"\n")[0] + b"\n" + zlib.compress(b'{"state":{"seq":"x"}}'),
    "no state": lambda data: data.partition(b"\n")[0] + b"\n" + zlib.compress(b"{}"),
    "deep": lambda data: data.partition(b"\n")[0] + b"\n" + BOMB,
    "cut inside": lambda data: data[:-10],
}


@pytest.mark.parametrize("change", CHANGES)
def test_L7_a_snapshot_that_is_not_what_it_should_be_is_passed_over(storage: FaultyStorage, change: str) -> None:
    rewritten(storage, CHANGES[change])
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 60


def test_L7_a_snapshot_of_another_history_is_passed_over(storage: FaultyStorage) -> None:
    other = MemoryStorage()
    write_history(other, RUN, records=RECORDS, actor="somebody else")
    log_snapshots.write(storage.inner, RUN, state_at(other, 110))
    assert names(storage)[0].startswith(f"{110:016d}")
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 100
    assert not fsck(storage, RUN).damaged


def test_L7_a_snapshot_that_is_newer_than_the_log_is_passed_over(storage: FaultyStorage) -> None:
    for seq in range(RECORDS, 90, -1):  # restored from a backup, with the snapshots of later
        storage.inner.delete(layout.log_key(RUN, seq))
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 60


def test_a_snapshot_that_is_newer_than_the_listing_is_used(storage: FaultyStorage) -> None:
    hidden = storage.hide(layout.log_folder(RUN), last=1)
    log = a_log(storage)
    assert log.replay().seq == 100
    hidden.heal()
    assert log.replay() == whole(storage)


@pytest.mark.parametrize("operation", ["list", "get"])
def test_L7_snapshots_that_cannot_be_read_are_done_without(storage: FaultyStorage, operation: Any) -> None:
    fault = storage.fail_before(operation, lambda key: "/snapshots" in key, times=None)
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 0
    assert fault.fired


def test_an_old_listing_of_snapshots_gives_an_older_one(storage: FaultyStorage) -> None:
    storage.hide(layout.snapshots_folder(RUN), last=1)
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 60


def test_many_names_that_are_none_cost_no_more(storage: FaultyStorage) -> None:
    for number in range(20):
        storage.inner.put(layout.snapshot_key(RUN, 200 + number, "0" * 64), [b"x"], 1)
    storage.inner.put(key("README"), [b"x"], 1)
    storage.history.clear()
    assert a_log(storage).replay() == whole(a_history())
    assert sum("/snapshots/" in key for _, key in storage.history) == log_snapshots.TRIES


# A wrong one is found.


def test_L7_a_snapshot_that_says_what_the_log_does_not_is_found(storage: FaultyStorage) -> None:
    assert not fsck(storage, RUN).damaged
    assert "L7" not in {finding.rule for finding in Auditor(storage, RUN).check()}
    wrong = state_at(storage, 110)
    wrong.quarantined.clear()
    wrong.checkpoints[str(wrong.tip)].metrics["loss"] = 0.0
    name = log_snapshots.write(storage.inner, RUN, wrong)
    assert [(f.object, f.severity) for f in fsck(storage, RUN).findings if f.severity == "damage"] == [
        (key(name), "damage")
    ]
    assert [f.where for f in Auditor(storage, RUN).check() if f.rule == "L7"] == [name]


# Writing.


def job(storage: Storage, **options: Any) -> Ledger:
    """A ledger that writes its snapshots at once, in the thread that appends."""
    return Ledger(storage, snapshot_records=EVERY, aside=lambda call: call(), **options)


def test_L7_snapshots_are_written_after_appends_and_old_ones_deleted() -> None:
    storage = FaultyStorage(MemoryStorage())
    ledger = job(storage)
    live(ledger)
    for step in range(1, 41):
        ledger.commit(RUN, write_save(storage, 1, step))
    assert ledger.snapshots.tally == {"written": 4}
    assert [layout.snapshot_of(name)[0] for name in names(storage)] == [40, 30]  # type: ignore[index]
    puts = [key for operation, key in storage.history if operation == "put"]
    assert puts[puts.index(layout.log_key(RUN, 40)) + 1].startswith(layout.snapshots_folder(RUN))
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 40


def test_L7_a_commit_stands_whatever_becomes_of_the_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    storage = FaultyStorage(MemoryStorage())
    fault = storage.fail_before("put", lambda key: "/snapshots/" in key, times=None)
    ledger = job(storage)
    live(ledger)
    for step in range(1, 31):
        ledger.commit(RUN, write_save(storage, 1, step))
    assert fault.fired
    assert ledger.snapshots.tally == {"failed": 3}  # not at every append
    assert "no snapshot was written" in caplog.text
    fault.heal()
    for step in range(31, 41):
        ledger.commit(RUN, write_save(storage, 1, step))
    assert ledger.snapshots.tally["written"] == 1


def test_a_folder_of_snapshots_that_cannot_be_written(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    storage.initialise()
    (tmp_path / "root" / "runs" / RUN).mkdir(parents=True)
    (tmp_path / "root" / layout.snapshots_folder(RUN)).write_bytes(b"")  # a file has its name: also root cannot
    ledger = job(storage)
    live(ledger)
    for step in range(1, 20):
        ledger.commit(RUN, write_save(storage, 1, step))
    assert ledger.snapshots.tally["failed"] == 2
    assert ledger.latest(RUN).checkpoint.step == 19  # type: ignore[union-attr]
    assert a_log(storage).replay() == whole(storage)


def test_two_writers_at_once_leave_one_snapshot(storage: FaultyStorage) -> None:
    state = state_at(storage, 115)
    pauses = [storage.pause("put", lambda key: "/snapshots/" in key, nth=nth) for nth in (1, 2)]
    done: list[str] = []
    writers = [
        threading.Thread(target=lambda: done.append(log_snapshots.write(storage, RUN, state.snapshot())))
        for _ in range(2)
    ]
    for writer, pause in zip(writers, pauses, strict=True):
        writer.start()
        pause.arrived.wait(30)
    for pause in pauses:
        pause.resume.set()
    for writer in writers:
        writer.join(30)
    assert len(done) == 2
    assert names(storage)[0] == done[0] == done[1]
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 115


def test_who_finds_one_of_somebody_else_writes_none(storage: FaultyStorage) -> None:
    log = a_log(storage, 30)
    log.state = state_at(storage, RECORDS)  # it has read all the way, and knows of no snapshot
    snapshotter = Snapshotter(lambda call: call())
    snapshotter.after(log)
    assert snapshotter.tally == {"other": 1}
    assert log.snapshot_seq == 100


def test_a_writer_is_not_disturbed_by_appends(storage: FaultyStorage) -> None:
    """The state goes on while its snapshot is written."""
    log = a_log(storage)
    log.replay()
    log.snapshot_seq = 0
    log_snapshots_before = names(storage)
    pause = storage.pause("list", layout.snapshots_folder(RUN))
    threads: list[threading.Thread] = []
    snapshotter = Snapshotter(lambda call: threads.append(threading.Thread(target=call)))
    storage.inner.delete(key(log_snapshots_before[0]))
    log.snapshot_seq = 60
    snapshotter.after(log)
    threads[0].start()
    pause.arrived.wait(30)
    HandLog(storage.inner).add(aborted(12, 99), committed(12, 50))
    log.replay()
    snapshotter.after(log)  # one at a time
    assert len(threads) == 1
    pause.resume.set()
    threads[0].join(30)
    assert snapshotter.tally == {"written": 1}
    assert log.snapshot_seq == RECORDS
    assert assert_answers_as_the_log_says(storage).snapshot_seq == RECORDS


def test_a_snapshot_is_due_less_often_in_a_long_log(storage: FaultyStorage) -> None:
    log = a_log(storage, 250)
    assert (log.snapshot_is_due(249), log.snapshot_is_due(250)) == (False, True)
    log.snapshot_seq = 100_000
    assert (log.snapshot_is_due(100_499), log.snapshot_is_due(100_502)) == (False, True)


def test_by_default_it_is_written_on_a_thread_of_its_own() -> None:
    storage = FaultyStorage(MemoryStorage())
    ledger = Ledger(storage, snapshot_records=5)
    pause = storage.pause("put", lambda key: "/snapshots/" in key)
    live(ledger)
    for step in range(1, 5):
        ledger.commit(RUN, write_save(storage, 1, step))  # it returns while the snapshot is held up
    pause.arrived.wait(30)
    ledger.open(RUN, opening(layout.new_attempt()))
    pause.resume.set()
    for thread in threading.enumerate():
        if thread.name == "ckptd-snapshot":
            thread.join(30)
    assert ledger.snapshots.tally["written"] == 1


def test_a_state_too_large_for_a_snapshot_is_done_without(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_snapshots, "MAX_SNAPSHOT_BYTES", 100)
    with pytest.raises(Corrupt, match="too long"):
        log_snapshots.write(storage, RUN, state_at(storage, 110))
    assert assert_answers_as_the_log_says(storage).snapshot_seq == 0


@pytest.mark.parametrize("seed", range(5))
def test_L7_random_damage_anywhere_changes_no_answer(storage: FaultyStorage, seed: int) -> None:
    dice, expected = random.Random(seed), whole(storage)
    for name in names(storage):
        data = bytearray(storage.get(key(name), 1 << 20))
        for _ in range(dice.choice((1, 3))):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        overwrite(storage.inner, key(name), bytes(data))
        with pytest.raises(CkptdError):
            log_snapshots.read(storage, RUN, name)
    assert a_log(storage).replay() == expected
