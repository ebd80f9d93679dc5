"""What a run's log amounts to: attempts, generations, checkpoints. Filled by `history`, read by everyone."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any

from ckptd.digests import ZERO_SHA256
from ckptd.manifest import ManifestRef
from ckptd.records import Candidate
from ckptd.upkeep_records import CheckpointQuarantined, Ended, RunClosed


@dataclass(frozen=True)
class OpenedAttempt:
    seq: int
    job: str
    host: str


@dataclass
class Generation:
    """An incarnation that began. `digest` is the sha256 of its record's stored bytes."""

    number: int
    attempt: str
    world: int
    resume_from: str | None
    fallback_of: int | None
    candidates: tuple[Candidate, ...]
    digest: str
    time: str
    ready: bool = False
    quarantines: int = 0  # the turn of the quarantine of `resume_from` when it started
    closed: Ended = ""  # what ended it: nothing of it counts any more


@dataclass(frozen=True)
class Checkpoint:
    """A commit that counted. `parent` is the save it continues, None at the start of the run."""

    save: str
    seq: int
    step: int
    generation: int
    parent: str | None
    manifest: ManifestRef
    payload_bytes: int
    writers: int
    metrics: dict[str, float]
    time: str
    borrows: tuple[str, ...] = ()  # the saves in whose objects the rest of its state lies
    borrowed_bytes: int = 0


@dataclass
class RunState:
    """The fold of records 1..seq. `digest` chains the next record."""

    seq: int = 0
    digest: str = ZERO_SHA256
    fingerprint: str = ""
    attempts: dict[str, OpenedAttempt] = field(default_factory=dict)
    generations: list[Generation] = field(default_factory=list)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    aborted: dict[str, str] = field(default_factory=dict)
    quarantined: dict[str, CheckpointQuarantined] = field(default_factory=dict)
    retired: dict[str, int] = field(default_factory=dict)  # the slot that retired it
    purged: set[str] = field(default_factory=set)
    pinned: dict[str, set[str]] = field(default_factory=dict)  # by whom; never an empty set
    held: dict[str, set[str]] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)  # the slot of the last time
    starts: dict[str, int] = field(default_factory=dict)  # generations since the last commit that began from it
    doubts: int = 0  # quarantines for a crash loop since the last commit
    turns: dict[str, int] = field(default_factory=dict)  # how many records of a topic counted
    closed: RunClosed | None = None  # by whom, until it is reopened
    lent: dict[str, list[str]] = field(default_factory=dict)  # by lender: those that borrow and are not retired
    tip: str | None = None
    accepted: dict[str, int] = field(default_factory=dict)
    void: dict[int, str] = field(default_factory=dict)

    @property
    def current(self) -> Generation | None:
        return self.generations[-1] if self.generations else None

    def snapshot(self) -> RunState:
        """A copy that does not grow with the log."""
        containers = {f.name: _copied(getattr(self, f.name)) for f in fields(self)}
        if self.generations:
            containers["generations"][-1] = copy(self.generations[-1])  # the only one that may still change
        return RunState(**containers)

    def started(self, attempt: str, fallback_of: int | None) -> Generation | None:
        """The generation that this attempt began, as a fallback of `fallback_of` if that is given."""
        if f"begin:{attempt}:{fallback_of or 0}" not in self.accepted:
            return None  # as most that ask: they wait for it
        mine = (g for g in reversed(self.generations) if g.attempt == attempt and g.fallback_of == fallback_of)
        return next(mine, None)


def _copied(value: Any) -> Any:
    """A copy of a field; of the containers in it, too, all of which are of one kind."""
    if isinstance(value, dict) and isinstance(next(iter(value.values()), None), set | list | dict):
        return {key: copy(inner) for key, inner in value.items()}
    return copy(value)
