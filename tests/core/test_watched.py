"""Reading that is followed: every byte is told, the pace holds, and a word ends it."""

from __future__ import annotations

import pytest

from ckptd.errors import Unavailable
from ckptd.reading import observe
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.storage_contract import StorageContract
from ckptd.watched import Pace, WatchedStorage, watched_reader
from tests.core.by_hand import save, write_payload


class TestWatchedStorage(StorageContract):
    """It is a storage like the one behind it."""

    @pytest.fixture
    def storage(self) -> Storage:
        return WatchedStorage(MemoryStorage(), lambda count: None)


def test_every_byte_is_told() -> None:
    storage, told = MemoryStorage(), list[int]()
    ref = write_payload(storage, save(1, 1), 0)
    assert watched_reader(told.append)(storage, ref).damage is None
    assert sum(told) == ref.size
    assert len(told) == len(ref.chunks) > 1


def test_the_pace_waits_for_what_was_read() -> None:
    storage, waited = MemoryStorage(), list[float]()
    ref = write_payload(storage, save(1, 1), 0)

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return False

    assert observe(WatchedStorage(storage, Pace(8.0, wait)), ref) is None
    assert sum(waited) == pytest.approx(ref.size / 8.0)


def test_a_word_ends_the_reading() -> None:
    storage = MemoryStorage()
    ref = write_payload(storage, save(1, 1), 0)
    with pytest.raises(Unavailable, match="ended before it was done"):
        watched_reader(Pace(8.0, lambda seconds: True))(storage, ref)
