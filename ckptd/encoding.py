"""The stored bytes of a record: an envelope of version, number, chain and sum around a body of `ckptd.records`.

`encode` gives the bytes, `decode` takes nothing but them: `Corrupt` for bytes that are no record, or one of a later
version. `actor` and `time` are for people: no rule reads them.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, JsonValue, SerializeAsAny, ValidationError

from ckptd.digests import ZERO_SHA256, canonical_json, sha256_hex
from ckptd.errors import Corrupt
from ckptd.manifest import Frozen, Sha256
from ckptd.records import (
    AttemptOpened,
    Body,
    CheckpointCommitted,
    GenerationReady,
    GenerationStarted,
    Label,
    RunCreated,
    SaveAborted,
)
from ckptd.upkeep_records import (
    CheckpointHeld,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReinstated,
    CheckpointReleased,
    CheckpointsPurged,
    CheckpointsRetired,
    CheckpointUnpinned,
    CheckpointVerified,
    RolledBack,
    RunClosed,
    RunReopened,
)

FORMAT = 1
MAX_RECORD_BYTES = 64 * 1024
# Cannot occur inside a JSON string, where quotes are escaped.
SUM = re.compile(rb'"sum":"([0-9a-f]{64})"')


KINDS: dict[str, type[Body]] = {
    body.kind: body
    for body in (
        RunCreated,
        AttemptOpened,
        GenerationStarted,
        GenerationReady,
        CheckpointCommitted,
        SaveAborted,
        CheckpointQuarantined,
        CheckpointReinstated,
        RolledBack,
        CheckpointPinned,
        CheckpointUnpinned,
        CheckpointHeld,
        CheckpointReleased,
        CheckpointVerified,
        CheckpointsRetired,
        CheckpointsPurged,
        RunClosed,
        RunReopened,
    )
}


class _Envelope(Frozen):
    version: int
    seq: Annotated[int, Field(gt=0)]
    kind: Label
    rid: Annotated[str, Field(max_length=300)]
    prev: Sha256
    actor: Label
    time: Label


class _Stored(_Envelope):
    body: JsonValue


class Record(_Envelope):
    """One slot of the log. Build it with `record`, read it with `decode`."""

    body: SerializeAsAny[Body]


def record(seq: int, prev: str, body: Body, *, actor: str, time: str) -> Record:
    """A record for slot `seq`, after the record whose bytes have the digest `prev`."""
    return Record(version=FORMAT, seq=seq, kind=body.kind, rid=body.rid, prev=prev, actor=actor, time=time, body=body)


def encode(item: Record) -> bytes:
    """The stored bytes."""
    data = sealed(item.model_dump(mode="json"))
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"record {item.rid} has {len(data)} bytes, at most {MAX_RECORD_BYTES} are allowed")
    return data


def decode(data: bytes, *, key: str, seq: int) -> Record:
    """The record in slot `seq`. `Corrupt` if the bytes are no such record, or of a later version."""
    if _summed(data) != data:
        raise damaged_slot(key, "the bytes that its sum is of", "others")
    try:
        stored = _Stored.model_validate_json(data)
        if stored.version != FORMAT or stored.kind not in KINDS:
            raise Corrupt(
                f"log slot {key} holds a record this version does not know"
                f" (kind {stored.kind!r}, format {stored.version})",
                do="Upgrade this ckptd; until then the run is read-only here.",
                object=key,
            )
        body = KINDS[stored.kind].model_validate_json(canonical_json(stored.body))
    except (ValidationError, ValueError) as error:
        raise damaged_slot(key, "a record", str(error).splitlines()[0]) from error
    if stored.seq != seq or stored.rid != body.rid:
        raise damaged_slot(key, f"record {seq}", f"record {stored.seq} ({stored.rid})")
    return Record(**stored.model_dump(exclude={"body"}), body=body)


def sealed(content: dict[str, JsonValue]) -> bytes:
    """The bytes of a record with its `sum`: the sha256 of them with zeros in its place. So a reader notices a wrong
    byte in the newest record too, which no later one chains to yet."""
    return _summed(canonical_json({**content, "sum": ZERO_SHA256}))


def _summed(data: bytes) -> bytes:
    """`data` with the right sum in it; nothing if there is no one place for it."""
    blank, places = SUM.subn(b'"sum":"' + ZERO_SHA256.encode() + b'"', data)
    right = b'"sum":"' + sha256_hex(blank).encode() + b'"'
    return SUM.sub(right, data) if places == 1 else b""


def damaged_slot(key: str, expected: str, found: str) -> Corrupt:
    """The error for a log that cannot be trusted: the run is read-only until somebody looked at it."""
    return Corrupt(
        f"log slot {key} is damaged: expected {expected}, found {found}; the run is read-only",
        do="Restore this file from a copy or a backup of the storage; do not delete or edit other slots.",
        object=key,
        expected=expected,
        observed=found,
    )
