"""Reading back: every damage found, in the right place, and told apart from trouble that is no damage."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import layout
from ckptd.digests import chunk_count, chunk_digest
from ckptd.errors import Corrupt, Invalid, NotFound, NotInitialised, Unavailable
from ckptd.manifest import Manifest, ManifestRef, ObjectRef, Part
from ckptd.reading import check_size, damage_of, observe, observe_manifest, read_manifest, read_verified
from ckptd.records import Damage
from ckptd.storage import open_storage
from ckptd.storage.base import Storage
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryReader, MemoryStorage
from tests.homes import unmounted

SAVE = "g00000001-000000000007-a1"
KEY = layout.payload_key("r", SAVE, 0, "ab" * 8)
DATA = bytes(index * 31 % 251 for index in range(1000))
CHUNK = 96


def ref_of(data: bytes, chunk_bytes: int = CHUNK) -> ObjectRef:
    chunks = [chunk_digest(data[start : start + chunk_bytes]) for start in range(0, len(data), chunk_bytes)]
    assert len(chunks) == chunk_count(len(data), chunk_bytes)
    return ObjectRef(key=KEY, size=len(data), chunk_bytes=chunk_bytes, chunks=tuple(chunks))


def holding(data: bytes) -> MemoryStorage:
    storage = MemoryStorage()
    storage.put(KEY, [data], len(data))
    return storage


def read(storage: Storage, ref: ObjectRef, threads: int = 2) -> bytes:
    buffer = bytearray(ref.size)
    read_verified(storage, ref, memoryview(buffer), threads=threads)
    return bytes(buffer)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 1000])
@pytest.mark.parametrize("threads", [1, 4])
def test_what_was_written_is_read(size: int, threads: int) -> None:
    data, ref = DATA[:size], ref_of(DATA[:size])
    storage = holding(data)
    assert read(storage, ref, threads) == data
    assert observe(storage, ref) is None


def test_from_a_drive(home: str) -> None:
    storage = open_storage(home)
    storage.put(KEY, [DATA[:300], DATA[300:]], len(DATA))
    assert read(storage, ref_of(DATA)) == DATA
    assert observe(storage, ref_of(DATA)) is None


@given(st.integers(0, 8 * len(DATA) - 1), st.sampled_from([17, CHUNK, 1000, 5000]))
def test_every_flipped_bit_is_found_in_its_chunk(bit: int, chunk_bytes: int) -> None:
    ref = ref_of(DATA, chunk_bytes)
    damaged = bytearray(DATA)
    damaged[bit // 8] ^= 1 << bit % 8
    storage = holding(bytes(damaged))
    with pytest.raises(Corrupt) as caught:
        read(storage, ref)
    index = bit // 8 // chunk_bytes
    observed = chunk_digest(damaged[index * chunk_bytes : (index + 1) * chunk_bytes])
    fields = {"object": KEY, "chunk": index, "expected": ref.chunks[index], "observed": observed}
    assert caught.value.fields == fields
    assert observe(storage, ref) == damage_of(caught.value) == Damage(**fields)  # type: ignore[arg-type]


def test_the_first_of_many_damages_is_told() -> None:
    storage = holding(bytes(1000))
    with pytest.raises(Corrupt) as caught:
        read(storage, ref_of(DATA), threads=4)
    assert caught.value.fields["chunk"] == 0
    found = observe(storage, ref_of(DATA))
    assert found is not None
    assert found.chunk == 0


@pytest.mark.parametrize("size", [0, 1, 500, 999, 1001, 4000])
def test_a_wrong_size_is_told_as_such(size: int) -> None:
    storage = holding((DATA * 4)[:size])
    with pytest.raises(Corrupt, match="expected 1000 bytes, found") as caught:
        read(storage, ref_of(DATA))
    fields = {"object": KEY, "chunk": None, "expected": "1000 bytes", "observed": f"{size} bytes"}
    assert caught.value.fields == fields
    assert observe(storage, ref_of(DATA)) == Damage(**fields)  # type: ignore[arg-type]
    with pytest.raises(Corrupt) as glance:
        check_size(storage, ref_of(DATA))
    assert glance.value.fields == fields


def test_a_missing_object_is_damage() -> None:
    storage = MemoryStorage()
    with pytest.raises(Corrupt, match="found missing") as caught:
        read(storage, ref_of(DATA))
    assert isinstance(caught.value.__cause__, NotFound)
    missing = Damage(object=KEY, chunk=None, expected="1000 bytes", observed="missing")
    assert observe(storage, ref_of(DATA)) == damage_of(caught.value) == missing
    with pytest.raises(Corrupt, match="found missing"):
        check_size(storage, ref_of(DATA))
    assert pickle.loads(pickle.dumps(caught.value)).fields == caught.value.fields


def test_an_object_cut_short_while_it_is_read_is_damage(tmp_path: Path) -> None:
    class Shrinking(MemoryStorage):
        def reader(self, key: str, *, fresh: bool = False) -> MemoryReader:
            reader = MemoryReader(key, DATA[:500])
            reader.size = len(DATA)
            return reader

    with pytest.raises(Corrupt) as caught:
        read(Shrinking(), ref_of(DATA))
    assert caught.value.fields["chunk"] == 500 // CHUNK
    found = observe(Shrinking(), ref_of(DATA))
    assert found is not None
    assert found.chunk == 500 // CHUNK


@pytest.mark.parametrize("when", ["open", "read"])
def test_trouble_that_is_no_damage_passes_through(when: str) -> None:
    class Failing(MemoryStorage):
        def reader(self, key: str, *, fresh: bool = False) -> MemoryReader:
            if when == "open":
                raise Unavailable("connection reset")
            return FailingReader(key, DATA)

    class FailingReader(MemoryReader):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            if offset >= 300:
                raise Unavailable("connection reset")
            super().read_into(offset, buffer)

    for call in (lambda: read(Failing(), ref_of(DATA)), lambda: observe(Failing(), ref_of(DATA))):
        with pytest.raises(Unavailable, match="connection reset"):
            call()


def test_a_drive_that_is_not_mounted_is_no_damage(home: str) -> None:
    storage = open_storage(home)
    with unmounted(home):
        for call in (lambda: read(storage, ref_of(DATA)), lambda: observe(storage, ref_of(DATA))):
            with pytest.raises(NotInitialised):
                call()


def test_observe_asks_for_the_medium() -> None:
    asked: list[bool] = []

    class Asking(MemoryStorage):
        def reader(self, key: str, *, fresh: bool = False) -> MemoryReader:
            asked.append(fresh)
            return super().reader(key, fresh=fresh)

    storage = Asking()
    storage.put(KEY, [DATA], len(DATA))
    observe(storage, ref_of(DATA))
    observe(storage, ref_of(DATA), fresh=False)
    read(storage, ref_of(DATA))
    assert asked == [True, False, False]


def test_an_error_from_elsewhere_carries_no_finding() -> None:
    assert damage_of(Corrupt("the log is not contiguous", seq=3)) is None
    check_size(holding(DATA), ref_of(DATA))


def test_a_wrong_call_is_invalid() -> None:
    storage = holding(DATA)
    with pytest.raises(Invalid, match="has 999 bytes, expected 1000"):
        read_verified(storage, ref_of(DATA), memoryview(bytearray(999)))
    other = ref_of(DATA).model_copy(update={"digest": "crc32"})
    for call in (lambda: read(storage, other), lambda: observe(storage, other)):
        with pytest.raises(Invalid, match="digested with 'crc32'"):
            call()


def test_memory_is_the_buffer_to_read_and_one_chunk_to_observe(tmp_path: Path) -> None:
    size, chunk_bytes = 16 * 2**20, 2**20
    data = bytes(size)
    ref = ref_of(data, chunk_bytes)
    storage = LocalStorage(tmp_path)
    storage.initialise()
    storage.put(KEY, [data], size)
    buffer = memoryview(bytearray(size))
    tracemalloc.start()
    try:
        read_verified(storage, ref, buffer)
        assert tracemalloc.get_traced_memory()[1] < chunk_bytes
        tracemalloc.reset_peak()
        assert observe(storage, ref) is None
        assert chunk_bytes <= tracemalloc.get_traced_memory()[1] < 3 * chunk_bytes
    finally:
        tracemalloc.stop()


def committed_manifest() -> tuple[Manifest, bytes, ManifestRef]:
    part = Part(run="r", generation=1, save=SAVE, step=7, writer=0, payload=ref_of(DATA), shared={"version": 1})
    manifest = Manifest(run="r", generation=1, save=SAVE, step=7, world=1, parts=(part,))
    data = manifest.stored()
    return manifest, data, ManifestRef.of(manifest, data)


def storing(key: str, data: bytes) -> MemoryStorage:
    storage = MemoryStorage()
    storage.put(key, [data], len(data))
    return storage


def test_the_committed_manifest_is_read() -> None:
    manifest, data, ref = committed_manifest()
    assert read_manifest(storing(ref.key, data), ref) == manifest
    assert observe_manifest(storing(ref.key, data), ref) is None


@given(st.data())
def test_every_flipped_bit_of_a_manifest_is_found(draw: st.DataObject) -> None:
    _, data, ref = committed_manifest()
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt) as caught:
        read_manifest(storing(ref.key, bytes(damaged)), ref)
    assert caught.value.fields["expected"] == ref.sha256
    assert observe_manifest(storing(ref.key, bytes(damaged)), ref) == damage_of(caught.value)


def test_a_manifest_of_another_size_or_missing_is_corrupt() -> None:
    _, data, ref = committed_manifest()
    for stored in (data[:-1], data + b" ", b""):
        with pytest.raises(Corrupt) as caught:
            read_manifest(storing(ref.key, stored), ref)
        assert caught.value.fields["expected"] == f"{len(data)} bytes"
    with pytest.raises(Corrupt, match="found missing"):
        read_manifest(MemoryStorage(), ref)
    found = observe_manifest(MemoryStorage(), ref)
    assert found is not None
    assert found.observed == "missing"


def ref_for(key: str, data: bytes) -> ManifestRef:
    manifest = committed_manifest()[0]
    return ManifestRef.of(manifest, data).model_copy(update={"key": key} if key else {})


@pytest.mark.parametrize("data", [b"[]", b"{}", b"\xff", b'{"run": "r"}', b"[" * 100_000])
def test_committed_bytes_that_are_no_manifest_are_corrupt(data: bytes) -> None:
    ref = ref_for("", data)
    with pytest.raises(Corrupt, match="expected a manifest, found") as caught:
        read_manifest(storing(ref.key, data), ref)
    assert damage_of(caught.value) is not None


def test_a_manifest_from_elsewhere_is_corrupt() -> None:
    data = committed_manifest()[1]
    ref = ref_for(layout.manifest_key("other", SAVE, "0" * 64), data)
    with pytest.raises(Corrupt, match="expected the manifest of runs/other/"):
        read_manifest(storing(ref.key, data), ref)


def test_a_manifest_of_a_younger_version_asks_for_another_ckptd() -> None:
    data = committed_manifest()[0].model_copy(update={"version": 2}).stored()
    ref = ref_for("", data)
    with pytest.raises(Invalid, match="manifest version 2, this ckptd reads 1"):
        read_manifest(storing(ref.key, data), ref)


def test_an_unreachable_manifest_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(NotInitialised):
        read_manifest(LocalStorage(tmp_path), committed_manifest()[2])


# A medium that does not give the bytes.


class Sick(MemoryStorage):
    """One object cannot be read, `times` times; the rest can, while the root answers."""

    def __init__(self, code: str, times: int) -> None:
        self.error = Unavailable("the drive", errno=code)
        self.times, self.root = times, True
        super().__init__()

    def check_root(self) -> str:
        if not self.root:
            raise self.error
        return super().check_root()

    def reader(self, key: str, *, fresh: bool = False) -> MemoryReader:
        inner, read = super().reader(key, fresh=fresh), MemoryReader.read_into

        def read_into(offset: int, buffer: memoryview) -> None:
            if self.times > 0:
                self.times -= 1
                raise self.error
            read(inner, offset, buffer)

        inner.read_into = read_into  # type: ignore[method-assign]
        return inner


def sick(code: str, *, times: int = 10**6, root: bool = True) -> Sick:
    storage = Sick(code, times)
    storage.put(KEY, [DATA], len(DATA))
    storage.root = root
    return storage


def test_D4_an_object_that_cannot_be_read_is_damaged() -> None:
    with pytest.raises(Corrupt, match="not readable") as caught:
        read(sick("EIO"), ref_of(DATA))
    assert damage_of(caught.value) is not None
    found = observe(sick("EIO"), ref_of(DATA))
    assert found is not None
    assert "not readable" in found.observed


def test_D4_one_error_is_read_again() -> None:
    assert read(sick("EIO", times=1), ref_of(DATA), threads=1) == DATA
    assert observe(sick("EIO", times=1), ref_of(DATA)) is None


@pytest.mark.parametrize(("code", "root"), [("ETIMEDOUT", True), ("EACCES", True), ("EIO", False)])
def test_D4_a_storage_that_cannot_be_read_says_nothing_about_an_object(code: str, root: bool) -> None:
    with pytest.raises(Unavailable):
        read(sick(code, root=root), ref_of(DATA))
    with pytest.raises(Unavailable):
        observe(sick(code, root=root), ref_of(DATA))


def test_D4_a_manifest_that_cannot_be_read_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    ref = ManifestRef(key=layout.manifest_key("r", SAVE, "ab" * 32), size=3, sha256="ab" * 32)

    def sick(key: str, max_bytes: int = 0, *, fresh: bool = False) -> bytes:
        raise Unavailable("the drive", errno="EIO")

    for method in ("get", "size", "reader"):
        monkeypatch.setattr(storage, method, sick)
    assert observe_manifest(storage, ref) is not None
    with pytest.raises(Corrupt):
        check_size(storage, ref_of(DATA))


def test_S5_a_manifest_is_read_again_around_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    storage = MemoryStorage()
    data = b"no manifest"
    ref = ManifestRef(key=layout.manifest_key("r", SAVE, "ab" * 32), size=len(data), sha256="ab" * 32)
    storage.put(ref.key, [data], len(data))
    reader = storage.reader

    def watched(key: str, *, fresh: bool = False) -> MemoryReader:
        asked.append(fresh)
        return reader(key, fresh=fresh)

    monkeypatch.setattr(storage, "reader", watched)
    assert observe_manifest(storage, ref) is not None
    assert asked == [True]
    longer = ref.model_copy(update={"size": 3})
    assert observe_manifest(storage, longer) is not None
