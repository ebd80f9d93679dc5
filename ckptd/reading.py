"""Stored bytes, checked against what was committed, before anybody uses them.

`opened` and `check_chunk` are what a trainer loads with, `read_verified` reads one object whole, `observe` is how a
scrub looks for damage, `read_manifest` how all find the objects. Errors that say nothing about the bytes
(`Unavailable`) pass through unchanged, but for one: a medium that answers and does not give the bytes of this object
(EIO), twice, has lost them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError

from ckptd import layout
from ckptd.digests import PAYLOAD_DIGEST, chunk_digest, sha256_hex
from ckptd.errors import Corrupt, Invalid, NotFound, Unavailable
from ckptd.manifest import FORMAT, MAX_MANIFEST_BYTES, Manifest, ManifestRef, ObjectRef, Part
from ckptd.records import Damage
from ckptd.storage.base import Reader, Storage

READ_THREADS = 4
T = TypeVar("T")


def read_verified(storage: Storage, ref: ObjectRef, buffer: memoryview, *, threads: int = READ_THREADS) -> None:
    """Fill `buffer`, `ref.size` bytes, with one object. Any thread; chunks are read and checked by `threads` more.

    `Corrupt` with object, chunk, expected and observed for the first damage; the buffer holds no use then.
    """
    if buffer.nbytes != ref.size:
        raise Invalid(f"the buffer for {ref.key} has {buffer.nbytes} bytes, expected {ref.size}", field="buffer")

    def read(index: int) -> Damage | None:
        start = index * ref.chunk_bytes
        return _read_chunk(reader, ref, index, buffer[start : start + ref.chunk_bytes])

    workers = min(threads, max(len(ref.chunks), 1))
    with opened(storage, ref) as reader, ThreadPoolExecutor(workers, "ckptd-read") as pool:
        try:
            for damage in pool.map(read, range(len(ref.chunks))):
                _raise_if(damage)
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def opened(storage: Storage, ref: ObjectRef) -> Iterator[Reader]:
    """One object, open, of its committed size. Any thread.

    `Corrupt` with a damage when it is not there, has another size, or when what the block raises says that the
    storage lost its bytes. The block compares digests, with `check_chunk`.
    """
    _check_digest_name(ref)
    try:
        with storage.reader(ref.key) as reader:
            _raise_if(_wrong_size(reader, ref))
            yield reader
    except NotFound as error:
        raise damaged(_missing(ref)) from error
    except Unavailable as error:
        raise damaged(_lost(storage, ref, error)) from error


def observe(storage: Storage, ref: ObjectRef, *, fresh: bool = True) -> Damage | None:
    """Read one object again and say what is wrong with it first, None if it is whole. Any thread.

    Holds one chunk in memory. `fresh` reads the medium, around the caches of this host.
    """
    _check_digest_name(ref)
    try:
        with storage.reader(ref.key, fresh=fresh) as reader:
            return next(_damages(reader, ref), None)
    except NotFound:
        return _missing(ref)
    except Unavailable as error:
        return _lost(storage, ref, error)


def _damages(reader: Reader, ref: ObjectRef) -> Iterator[Damage]:
    wrong_size = _wrong_size(reader, ref)
    if wrong_size is not None:
        yield wrong_size
        return
    buffer = memoryview(bytearray(min(ref.chunk_bytes, ref.size)))
    for index in range(len(ref.chunks)):
        length = min(ref.chunk_bytes, ref.size - index * ref.chunk_bytes)
        damage = _read_chunk(reader, ref, index, buffer[:length])
        if damage is not None:
            yield damage


def _read_chunk(reader: Reader, ref: ObjectRef, index: int, target: memoryview) -> Damage | None:
    def read() -> str:
        reader.read_into(index * ref.chunk_bytes, target)
        return chunk_digest(target)

    return check_chunk(ref, index, read)


def twice(read: Callable[[], T]) -> T:
    """The result of `read`, which is called once more when the medium answers and does not give the bytes."""
    try:
        return read()
    except Unavailable as error:
        if not _is_io_error(error):
            raise
        return read()


def check_chunk(ref: ObjectRef, index: int, read: Callable[[], str]) -> Damage | None:
    """What is wrong with one chunk, None if it is whole. `read` reads it and returns its digest."""
    try:
        observed = twice(read)
    except Corrupt as error:  # it was cut short after it was opened
        observed = error.message[:1000]
    expected = ref.chunks[index]
    return None if observed == expected else Damage(object=ref.key, chunk=index, expected=expected, observed=observed)


def _wrong_size(reader: Reader, ref: ObjectRef) -> Damage | None:
    if reader.size == ref.size:
        return None
    return Damage(object=ref.key, chunk=None, expected=f"{ref.size} bytes", observed=f"{reader.size} bytes")


def _missing(ref: ObjectRef) -> Damage:
    return Damage(object=ref.key, chunk=None, expected=f"{ref.size} bytes", observed="missing")


def _is_io_error(error: Unavailable) -> bool:
    return error.fields.get("errno") == "EIO"


def _lost(storage: Storage, ref: ObjectRef | ManifestRef, error: Unavailable) -> Damage:
    """An object that cannot be read on a storage that can: damage. Any other error is raised as it is."""
    if not _is_io_error(error):
        raise error
    storage.check_root()
    return Damage(
        object=ref.key, chunk=None, expected=f"{ref.size} bytes", observed=f"not readable: {error.message}"[:1000]
    )


def _raise_if(damage: Damage | None) -> None:
    if damage is not None:
        raise damaged(damage)


def _check_digest_name(ref: ObjectRef) -> None:
    if ref.digest != PAYLOAD_DIGEST:
        raise Invalid(
            f"{ref.key} is digested with {ref.digest[:40]!r}, this ckptd knows {PAYLOAD_DIGEST}",
            do="Read it with the version of ckptd that saved it, or a younger one.",
            object=ref.key,
        )


def read_manifest(storage: Storage, ref: ManifestRef, *, fresh: bool = False) -> Manifest:
    """The manifest a commit record names. Any thread. `Corrupt` unless it is byte for byte the committed one. `fresh`
    reads the medium, around the caches of this host."""
    try:
        data = _read_again(storage, ref) if fresh else storage.get(ref.key, ref.size)
    except NotFound as error:
        raise _manifest_error(ref, "a manifest", "missing") from error
    except Unavailable as error:
        raise damaged(_lost(storage, ref, error)) from error
    except Corrupt as error:
        raise _manifest_error(ref, f"{ref.size} bytes", error.message) from error
    if len(data) != ref.size:
        raise _manifest_error(ref, f"{ref.size} bytes", f"{len(data)} bytes")
    observed = sha256_hex(data)
    if observed != ref.sha256:
        raise _manifest_error(ref, ref.sha256, observed)
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise _manifest_error(ref, "a manifest", str(error)[:500]) from error
    if manifest.version != FORMAT:
        raise Invalid(
            f"{ref.key} has manifest version {manifest.version}, this ckptd reads {FORMAT}",
            do="Read it with the version of ckptd that saved it, or a younger one.",
            object=ref.key,
        )
    place = layout.manifest_key(manifest.run, manifest.save, observed)
    if place != ref.key:
        raise _manifest_error(ref, f"the manifest of {ref.key}", f"the one of {place}")
    return manifest


def read_part(storage: Storage, key: str) -> Part:
    """A part manifest, byte for byte as its writer wrote it: `Corrupt` if the digest in its name is not that of what
    was read. Rank 0, on its save thread; what it took for right would be committed."""
    data = storage.get(key, MAX_MANIFEST_BYTES)
    observed = sha256_hex(data)[: layout.PART_DIGEST_LENGTH]
    if not key.endswith(f"-{observed}.json"):
        raise Corrupt(f"{key} is not what its writer wrote: the digest of its bytes is {observed}", key=key)
    try:
        return Part.model_validate_json(data)
    except ValidationError as error:
        raise Corrupt(f"{key} is no part manifest: {error}"[:1000], key=key) from error


def _read_again(storage: Storage, ref: ManifestRef) -> bytes:
    with storage.reader(ref.key, fresh=True) as reader:
        if reader.size > ref.size:
            raise Corrupt(f"{ref.key} has {reader.size} bytes, expected {ref.size}", object=ref.key)
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    return bytes(data)


def observe_manifest(storage: Storage, ref: ManifestRef) -> Damage | None:
    """As `observe`, for a manifest."""
    try:
        read_manifest(storage, ref, fresh=True)
    except Corrupt as error:
        return damage_of(error)
    return None


def check_size(storage: Storage, ref: ObjectRef) -> None:
    """A glance at an object: that it is there in its full size. `Corrupt` otherwise."""
    try:
        found = storage.size(ref.key)
    except NotFound as error:
        raise damaged(_missing(ref)) from error
    except Unavailable as error:
        raise damaged(_lost(storage, ref, error)) from error
    if found != ref.size:
        raise damaged(Damage(object=ref.key, expected=f"{ref.size} bytes", observed=f"{found} bytes"))


def damage_of(error: Corrupt) -> Damage | None:
    """The finding about stored bytes that an error raised here carries; None for any other error."""
    if not {"object", "expected", "observed"} <= error.fields.keys():
        return None
    return Damage.model_validate({name: error.fields.get(name) for name in Damage.model_fields})


def damaged(damage: Damage) -> Corrupt:
    """The error for a damage, from which `damage_of` gets it back."""
    where = damage.object if damage.chunk is None else f"chunk {damage.chunk} of {damage.object}"
    return Corrupt(f"{where} is damaged: expected {damage.expected}, found {damage.observed}", **damage.model_dump())


def _manifest_error(ref: ManifestRef, expected: str, observed: str) -> Corrupt:
    return damaged(Damage(object=ref.key, expected=expected, observed=observed[:1000]))
