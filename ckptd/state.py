"""What a run's log amounts to: attempts, generations, checkpoints. Filled by `history`, read by everyone."""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass, field, fields

from ckptd.digests import ZERO_SHA256
from ckptd.manifest import ManifestRef
from ckptd.records import Candidate
from ckptd.upkeep_records import CheckpointQuarantined


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
    closed: bool = False  # by a roll-back: nothing of it counts any more


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
    tip: str | None = None
    accepted: dict[str, int] = field(default_factory=dict)
    void: dict[int, str] = field(default_factory=dict)

    @property
    def current(self) -> Generation | None:
        return self.generations[-1] if self.generations else None

    def snapshot(self) -> RunState:
        """A copy that does not grow with the log."""
        containers = {f.name: copy(getattr(self, f.name)) for f in fields(self)}
        containers["pinned"], containers["held"] = deepcopy(self.pinned), deepcopy(self.held)
        return RunState(**containers)

    def started(self, attempt: str, fallback_of: int | None) -> Generation | None:
        """The generation that this attempt began, as a fallback of `fallback_of` if that is given."""
        mine = (g for g in self.generations if g.attempt == attempt and g.fallback_of == fallback_of)
        return next(mine, None)
