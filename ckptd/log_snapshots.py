"""Snapshots of a run's state, so that whoever reads a long log for the first time need not read all of it.

    {"format":"...","run":"en-it","seq":40000,"slot":"<sha256 of slot 40000>"}    one line, then the state, compressed

A snapshot is a cache that may be deleted at any time. It is used only if its bytes have the digest in its name, it
was written by this version, and slot `seq` still has the bytes it was made after; one of another history has not.
Anything wrong with one is no error: an older one will do, or the whole log. `ckptd fsck` compares them with what they
stand for.
"""

from __future__ import annotations

import gc
import json
import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ckptd import __version__, layout
from ckptd.digests import canonical_json, sha256_hex
from ckptd.encoding import MAX_RECORD_BYTES
from ckptd.errors import AlreadyExists, CkptdError, Corrupt
from ckptd.state import RunState
from ckptd.storage.base import Storage

KEEP = 2
TRIES = 4  # of a reader, before it takes the whole log
MAX_SNAPSHOT_BYTES = 256 * 1024 * 1024
MAX_STATE_BYTES = 1 << 30
MAX_HEAD_BYTES = 4096
_log = logging.getLogger("ckptd.snapshots")


class _Holder(BaseModel):
    """Gives the state's JSON its settings: a metric may be NaN."""

    model_config = ConfigDict(ser_json_inf_nan="constants", strict=True)
    state: RunState


@cache
def format_version() -> str:
    """Of this version's snapshots: other fields or other rules make other ones, which are not read."""
    schema = json.dumps(_bare(_Holder.model_json_schema()), sort_keys=True)
    return sha256_hex(f"{__version__} {schema}".encode())[:12]


def _bare(value: Any) -> Any:
    """A schema without what is said for people."""
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items() if key not in ("description", "title")}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value


def dump(run: str, state: RunState) -> bytes:
    """The bytes of a snapshot of `state`, the same whoever makes it."""
    head = {"format": format_version(), "run": run, "seq": state.seq, "slot": state.digest}
    ordered = replace(state, **{f.name: _ordered(getattr(state, f.name)) for f in fields(state)})
    body = _Holder.model_construct(state=ordered).model_dump_json(warnings=False).encode()
    return canonical_json(head) + b"\n" + zlib.compress(body, 1)


def _ordered(value: Any) -> Any:
    """Sets as sorted lists: their own order differs from process to process."""
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict) and any(isinstance(inner, set) for inner in value.values()):
        return {key: _ordered(inner) for key, inner in value.items()}
    return value


def load(run: str, name: str, data: bytes) -> RunState:
    """The state in the snapshot `name`. `Corrupt` if the bytes are not those of its name, another version's, or no
    state; whether its slot is still the same is not looked at here."""
    seq, digest = layout.snapshot_of(name) or (0, "")
    if not digest or not sha256_hex(data).startswith(digest):
        raise _refused(name, "the bytes that its name is of", "others")
    head, _, packed = data.partition(b"\n")
    try:
        told = json.loads(head[:MAX_HEAD_BYTES])
        expected = {"format": format_version(), "run": run, "seq": seq}
        if not isinstance(told, dict) or {key: told.get(key) for key in expected} != expected:
            raise _refused(name, f"{expected}", head[:200].decode(errors="replace"))
        unpacking = zlib.decompressobj()
        body = unpacking.decompress(packed, MAX_STATE_BYTES)
        if not unpacking.eof:
            raise _refused(name, f"a whole state of at most {MAX_STATE_BYTES} bytes", "more, or less")
        with _without_collection():
            state = _Holder.model_validate_json(body).state
    except (ValidationError, ValueError, zlib.error) as error:
        raise _refused(name, "a state", str(error).splitlines()[0]) from error
    if (state.seq, state.digest) != (seq, told.get("slot")):
        raise _refused(name, f"the state after slot {seq}", f"one after slot {state.seq}")
    return state


@contextmanager
def _without_collection() -> Iterator[None]:
    """A state of 100,000 records is made twice as fast if nobody looks for garbage in it meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_slot(storage: Storage, run: str, name: str, state: RunState) -> None:
    """`Corrupt` or `NotFound` unless the slot that a snapshot was made after is there, as it was then."""
    found = sha256_hex(storage.get(layout.log_key(run, state.seq), MAX_RECORD_BYTES))
    if found != state.digest:
        raise _refused(name, f"slot {state.seq} with sha256 {state.digest[:12]}..", f"{found[:12]}..")


def listed(storage: Storage, run: str) -> list[str]:
    """The names of all snapshots, the newest first."""
    names = storage.list(layout.snapshots_folder(run))
    return sorted((name for name in names if layout.snapshot_of(name) is not None), reverse=True)


def read(storage: Storage, run: str, name: str) -> RunState:
    """The state in the snapshot `name`, its slot unseen; see `load`."""
    return load(run, name, storage.get(f"{layout.snapshots_folder(run)}/{name}", MAX_SNAPSHOT_BYTES))


def newest(storage: Storage, run: str) -> RunState | None:
    """The state in the newest snapshot that is sound; None if there is none, for whatever reason."""
    try:
        names = listed(storage, run)
    except CkptdError as error:
        _log.info("run %s: snapshots cannot be listed, the whole log is read: %s", run, error.message)
        return None
    for name in names[:TRIES]:
        try:
            state = read(storage, run, name)
            check_slot(storage, run, name, state)
        except CkptdError as error:
            _log.info("run %s: snapshot %s is passed over: %s", run, name, error.message)
        else:
            return state
    return None


def write(storage: Storage, run: str, state: RunState) -> str:
    """Write a snapshot of `state`, which nobody else changes meanwhile, and delete older ones; its name. Everything
    that a put and a delete may raise."""
    data = dump(run, state)
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise Corrupt(f"run {run}: a snapshot of {len(data)} bytes is too long: at most {MAX_SNAPSHOT_BYTES}")
    key = layout.snapshot_key(run, state.seq, sha256_hex(data))
    try:
        storage.put(key, [data], len(data))
    except AlreadyExists:
        _log.debug("run %s: another process wrote %s", run, key)
    mine = key.rpartition("/")[2]
    older = [name for name in listed(storage, run) if name < mine]
    for name in older[KEEP - 1 :]:
        storage.delete(f"{layout.snapshots_folder(run)}/{name}")
    return mine


def _refused(name: str, expected: str, found: str) -> Corrupt:
    return Corrupt(f"snapshot {name} is not used: expected {expected}, found {found}", object=name)
