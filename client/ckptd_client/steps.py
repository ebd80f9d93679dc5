"""The steps of a save on the storage, each for itself: payload, part, manifest, commit, and calling it off.

Every writer writes one object under a name that is never used twice, then its part manifest. Rank 0 waits for the
parts of all writers, writes the manifest that lists them, and asks for the commit: only that makes it a checkpoint.
Whatever fails before leaves the previous checkpoint as it was, and nothing is ever cleaned up after a commit whose
outcome is not known, because it may have landed. Callable from the save thread and the uploader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from ckptd import __version__, layout
from ckptd.digests import sha256_hex
from ckptd.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    Fenced,
    OutcomeUnknown,
    SaveOff,
    Unavailable,
    describe,
)
from ckptd.manifest import Borrowed, Manifest, ManifestRef, ObjectRef, Part
from ckptd.reading import read_part
from ckptd.storage.base import Storage
from ckptd.wire import AbortRequest, CommitRequest, SaveStatus
from ckptd_client import payload
from ckptd_client.handle import Job
from ckptd_client.patience import again
from ckptd_client.spool import SpoolFile
from ckptd_client.transport import Transport

WRITE_TRIES = 3
PUT_SECONDS = 60.0
SUPERSEDED = "superseded"


class Steps:
    """What both threads do with a save. The errors are the storage's and the ledger's own."""

    def __init__(self, transport: Transport, declare_ready: Callable[[], None]) -> None:
        self._transport = transport
        self.declare_ready = declare_ready

    def write_payload(self, job: Job, *, seconds: float, count: int | None = None) -> ObjectRef:
        """All that was captured, or its first `count` tensors. Each try under a new name: a file whose write failed
        is never trusted again."""
        if job.captured is None:
            raise AssertionError("a writer without captured state")
        captured = job.captured

        def write() -> ObjectRef:
            key = layout.payload_key(job.run, job.handle.save, job.rank, layout.new_nonce())
            job.point("payload-begin")
            return payload.write(self._transport.storage, key, captured, count=count)

        ref = again(write, seconds=seconds, tries=WRITE_TRIES)
        job.point("payload-written")
        return ref

    def upload(self, job: Job, file: SpoolFile) -> ObjectRef:
        """One try to bring a payload object from the spool to the storage, compared chunk by chunk on its way."""
        key = layout.payload_key(job.run, job.handle.save, job.rank, layout.new_nonce())
        job.point("upload-begin")
        self._transport.storage.put(key, file, file.size)
        job.point("payload-written")
        return ObjectRef(key=key, size=file.size, chunk_bytes=file.chunk_bytes, chunks=file.chunks)

    def put_part(self, job: Job, ref: ObjectRef, borrowed: tuple[Borrowed, ...] = ()) -> None:
        """The part manifest that says a writer's object is whole. It comes after the object is durable."""
        self._put_part(job, _part(job, payload_ref=ref, borrowed=borrowed))

    def tell_failure(self, job: Job, error: BaseException) -> None:
        """A failed writer says so in its part manifest."""
        self._put_part(job, _part(job, error=describe(error)))

    def _put_part(self, job: Job, part: Part) -> None:
        data = part.stored()
        key = layout.part_key(job.run, job.handle.save, job.rank, sha256_hex(data))
        _put(self._transport.storage, key, data)
        job.point("part-written")
        self._transport.report_part(job.handle.save, job.rank)

    def find_parts(self, job: Job, *, deadline_seconds: float) -> tuple[Mapping[str, str], list[int]]:
        """Rank 0: where the parts lie that are there at the deadline, and the writers without one."""
        found = self._transport.parts(job.handle.save, job.writers, deadline_seconds=deadline_seconds).parts
        return found, [writer for writer in range(job.writers) if str(writer) not in found]

    def missing(self, job: Job, missing: list[int]) -> SaveOff:
        return SaveOff(
            f"save of step {job.handle.step}: no part from ranks {missing} within {job.deadline_seconds:.0f} s",
            do="With per_rank state, and with `parallel`, call save on every rank, alike and with the same step.",
            save=job.handle.save,
        )

    def write_manifest(self, job: Job, found: Mapping[str, str]) -> ManifestRef:
        """Rank 0: the parts of exactly the writers 0..w-1, in one manifest."""
        parts = self._read_parts(job, found)
        try:
            manifest = Manifest(
                run=job.run,
                generation=job.generation,
                save=job.handle.save,
                step=job.handle.step,
                world=job.world,
                metrics=job.metrics,
                contract=job.contract,
                producer=f"ckptd {__version__}",
                parts=tuple(parts),
            )
        except ValidationError as error:
            raise Corrupt(f"the parts of save {job.handle.save} are not of one save: {error}"[:1000]) from error
        data = manifest.stored()
        ref = ManifestRef.of(manifest, data)
        _put(self._transport.storage, ref.key, data)
        job.point("manifest-written")
        return ref

    def _read_parts(self, job: Job, found: Mapping[str, str]) -> list[Part]:
        parts = []
        for writer in range(job.writers):
            part = read_part(self._transport.storage, found[str(writer)])
            if part.error is not None:
                raise SaveOff(
                    f"save of step {job.handle.step} is off: rank {writer} could not write: {part.error}",
                    save=job.handle.save,
                )
            if part.form != job.form:
                raise SaveOff(
                    f"save of step {job.handle.step} is off: rank {writer} holds other tensors than rank 0, or"
                    " divides the state otherwise",
                    do="Give all ranks the same app_state and the same `parallel`, or save without `parallel`.",
                    save=job.handle.save,
                )
            parts.append(part)
        return parts

    def commit(self, job: Job, ref: ManifestRef) -> None:
        """Rank 0. It recognises its own earlier write, so it may be asked as often as need be."""
        request = CommitRequest(
            generation=job.generation, save=job.handle.save, step=job.handle.step, writers=job.writers, manifest=ref
        )
        self._transport.commit(request)
        job.point("after-commit")

    def is_durable(self, job: Job, *, deadline_seconds: float, wanted: Callable[[], bool]) -> bool:
        """Another rank: whether the save is a checkpoint; False if that is open at the deadline, or when nobody wants
        to know. Raises if it never will be one."""
        status = self._transport.save_status(job.handle.save, deadline_seconds=deadline_seconds, wanted=wanted)
        return _outcome(job, status)

    def call_off(self, job: Job, error: BaseException) -> None:
        """Rank 0: tell the other ranks, unless a younger incarnation tells them already."""
        if not isinstance(error, Fenced):
            request = AbortRequest(generation=job.generation, reason=describe(error)[:1000])
            self._transport.abort(job.handle.save, request)

    def tell_others(self, job: Job, error: BaseException) -> None:
        """A save failed before its commit was asked for: whoever waits for this rank's share in it should know."""
        if job.rank == 0:
            self.call_off(job, error)
        elif job.writers > 1 and not isinstance(error, Fenced):
            self.tell_failure(job, error)


