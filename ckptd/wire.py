"""What the ledger is asked and what it answers: the same values in process and over HTTP.

Requests are bounded field by field; answers carry the reasons for what they say. An answer about a generation is
made from its record alone, so every rank that asks gets equal bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ckptd.manifest import Frozen, ManifestRef, Metrics, SaveId, Step, Writer
from ckptd.records import Attempt, Candidate, Damage, GenerationNumber, Label, Observer, Reason
from ckptd.upkeep_records import Ended

World = Annotated[int, Field(gt=0, lt=10**6)]


class StorageInfo(Frozen):
    """Where the service keeps runs. Payload goes there straight from the trainer."""

    url: str
    uuid: str
    version: str


class OpenRequest(Frozen):
    attempt: Attempt
    job: Label
    host: Label


class BeginRequest(Frozen):
    """`job` and `takeover` are for politeness between live jobs only; no rule of the log reads them."""

    attempt: Attempt
    job: Label
    world: World
    fallback_of: GenerationNumber | None = None
    takeover: bool = False


class ReadyRequest(Frozen):
    attempt: Attempt


class PartReport(Frozen):
    """A hint that a writer's part manifest lies in storage; what counts is the storage."""

    writer: Writer


class CommitRequest(Frozen):
    generation: GenerationNumber
    save: SaveId
    step: Step
    writers: World
    manifest: ManifestRef


class AbortRequest(Frozen):
    generation: GenerationNumber
    reason: Reason


class DamageReport(Frozen):
    """One reader's finding about a committed checkpoint; the ledger reads again before it believes it."""

    save: SaveId
    damage: Damage
    reader: Observer


class DamageAnswer(Frozen):
    """`confirmed` by a second reading of another process: the checkpoint is in quarantine."""

    confirmed: bool
    detail: str


class Heartbeat(Frozen):
    """Rank 0 of a live job, every few seconds. Nothing depends on it but politeness."""

    attempt: Attempt
    job: Label
    host: Label


class HeartbeatAnswer(Frozen):
    """The run's current generation and the attempt that began it, so that a fenced job learns of it early; and
    whether a person ended it."""

    generation: int
    attempt: Attempt | None
    ended: Ended = ""


Verb = Literal["quarantine", "reinstate", "rollback", "pin", "unpin", "hold", "release"]


RunVerb = Literal["close", "reopen"]


class ActOnRun(Frozen):
    """What `who` decides about a run."""

    who: Annotated[Label, Field(min_length=1)]
    reason: Reason = ""


class ActRequest(ActOnRun):
    """What `who` decides about a checkpoint. `save` names one of several of a step, see `checkpoint_at`."""

    save: SaveId | None = None


class VerifyRequest(Frozen):
    save: SaveId | None = None


class VerifyAnswer(Frozen):
    """All bytes of a checkpoint were read, `payload_bytes` with what it borrows: `whole` (`recorded`, unless it is in
    quarantine), `damaged` (a second reading found it too: it is in quarantine), or `unconfirmed` (the second reading
    found it whole)."""

    save: SaveId
    step: Step
    payload_bytes: int
    result: Literal["whole", "damaged", "unconfirmed"]
    recorded: bool
    detail: str = ""


class CheckpointInfo(Frozen):
    """`payload_bytes` is what this save wrote; `borrowed_bytes` are in objects of the saves that it `borrows` from;
    `needed_by` are the newest checkpoints, not retired, that borrow from it."""

    save: SaveId
    step: Step
    generation: GenerationNumber
    parent: SaveId | None
    manifest: ManifestRef
    payload_bytes: int
    writers: int
    metrics: Metrics
    time: str
    status: Literal["valid", "quarantined", "retired", "purged"] = "valid"
    verified: bool = False
    pinned_by: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    borrows: tuple[SaveId, ...] = ()
    borrowed_bytes: int = 0
    needed_by: tuple[SaveId, ...] = ()
    on_line: bool = False
    is_tip: bool = False
    is_resume_point: bool = False


class HoldAnswer(Frozen):
    """The checkpoint is kept for its reader, who says so again within `refresh_seconds`, as often as it takes:
    readers that fall silent are taken for gone."""

    checkpoint: CheckpointInfo
    refresh_seconds: float


class Answer(Frozen):
    """The one pinned answer for all ranks of an incarnation. `record_sha256` is what they compare."""

    answer: Literal["found", "none"]
    run: str
    generation: GenerationNumber
    attempt: Attempt
    world: int
    fallback_of: GenerationNumber | None
    checkpoint: CheckpointInfo | None
    candidates: tuple[Candidate, ...]
    record_sha256: str
    storage_uuid: str


class Latest(Frozen):
    """Where a start would resume now. For people and tools; it pins nothing."""

    answer: Literal["found", "none", "corrupt"]
    run: str
    generation: int
    checkpoint: CheckpointInfo | None
    candidates: tuple[Candidate, ...]


class PartsAnswer(Frozen):
    """The writers whose parts lie in storage, by the key of each one's part manifest."""

    parts: dict[str, str]


class SaveStatus(Frozen):
    """`pending`, `durable` (committed), `aborted`, or `fenced` (a younger generation started before)."""

    save: SaveId
    status: Literal["pending", "durable", "aborted", "fenced"]
    detail: str = ""


class RunInfo(Frozen):
    """`stored_bytes` is the payload of all checkpoints that have their bytes, each object counted once. `ended` is
    about the current generation, `closed` about the run."""

    run: str
    generation: int
    ready: bool
    records: int
    void_records: int
    checkpoints: int
    stored_bytes: int = 0
    ended: Ended = ""
    closed: bool = False
    resume_step: int | None
    tip_step: int | None
    last_commit: str | None
    problem: str | None = None
