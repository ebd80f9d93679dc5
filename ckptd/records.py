"""The records of a run's log: small, immutable, numbered, chained.

A record's bytes are what `encode` gives; its digest chains the next one to it. `rid` is derived from what the
record is about, so a retry and every replica build the same one. `actor` and `time` are for people: no rule
reads them.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Self

from pydantic import Field, JsonValue, SerializeAsAny, ValidationError, model_validator

from ckptd import layout
from ckptd.digests import ZERO_SHA256, canonical_json, sha256_hex
from ckptd.errors import Corrupt
from ckptd.manifest import Frozen, ManifestRef, Metrics, SaveId, Sha256, Step

FORMAT = 1
MAX_RECORD_BYTES = 64 * 1024
MAX_CANDIDATES = 16
# Cannot occur inside a JSON string, where quotes are escaped.
SUM = re.compile(rb'"sum":"([0-9a-f]{64})"')

Attempt = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
GenerationNumber = Annotated[int, Field(gt=0, lt=10**8)]
Label = Annotated[str, Field(max_length=200)]
Reason = Annotated[str, Field(max_length=1000)]


class Damage(Frozen):
    """One reading that did not match: which object (or manifest), which chunk, what was there instead."""

    object: Annotated[str, Field(max_length=1024)]
    chunk: int | None = None
    expected: Reason
    observed: Reason


class Observer(Frozen):
    """Who read: a host, and a process on it. `process` is unique enough to tell two readers apart."""

    host: Label
    process: Label


class Candidate(Frozen):
    """A checkpoint that was looked at for an answer, and what was found."""

    save: SaveId
    step: Step
    valid: bool
    reason: Reason


class Body(Frozen):
    """What a record says. `kind` names it in storage."""

    kind: ClassVar[str]

    @property
    def rid(self) -> str:
        raise TypeError(f"{type(self).__name__} has no rid")


class RunCreated(Body):
    """Slot 1 of every log. `fingerprint` tells this run from another one under the same name."""

    kind = "run-created"
    fingerprint: Attempt

    @property
    def rid(self) -> str:
        return "create"


class AttemptOpened(Body):
    """Rank 0 of a new incarnation is alive; the slot number is the attempt's age."""

    kind = "attempt-opened"
    attempt: Attempt
    job: Label
    host: Label

    @property
    def rid(self) -> str:
        return f"open:{self.attempt}"


class GenerationStarted(Body):
    """The incarnation is whole. `resume_from` is frozen here: every rank gets this answer and no other."""

    kind = "generation-started"
    generation: GenerationNumber
    attempt: Attempt
    world: Annotated[int, Field(gt=0, lt=10**6)]
    resume_from: SaveId | None
    fallback_of: GenerationNumber | None = None
    candidates: Annotated[tuple[Candidate, ...], Field(max_length=MAX_CANDIDATES)] = ()

    @property
    def rid(self) -> str:
        return f"begin:{self.attempt}:{self.fallback_of or 0}"


class GenerationReady(Body):
    """All ranks hold the answer's state; from here on commits count."""

    kind = "generation-ready"
    generation: GenerationNumber
    attempt: Attempt

    @property
    def rid(self) -> str:
        return f"ready:{self.attempt}:{self.generation}"


class OfSave(Body):
    """A record about a save of the generation that is in the save's name."""

    generation: GenerationNumber
    save: SaveId

    @model_validator(mode="after")
    def _save_is_of_generation(self) -> Self:
        if layout.generation_of(self.save) != self.generation:
            raise ValueError(f"save {self.save} is not of generation {self.generation}")
        return self


class CheckpointCommitted(OfSave):
    """A complete, durable save became a checkpoint."""

    kind = "checkpoint-committed"
    step: Step
    manifest: ManifestRef
    payload_bytes: Annotated[int, Field(ge=0)]
    writers: Annotated[int, Field(gt=0)]
    metrics: Metrics = {}

    @property
    def rid(self) -> str:
        return f"commit:{self.save}:{self.manifest.sha256}"


class SaveAborted(OfSave):
    """A try to save is off, so that nobody waits for it."""

    kind = "save-aborted"
    reason: Reason

    @property
    def rid(self) -> str:
        return f"abort:{self.save}"


class CheckpointQuarantined(Body):
    """A checkpoint's bytes are not what was committed, by two readings of two processes. Deletes nothing."""

    kind = "checkpoint-quarantined"
    save: SaveId
    damage: Damage
    reported_by: Observer
    confirmed_by: Observer

    @property
    def rid(self) -> str:
        return f"quarantine:{self.save}"


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
