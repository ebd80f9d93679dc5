"""How far one save has come, and its next steps. On the uploader's thread; the uploader decides when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.manifest import ManifestRef, ObjectRef
from ckptd_client.handle import Job
from ckptd_client.spool import SpoolFile
from ckptd_client.steps import Steps

POLL_SECONDS = 2.0


@dataclass(eq=False)
class Item:
    """One save on its way. `given_up` may be set by any thread until `asked_at` is."""

    job: Job
    file: SpoolFile | None = None  # where its bytes are, unless they are on the storage
    payload: ObjectRef | None = None
    part_written: bool = False
    manifest: ManifestRef | None = None
    asked_at: float | None = None  # since when its outcome is asked for: from here on it is never given up
    answered_at: float | None = None  # since when the storage answers, while parts are waited for
    given_up: Exception | None = None

    @property
    def late(self) -> bool:
        """Whether its outcome has been asked for longer than its deadline."""
        return self.asked_at is not None and time.monotonic() - self.asked_at >= self.job.deadline_seconds


class Course:
    """`failing` says whether the storage did not answer last, `moved_at` when something was last brought there."""

    def __init__(self, steps: Steps, lock: threading.Condition) -> None:
        self._steps, self._lock = steps, lock
        self.failing = False
        self.moved_at = 0.0

    def move(self) -> None:
        self.moved_at = time.monotonic()

    def taking(self) -> None:
        """The storage takes bytes: whatever it did before, this save is on its way."""
        self.failing = False
        self.move()

    def advance(self, item: Item, wanted: Callable[[], bool]) -> bool:
        """The next steps of one save; whether it is durable. `Unavailable`: not now. A wait for others ends soon when
        it is not `wanted` any more."""
        job, steps = item.job, self._steps
        if item.file is not None:
            item.payload = steps.upload(job, item.file)
            self._progress(item)
            item.file.remove()
            item.file = None
        if item.payload is not None and not item.part_written:
            steps.put_part(job, item.payload)
            item.part_written = True
            self._progress(item)
        if job.rank != 0:
            self._ask(item)
            durable = steps.is_durable(job, deadline_seconds=POLL_SECONDS if wanted() else 0.0, wanted=wanted)
            self.failing = False
            return durable
        if item.manifest is None:
            found, missing = steps.find_parts(job, deadline_seconds=POLL_SECONDS if job.writers > 1 else 0.0)
            self.failing = False
            if missing:
                self._wait_for_parts(item, missing)
                return False
            item.manifest = steps.write_manifest(job, found)
            self._progress(item)
        if item.asked_at is None:
            steps.declare_ready()
            job.point("before-commit")
        self._ask(item)
        job.point("commit-asked")
        steps.commit(job, item.manifest)
        self.failing = False
        return True

    def _wait_for_parts(self, item: Item, missing: list[int]) -> None:
        """The deadline counts from the first answer that the storage gave after it was away."""
        now = time.monotonic()
        item.answered_at = item.answered_at or now
        if now - item.answered_at >= item.job.deadline_seconds:
            raise self._steps.missing(item.job, missing)
        _refuse(item)

    def _progress(self, item: Item) -> None:
        self.failing = False
        self.move()
        _refuse(item)

    def _ask(self, item: Item) -> None:
        """From here on the save may be a checkpoint at any moment."""
        with self._lock:
            _refuse(item)
            item.asked_at = item.asked_at or time.monotonic()


def _refuse(item: Item) -> None:
    if item.given_up is not None:
        raise item.given_up