def not_committed(job: Job) -> Unavailable:
    what = f"save of step {job.handle.step} ({job.handle.save})"
    return Unavailable(f"{what} was not committed within {job.deadline_seconds:.0f} s", save=job.handle.save)


def not_known(job: Job, error: Unavailable) -> OutcomeUnknown:
    """What is said of a commit that did not answer until the deadline, whatever its last error was."""
    unknown = OutcomeUnknown(
        f"it is not known whether the save of step {job.handle.step} is a checkpoint: {error.message}",
        save=job.handle.save,
    )
    unknown.__cause__ = error
    return unknown


def ending() -> bool:
    """Whether the program is at its end, so that nobody asks any more what became of a save."""
    return not threading.main_thread().is_alive()


def _outcome(job: Job, status: SaveStatus) -> bool:
    what = f"save of step {job.handle.step} ({status.save})"
    match status.status:
        case "aborted":
            raise Conflict(f"{what} was called off: {status.detail}", save=status.save, called_off=status.detail)
        case "fenced":
            raise Fenced(f"{what} came too late: {status.detail}", save=status.save)
        case "pending":
            return False
    return True


def _part(
    job: Job,
    *,
    payload_ref: ObjectRef | None = None,
    borrowed: tuple[Borrowed, ...] = (),
    error: str | None = None,
) -> Part:
    return Part(
        run=job.run,
        generation=job.generation,
        save=job.handle.save,
        step=job.handle.step,
        writer=job.rank,
        payload=payload_ref,
        borrowed=borrowed,
        form=job.form,
        shared=job.shared if error is None else None,
        per_rank=job.per_rank if error is None else None,
        error=error[:2000] if error is not None else None,
    )


def _put(storage: Storage, key: str, data: bytes) -> None:
    """Write a small object whose name no other content can have; a retry that finds it there is done."""

    def put() -> None:
        try:
            storage.put(key, [data], len(data))
        except AlreadyExists:
            if storage.get(key, len(data)) != data:
                raise
            storage.sync(key)  # an earlier try may have come no further than the name

    again(put, seconds=PUT_SECONDS, tries=WRITE_TRIES)
