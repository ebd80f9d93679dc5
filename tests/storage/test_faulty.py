"""FaultyStorage does what its plan says, no more, and says whether it did."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd.errors import AlreadyExists, Conflict, Corrupt, NotFound, Unavailable
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage

LOG = "runs/r/log"
DEADLINE_SECONDS = 60.0


def key(number: int) -> str:
    return f"{LOG}/{number:016d}.json"


@pytest.fixture
def inner() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def storage(inner: MemoryStorage) -> FaultyStorage:
    return FaultyStorage(inner)


def put(storage: FaultyStorage, number: int, data: bytes = b"data") -> None:
    storage.put(key(number), [data], len(data))


def read(storage: FaultyStorage, number: int, *, fresh: bool = False) -> bytes:
    with storage.reader(key(number), fresh=fresh) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
        return bytes(data)


def test_failing_before_leaves_nothing(storage: FaultyStorage, inner: MemoryStorage) -> None:
    fault = storage.fail_before("put", "2.json")
    put(storage, 1)
    with pytest.raises(Unavailable, match="planned"):
        put(storage, 2)
    assert inner.list(LOG) == [key(1).rpartition("/")[2]]
    put(storage, 2)
    assert fault.fired == 1
    storage.assert_all_fired()


def test_failing_after_leaves_everything(storage: FaultyStorage, inner: MemoryStorage) -> None:
    storage.fail_after("put", "1.json")
    with pytest.raises(Unavailable):
        put(storage, 1)
    assert inner.get(key(1), 10) == b"data"
    with pytest.raises(AlreadyExists):
        put(storage, 1)
    storage.assert_all_fired()


def test_nth_and_times_count_matching_calls(storage: FaultyStorage) -> None:
    put(storage, 1)
    storage.fail_before("get", lambda k: k == key(1), nth=2, times=2, error=Conflict("mine", reason="x"))
    ends: list[str] = []
    for _ in range(5):
        storage.list(LOG)
        try:
            storage.get(key(1), 10)
            ends.append("ok")
        except Conflict as error:
            ends.append(f"{error.message} {error.fields['reason']}")
    assert ends == ["ok", "mine x", "mine x", "ok", "ok"]
    assert storage.calls == {"put": 1, "get": 5, "list": 5}
    assert storage.history[:3] == [("put", key(1)), ("list", LOG), ("get", key(1))]


@pytest.mark.parametrize("operation", ["get", "reader", "size", "list", "sync", "delete", "check_root"])
@pytest.mark.parametrize("late", [False, True])
def test_every_operation_can_fail(storage: FaultyStorage, operation: str, late: bool) -> None:
    put(storage, 1)
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: storage.get(key(1), 10),
        "reader": lambda: storage.reader(key(1)),
        "size": lambda: storage.size(key(1)),
        "list": lambda: storage.list(LOG),
        "sync": lambda: storage.sync(key(1)),
        "delete": lambda: storage.delete(key(1)),
        "check_root": storage.check_root,
    }
    plan = storage.fail_after if late else storage.fail_before
    plan(operation, times=None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(Unavailable, match="planned"):
            calls[operation]()
    storage.heal()
    calls[operation]()
    storage.assert_all_fired()


def test_a_read_of_an_open_object_can_fail(storage: FaultyStorage) -> None:
    put(storage, 1)
    storage.fail_before("read", key(1), nth=2)
    assert read(storage, 1) == b"data"
    with pytest.raises(Unavailable):
        read(storage, 1)


@pytest.mark.parametrize("taken", [False, True])
def test_a_delayed_put_lands_when_released(storage: FaultyStorage, inner: MemoryStorage, taken: bool) -> None:
    delayed = storage.delay_put("1.json")
    with pytest.raises(Unavailable, match="delayed"):
        put(storage, 1, b"late")
    with pytest.raises(NotFound):
        inner.get(key(1), 10)
    if taken:
        put(storage, 1, b"early")
    assert delayed.release() is not taken
    assert delayed.release() is False
    assert inner.get(key(1), 10) == (b"early" if taken else b"late")
    storage.assert_all_fired()


def test_stale_listings(storage: FaultyStorage) -> None:
    names = [key(n).rpartition("/")[2] for n in range(4)]
    fault = storage.hide("log", last=2)
    for number in range(4):
        assert storage.list(LOG) == names[: max(0, number - 2)]
        put(storage, number)
    assert storage.list(LOG) == names[:2]
    assert storage.list("runs/r") == ["log"]
    fault.heal()
    assert storage.list(LOG) == names
    storage.hide("log", names=lambda name: name == names[1])
    assert storage.list(LOG) == [names[0], *names[2:]]
    storage.assert_all_fired()


def test_a_flipped_bit_shows_in_every_read(storage: FaultyStorage, inner: MemoryStorage) -> None:
    put(storage, 1, b"0123")
    put(storage, 2, b"0123")
    fault = storage.flip("1.json", at=2, mask=0x10)
    damaged = b"01\x223"
    assert storage.get(key(1), 10) == read(storage, 1) == read(storage, 1, fresh=True) == damaged
    with storage.reader(key(1)) as reader:
        part = bytearray(2)
        reader.read_into(0, memoryview(part))
        assert part == b"01"
        reader.read_into(2, memoryview(part))
        assert part == b"\x223"
    assert storage.get(key(2), 10) == inner.get(key(1), 10) == b"0123"
    assert fault.fired == 4
    fault.heal()
    assert storage.get(key(1), 10) == b"0123"


def test_damage_in_a_cache_is_not_in_a_fresh_read(storage: FaultyStorage) -> None:
    put(storage, 1, b"0123")
    storage.flip("1.json", at=0, cached_only=True)
    assert read(storage, 1) == b"1123"
    assert read(storage, 1, fresh=True) == b"0123"


def test_a_truncated_object(storage: FaultyStorage) -> None:
    put(storage, 1, b"0123")
    storage.truncate("1.json", size=3)
    assert storage.size(key(1)) == 3
    assert storage.get(key(1), 10) == read(storage, 1) == b"012"
    with storage.reader(key(1)) as reader, pytest.raises(Corrupt) as caught:
        reader.read_into(2, memoryview(bytearray(2)))
    assert (caught.value.fields["expected"], caught.value.fields["found"]) == (4, 3)
    storage.assert_all_fired()


@pytest.mark.parametrize("point", ["before", "during", "after"])
def test_a_paused_put(storage: FaultyStorage, inner: MemoryStorage, point: str) -> None:
    pause = storage.pause("put", "1.json", point=point)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(storage.put, key(1), [b"da", b"ta"], 4)
        try:
            assert pause.arrived.wait(DEADLINE_SECONDS)
            assert len(inner.list(LOG)) == (point == "after")
            put(storage, 2)
        finally:
            pause.resume.set()
        writing.result(DEADLINE_SECONDS)
    assert inner.get(key(1), 10) == b"data"
    storage.assert_all_fired()


def test_only_a_put_can_be_paused_during_the_call(storage: FaultyStorage) -> None:
    with pytest.raises(ValueError, match="only a put"):
        storage.pause("get", point="during")


def test_a_fault_that_had_no_effect_has_not_fired(storage: FaultyStorage) -> None:
    storage.fail_before("put", "9.json")
    storage.fail_after("get", "1.json")
    storage.hide("log", last=1)
    storage.flip("1.json", at=100)
    with pytest.raises(NotFound):
        storage.get(key(1), 10)
    assert storage.list(LOG) == []
    put(storage, 1)
    assert read(storage, 1) == b"data"
    with pytest.raises(AssertionError, match=r"Failure\('put'.*Failure\('get'.*StaleListing.*Damage"):
        storage.assert_all_fired()
