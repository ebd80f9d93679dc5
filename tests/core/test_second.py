"""The second reading is done by a real other process, around what the first one believes."""

from __future__ import annotations

import os

import pytest

from ckptd.errors import Unavailable
from ckptd.manifest import ManifestRef, ObjectRef
from ckptd.reading import read_manifest
from ckptd.second import read_here, read_in_new_process, this_process
from ckptd.storage import open_storage
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from tests.core.by_hand import overwrite, write_save
from tests.homes import unmounted


@pytest.fixture
def storage(home: str) -> Storage:
    return open_storage(home)


def a_save(storage: Storage) -> tuple[ManifestRef, ObjectRef]:
    ref = write_save(storage, 1, 5).manifest
    return ref, read_manifest(storage, ref).objects()[0]


def test_S5_another_process_reads(storage: Storage) -> None:
    for ref in a_save(storage):
        reading = read_in_new_process(storage, ref)
        assert reading.damage is None
        assert reading.reader.host == this_process().host
        assert reading.reader.process != f"pid {os.getpid()}"


def test_S5_a_flipped_byte_on_the_medium_is_confirmed(storage: Storage) -> None:
    _, ref = a_save(storage)
    data = bytearray(storage.get(ref.key, ref.size))
    data[20] ^= 1
    overwrite(storage, ref.key, bytes(data))
    damage = read_in_new_process(storage, ref).damage
    assert damage is not None
    assert (damage.object, damage.chunk, damage.expected) == (ref.key, 1, ref.chunks[1])
    assert damage == read_here(storage, ref).damage


def test_S5_a_reader_that_is_wrong_alone_is_not_confirmed(storage: Storage) -> None:
    _, ref = a_save(storage)
    faulty = FaultyStorage(storage)
    faulty.flip(ref.key, at=20)
    assert read_here(faulty, ref).damage is not None
    assert read_in_new_process(faulty, ref).damage is None


def test_S5_a_damaged_manifest_and_a_missing_object_are_confirmed(storage: Storage) -> None:
    manifest, ref = a_save(storage)
    storage.delete(ref.key)
    missing = read_in_new_process(storage, ref).damage
    assert missing is not None
    assert missing.observed == "missing"
    overwrite(storage, manifest.key, b"{}")
    damage = read_in_new_process(storage, manifest).damage
    assert damage is not None
    assert damage.object == manifest.key


def test_T6_a_process_that_cannot_read_is_no_confirmation(storage: Storage) -> None:
    _, ref = a_save(storage)
    with unmounted(storage.url), pytest.raises(Unavailable, match="second reading"):
        read_in_new_process(storage, ref)


def test_storage_that_only_this_process_sees_cannot_be_read_by_another() -> None:
    storage = MemoryStorage()
    _, ref = a_save(storage)
    with pytest.raises(Unavailable, match="second reading"):
        read_in_new_process(storage, ref)
