"""What the caller holds of one save, and what a client counts of all of them. Callable from any thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from ckptd.errors import Unavailable, describe
from ckptd.failpoints import failpoint
from ckptd.manifest import ContractValue
from ckptd_client.snapshot import Captured

Status = Literal["queued", "unknown", "durable", "failed", "skipped"]
Outcome = Literal["durable", "failed", "superseded", "skipped"]
SKIPPED = "is skipped, because the save before is still running"  # what all ranks know such a save by


class Tally:
    """How many saves became what, and how old the newest durable one is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._durable: tuple[int, float] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Each save is `queued` (its outcome is open), `durable`, `failed`, `superseded` or `skipped`; those of which
        the bytes went through the spool are counted as `spooled` besides."""
        names = ("queued", "durable", "failed", "superseded", "skipped", "spooled")
        with self._lock:
            return {name: self._counts[name] for name in names}

    @property
    def durable_step(self) -> int | None:
        with self._lock:
            return self._durable[0] if self._durable is not None else None

    @property
    def durable_age_seconds(self) -> float | None:
        with self._lock:
            return time.monotonic() - self._durable[1] if self._durable is not None else None

    def begin(self) -> None:
        with self._lock:
            self._counts["queued"] += 1

    def spool(self) -> None:
        with self._lock:
            self._counts["spooled"] += 1

    def end(self, step: int, outcome: Outcome) -> None:
        with self._lock:
            self._counts["queued"] -= 1
            self._counts[outcome] += 1
            # What was in doubt may turn out durable after a later one: it is older all the same.
            if outcome == "durable" and (self._durable is None or step >= self._durable[0]):
                self._durable = (step, time.monotonic())


class SaveHandle:
    """What became of one save: `queued`, then `durable`, `failed`, or `skipped` if this rank or another was busy with
    the one before; `unknown` while nobody can say whether its commit landed and its deadline has passed, which is
    found out in the background."""

    def __init__(self, save: str, step: int, tally: Tally | None = None) -> None:
        self.save = save
        self.step = step
        self.error: BaseException | None = None
        self.told = False  # whether the caller has seen the error
        self.warnings: list[str] = []  # what is suspicious about it; complete once it is durable
        self.spooled = False  # whether its bytes were put on the local disk first
        self.superseded = False  # whether it failed because newer saves took its place
        self._tally = tally or Tally()
        self._status: Status = "queued"
        self._lock = threading.Lock()
        self._news, self._over = threading.Event(), threading.Event()

    @property
    def status(self) -> Status:
        return self._status

    @property
    def over(self) -> bool:
        """Whether the outcome is known, or will never be."""
        return self._over.is_set()

    @property
    def became_durable(self) -> bool | None:
        """None while that is open."""
        return self._status == "durable" if self.over else None

    def wait(self, timeout_seconds: float | None = None) -> SaveHandle:
        """Return once the save is durable; raise what made it fail. `Unavailable` past the timeout.

        That the outcome is unknown is raised once; who waits again waits until it is known.
        """
        if not (self._over if self.told else self._news).wait(timeout_seconds):
            raise Unavailable(f"save of step {self.step} is still queued after {timeout_seconds} s", save=self.save)
        with self._lock:
            error = self.error
            self.told = self.told or error is not None
        if error is not None:
            raise error
        return self

    def join(self, timeout_seconds: float) -> bool:
        """Wait until the outcome is known; whether it is."""
        return self._over.wait(timeout_seconds)

    # The client's own side.

    def doubt(self, error: BaseException) -> None:
        """Its deadline passed and the outcome is open. `finish` comes later."""
        with self._lock:
            if self._status == "queued":
                self._status, self.error = "unknown", error
        self._news.set()

    def finish(self, error: BaseException | None = None, *, superseded: bool = False) -> bool:
        """The outcome, told once; whether this call was the one. No later call raises for a save that was skipped, on
        whichever rank: who wants to know looks at the handle."""
        skipped = error is not None and SKIPPED in describe(error)
        with self._lock:
            if self._over.is_set():
                return False
            self._status, self.error = ("durable" if error is None else "skipped" if skipped else "failed"), error
            self.told = self.told or skipped
            self.superseded = superseded
            self._tally.end(self.step, "superseded" if superseded else self._status)
            self._over.set()
        self._news.set()
        return True

    def leave_open(self, error: BaseException) -> None:
        """Nobody will find the outcome out: the client closes. It counts as failed and stays `unknown`."""
        with self._lock:
            if self._over.is_set():
                return
            self._status, self.error = "unknown", self.error or error
            self._tally.end(self.step, "failed")
            self._over.set()
        self._news.set()


@dataclass(frozen=True)
class Job:
    """One save as one rank sees it. `writers` is 1, or the number of ranks when each adds state of its own."""

    handle: SaveHandle
    run: str
    generation: int
    rank: int
    world: int
    writers: int
    deadline_seconds: float
    captured: Captured | None = None
    shared: JsonValue = None
    per_rank: JsonValue = None
    form: str = ""  # what the shared state consists of, if all ranks write a part of it
    metrics: dict[str, float] = field(default_factory=dict)
    contract: dict[str, ContractValue] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    started_at: float = field(default_factory=time.monotonic)

    @property
    def left_seconds(self) -> float:
        return max(0.0, self.started_at + self.deadline_seconds - time.monotonic())

    def point(self, name: str) -> None:
        """A failpoint of this save."""
        failpoint(name, rank=self.rank, step=self.handle.step, generation=self.generation)
