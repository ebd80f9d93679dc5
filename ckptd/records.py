"""What the records of a run's log can say; `ckptd.encoding` has their bytes.

`rid` is derived from what the record is about, so a retry and every replica build the same one.
`ckptd.upkeep_records` has the kinds about what is kept.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from ckptd import layout
from ckptd.manifest import MAX_BORROWS, Frozen, ManifestRef, Metrics, SaveId, Step

MAX_CANDIDATES = 16

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
    """A complete, durable save became a checkpoint. `payload_bytes` is what it wrote itself; `borrows` are the saves
    in whose objects, `borrowed_bytes` in all, the rest of its state lies."""

    kind = "checkpoint-committed"
    step: Step
    manifest: ManifestRef
    payload_bytes: Annotated[int, Field(ge=0)]
    writers: Annotated[int, Field(gt=0)]
    metrics: Metrics = {}
    borrows: Annotated[tuple[SaveId, ...], Field(max_length=MAX_BORROWS)] = ()
    borrowed_bytes: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _borrows_from_others_each_once(self) -> Self:
        if list(self.borrows) != sorted(set(self.borrows)) or self.save in self.borrows:
            raise ValueError(f"borrows must be other saves, sorted and each once: {self.borrows[:5]}")
        return self

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
