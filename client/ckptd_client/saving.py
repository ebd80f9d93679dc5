"""A save, from the captured bytes to the commit. All of it runs on a background thread of its own.

Every writer writes one object under a name that is never used twice, then its part manifest. Rank 0 waits for the
parts of all writers, writes the manifest that lists them, and asks for the commit: only that makes it a checkpoint.
Whatever fails before leaves the previous checkpoint as it was, and nothing is ever cleaned up after a commit whose
outcome is not known, because it may have landed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue, ValidationError

from ckptd import __version__, layout
from ckptd.errors import AlreadyExists, CkptdError, Conflict, Corrupt, Fenced, Unavailable, describe
from ckptd.failpoints import failpoint
from ckptd.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestRef, ObjectRef, Part
from ckptd.storage.base import Storage
from ckptd.wire import AbortRequest, CommitRequest, SaveStatus
from ckptd_client import payload
from ckptd_client.patience import again
from ckptd_client.snapshot import Captured
from ckptd_client.transport import Transport

log = logging.getLogger("ckptd")
WRITE_TRIES = 3
PUT_SECONDS = 60.0
RETRY_SECONDS = 1.0
SLACK_SECONDS = 60.0  # a save ends by its own deadline, and knows the reason: the caller waits that much longer


class SaveHandle:
    """What became of one save: `queued`, then `durable` or `failed`. Callable from any thread."""

    def __init__(self, save: str, step: int) -> None:
        self.save = save
        self.step = step
        self.error: BaseException | None = None
        self.told = False  # whether the caller has seen the error
        self._done = threading.Event()

    @property
    def status(self) -> Literal["queued", "durable", "failed"]:
        if not self._done.is_set():
            return "queued"
        return "durable" if self.error is None else "failed"

    def wait(self, timeout_seconds: float | None = None) -> SaveHandle:
        """Return once the save is durable; raise what made it fail. `Unavailable` past the timeout."""
        if not self._done.wait(timeout_seconds):
            raise Unavailable(f"save of step {self.step} is still queued after {timeout_seconds} s", save=self.save)
        if self.error is not None:
            self.told = True
            raise self.error
        return self

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self._done.set()


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
    captured: Captured | None
    shared: JsonValue = None
    per_rank: JsonValue = None
    metrics: dict[str, float] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)

    @property
    def left_seconds(self) -> float:
        return max(0.0, self.started_at + self.deadline_seconds - time.monotonic())


class Saver:
    """Carries out one save at a time. `submit` and `settle` are for the training thread."""

    def __init__(self, transport: Transport, declare_ready: Callable[[], None]) -> None:
        self._transport = transport
        self._declare_ready = declare_ready
        self._thread: threading.Thread | None = None
        self._last: SaveHandle | None = None

    def submit(self, job: Job) -> SaveHandle:
        """Start a save. Call `settle` before: one save is in flight at a time."""
        self._last = job.handle
        log.info("save of step %d queued (%s)", job.handle.step, job.handle.save)
        # No daemon, and of no pool: the interpreter ends the main thread first and then waits for this one, which
        # thus can tell that nobody asks any more.
        self._thread = threading.Thread(target=self._run, args=(job,), name="ckptd-save")
        self._thread.start()
        return job.handle

    def settle(self, deadline_seconds: float) -> None:
        """Wait for the save in flight, and raise what made it fail unless the caller knows already."""
        if self._last is not None and not self._last.told:
            self._last.wait(deadline_seconds + SLACK_SECONDS)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, job: Job) -> None:
        """On the background thread: every outcome ends up in the handle."""
        error: BaseException | None = None
        try:
            self._save(job)
        except BaseException as caught:  # noqa: BLE001 - handed to the caller's next call
            error = caught
        if job.captured is not None:
            job.captured.release()  # before the outcome is known: who learns of it may save again at once
        if error is None:
            log.info("save of step %d durable (%s)", job.handle.step, job.handle.save)
        else:
            log.error("save of step %d failed: %s", job.handle.step, describe(error))
        job.handle.finish(error)

    def _save(self, job: Job) -> None:
        if job.rank != 0:
            if job.captured is not None:
                self._write_part(job)
            self._follow(job)
            return
        try:
            self._write_part(job)
            ref = self._write_manifest(job)
            self._insist(job, self._declare_ready)
        except Exception as error:
            self._call_off(job, error)
            raise
        self._commit(job, ref)

    def _write_part(self, job: Job) -> None:
        """Payload, then the part manifest that says it is whole. A failed writer says so in its part manifest."""
        try:
            ref = self._write_payload(job)
            _point("payload-written", job)
        except Exception as error:
            if job.rank != 0:
                self._tell_failure(job, error)
            raise
        self._put_part(job, self._part(job, payload_ref=ref))

    def _tell_failure(self, job: Job, error: Exception) -> None:
        try:
            self._put_part(job, self._part(job, error=describe(error)))
        except CkptdError as second:
            error.add_note(f"and rank 0 could not be told: {describe(second)}")

    def _put_part(self, job: Job, part: Part) -> None:
        key = layout.part_key(job.run, job.handle.save, job.rank, layout.new_nonce())
        _put(self._transport.storage, key, part.stored())
        _point("part-written", job)
        self._transport.report_part(job.handle.save, job.rank)

    def _write_payload(self, job: Job) -> ObjectRef:
        """Each try under a new name: a file whose write failed is never trusted again."""
        if job.captured is None:
            raise AssertionError("a writer without captured state")
        captured = job.captured

        def write() -> ObjectRef:
            key = layout.payload_key(job.run, job.handle.save, job.rank, layout.new_nonce())
            _point("payload-begin", job)
            return payload.write(self._transport.storage, key, captured)

        return again(write, seconds=job.left_seconds, tries=WRITE_TRIES)

    def _write_manifest(self, job: Job) -> ManifestRef:
        """Rank 0: all parts, in one manifest."""
        parts = self._gather(job)
        try:
            manifest = Manifest(
                run=job.run,
                generation=job.generation,
                save=job.handle.save,
                step=job.handle.step,
                world=job.world,
                metrics=job.metrics,
                producer=f"ckptd {__version__}",
                parts=tuple(parts),
            )
        except ValidationError as error:
            raise Corrupt(f"the parts of save {job.handle.save} are not of one save: {error}"[:1000]) from error
        data = manifest.stored()
        ref = ManifestRef.of(manifest, data)
        _put(self._transport.storage, ref.key, data)
        _point("manifest-written", job)
        return ref

    def _commit(self, job: Job, ref: ManifestRef) -> None:
        """Rank 0. A commit that was refused calls the save off; one whose outcome is not known is left alone."""
        request = CommitRequest(
            generation=job.generation,
            save=job.handle.save,
            step=job.handle.step,
            writers=job.writers,
            manifest=ref,
        )
        _point("before-commit", job)
        try:
            self._insist(job, lambda: self._transport.commit(request))
        except Unavailable:
            raise
        except CkptdError as error:
            self._call_off(job, error)
            raise
        _point("after-commit", job)

    def _gather(self, job: Job) -> list[Part]:
        """The parts of exactly the writers 0..w-1, or the reason why there is no such set."""
        found = self._transport.parts(job.handle.save, job.writers, deadline_seconds=job.left_seconds).parts
        missing = [writer for writer in range(job.writers) if str(writer) not in found]
        if missing:
            raise Unavailable(
                f"save of step {job.handle.step}: no part from ranks {missing} within {job.deadline_seconds:.0f} s",
                do="With per_rank state, call save on every rank with the same step and with per_rank.",
                save=job.handle.save,
            )
        parts = []
        for writer in range(job.writers):
            data = self._transport.storage.get(found[str(writer)], MAX_MANIFEST_BYTES)
            try:
                part = Part.model_validate_json(data)
            except ValidationError as error:
                raise Corrupt(f"{found[str(writer)]} is no part manifest: {error}"[:1000]) from error
            if part.error is not None:
                raise Unavailable(
                    f"save of step {job.handle.step} is off: rank {writer} could not write: {part.error}",
                    save=job.handle.save,
                )
            parts.append(part)
        return parts

    def _follow(self, job: Job) -> None:
        """Another rank: learn what became of the save, unless the program is ending and nobody asks any more."""
        status = self._transport.save_status(
            job.handle.save, deadline_seconds=job.left_seconds, wanted=threading.main_thread().is_alive
        )
        _raise_unless_durable(job, status)

    def _call_off(self, job: Job, error: Exception) -> None:
        """Tell the other ranks, unless a younger incarnation tells them already. If that fails too, they find out by
        their own deadline."""
        if isinstance(error, Fenced):
            return
        request = AbortRequest(generation=job.generation, reason=describe(error)[:1000])
        try:
            self._transport.abort(job.handle.save, request)
        except CkptdError as second:
            error.add_note(f"and calling the save off failed: {describe(second)}")

    def _insist(self, job: Job, call: Callable[[], None]) -> None:
        """Repeat while the outcome is open and there is time: the call recognises its own earlier write."""
        while True:
            try:
                return call()
            except Unavailable:
                if job.left_seconds == 0.0:
                    raise
            time.sleep(min(RETRY_SECONDS, job.left_seconds))

    def _part(self, job: Job, *, payload_ref: ObjectRef | None = None, error: str | None = None) -> Part:
        return Part(
            run=job.run,
            generation=job.generation,
            save=job.handle.save,
            step=job.handle.step,
            writer=job.rank,
            payload=payload_ref,
            shared=job.shared if error is None else None,
            per_rank=job.per_rank if error is None else None,
            error=error[:2000] if error is not None else None,
        )


def _point(name: str, job: Job) -> None:
    failpoint(name, rank=job.rank, step=job.handle.step, generation=job.generation)


def _raise_unless_durable(job: Job, status: SaveStatus) -> None:
    what = f"save of step {job.handle.step} ({status.save})"
    match status.status:
        case "aborted":
            raise Conflict(f"{what} was called off: {status.detail}", save=status.save)
        case "fenced":
            raise Fenced(f"{what} came too late: {status.detail}", save=status.save)
        case "pending" if threading.main_thread().is_alive():
            raise Unavailable(f"{what} was not committed within {job.deadline_seconds:.0f} s", save=status.save)
        case _:
            return


def _put(storage: Storage, key: str, data: bytes) -> None:
    """Write a small object whose name no other content can have; a retry that finds it there is done."""

    def put() -> None:
        try:
            storage.put(key, [data], len(data))
        except AlreadyExists:
            if storage.get(key, len(data)) != data:
                raise

    again(put, seconds=PUT_SECONDS, tries=WRITE_TRIES)
