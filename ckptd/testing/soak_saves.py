"""Small saves as trainers leave them, without torch: they lack nothing but their commit; and how they rot."""

from __future__ import annotations

from random import Random

from ckptd import layout
from ckptd.digests import chunk_digest, sha256_hex
from ckptd.manifest import Manifest, ManifestRef, ObjectRef, Part
from ckptd.storage.base import Storage
from ckptd.wire import CommitRequest

CHUNK_BYTES = 1024
MAX_PAYLOAD_BYTES = 4096
MAX_WRITERS = 2


def write_save(storage: Storage, run: str, save: str, random: Random) -> CommitRequest:
    """Payloads and parts of one or two writers, and the manifest; the request that would commit it."""
    generation, step = layout.generation_of(save), layout.step_of(save)
    writers = 1 + random.randrange(MAX_WRITERS)
    parts = []
    for writer in range(writers):
        payload = _write_payload(
            storage, run, save, writer, random.randbytes(1 + random.randrange(MAX_PAYLOAD_BYTES))
        )
        part = Part(run=run, generation=generation, save=save, step=step, writer=writer, payload=payload)
        stored = part.stored()
        _put(storage, layout.part_key(run, save, writer, sha256_hex(stored)), stored)
        parts.append(part)
    manifest = Manifest(
        run=run, generation=generation, save=save, step=step, world=writers, parts=tuple(parts), producer="soak"
    )
    data = manifest.stored()
    ref = ManifestRef.of(manifest, data)
    _put(storage, ref.key, data)
    return CommitRequest(generation=generation, save=save, step=step, writers=writers, manifest=ref)


def overwrite(storage: Storage, key: str, rot: str) -> None:
    """What nobody may do and disks do: `flip` a byte of an object to another one, `cut` it, or `delete` it. Doing it
    twice does not heal it."""
    data = bytearray(storage.get(key, MAX_PAYLOAD_BYTES))
    storage.delete(key)
    if rot == "flip" and data:
        data[0] = (data[0] + 1) % 256
    elif rot == "cut":
        del data[-1:]
    if rot != "delete":
        _put(storage, key, bytes(data))


def _write_payload(storage: Storage, run: str, save: str, writer: int, data: bytes) -> ObjectRef:
    key = layout.payload_key(run, save, writer, layout.new_nonce())
    _put(storage, key, data)
    chunks = tuple(chunk_digest(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES))
    return ObjectRef(key=key, size=len(data), chunk_bytes=CHUNK_BYTES, chunks=chunks)


def _put(storage: Storage, key: str, data: bytes) -> None:
    storage.put(key, [data], len(data))
