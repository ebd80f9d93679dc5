"""A save, from the captured bytes to the commit. All of it runs on background threads.

Without a spool one thread carries a save out from beginning to end, and the next one waits for it. With a spool that
thread only brings the bytes to safety: to the storage if that takes them, else to the local disk. The rest is the
uploader's, and the next save waits for nothing else than the host buffer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from ckptd.errors import Conflict, Invalid, SaveOff, Unavailable, describe
from ckptd.manifest import ObjectRef
from ckptd_client.course import Item
from ckptd_client.handle import SKIPPED, Job, SaveHandle, Tally
from ckptd_client.spool import Spool
from ckptd_client.steps import Steps, ending, not_committed, not_known
from ckptd_client.suspicion import WeightsWatch
from ckptd_client.unchanged import Unchanged
from ckptd_client.uploading import Uploader

log = logging.getLogger("ckptd")
WhenBusy = Literal["wait", "skip"]
RETRY_SECONDS = 1.0
SLACK_SECONDS = 60.0  # a save ends by its own deadline, and knows the reason: the caller waits that much longer


class _Capture:
    """The bytes of one save until they are safe. Whoever claims it says where to: the save thread when the storage
    took or refused them, or the training thread, which does not wait for a storage that does neither."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.safe = threading.Event()
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        return self._claimed.acquire(blocking=False)


class Saver:
    """`submit`, `make_room` and `settle` are for the training thread. `spool` is set before the first save."""

    def __init__(
        self, steps: Steps, unchanged: Unchanged, spool_saves: int, patience_seconds: float, when_busy: WhenBusy
    ) -> None:
        if spool_saves < 1:
            raise Invalid(f"spool_saves is {spool_saves!r}: expected at least 1", field="spool_saves")
        if when_busy not in ("wait", "skip"):
            raise Invalid(f"when_busy is {when_busy!r}: expected 'wait' or 'skip'", field="when_busy")
        self._when_busy = when_busy
        self.tally = Tally()
        self.watch = WeightsWatch()
        self.spool: Spool | None = None
        self._steps = steps
        self._unchanged = unchanged
        self._patience_seconds = patience_seconds
        self._uploader = Uploader(steps, self.tally, waiting=spool_saves, patience_seconds=patience_seconds)
        self._thread: threading.Thread | None = None
        self._last: SaveHandle | None = None
        self._open: list[SaveHandle] = []
        self._capture: _Capture | None = None

    def submit(self, job: Job, *, copying: bool = False) -> SaveHandle:
        """Copy what a save consists of, and start it; with `copying` it starts first, and writes what is there while
        the rest is being copied. An error of the copy is raised here; a save that has started fails of it, too. Call
        `make_room` before: one buffer is in use at a time."""
        if copying:
            self._start(job)
        try:
            if job.captured is not None:
                job.captured.fill()
        except BaseException:
            if copying:
                job.handle.join(job.deadline_seconds + SLACK_SECONDS)
                job.handle.told = True
            elif job.captured is not None:
                job.captured.release()
            raise
        if not copying:
            self._start(job)
        return job.handle

    def _start(self, job: Job) -> None:
        self.tally.begin()
        self._last = job.handle
        log.info("save of step %d queued (%s)", job.handle.step, job.handle.save)
        # No daemon, and of no pool: the interpreter ends the main thread first and then waits for this one, which
        # thus can tell that nobody asks any more.
        if self.spool is None:
            self._thread = threading.Thread(target=self._run, args=(job,), name="ckptd-save")
        else:
            self._open.append(job.handle)
            self._capture = _Capture(job)
            self._thread = threading.Thread(target=self._secure, args=(self._capture,), name="ckptd-save")
        self._thread.start()

    @property
    def skips(self) -> bool:
        """Whether the next save is to be skipped: `make_room` would wait, and that is not wanted."""
        if self._when_busy == "wait":
            return False
        if self.spool is None:
            return self._last is not None and self._last.status == "queued"
        return self._capture is not None and not self._capture.safe.is_set()

    def skip(self, job: Job) -> None:
        """This rank does not make this save. Whoever waits for its share in it, or its commit, is told at once."""
        error = SaveOff(f"save of step {job.handle.step} {SKIPPED}", save=job.handle.save)
        self.tally.begin()
        job.handle.finish(error)
        log.info("%s (%s)", error.message, job.handle.save)
        if job.world > 1 and (job.rank == 0 or job.writers > 1):
            self._uploader.owe(job, error)

    def make_room(self, deadline_seconds: float) -> None:
        """Wait until the next save may be captured, and raise what the caller has to know before.

        Without a spool that is the outcome of the save before. With one, its bytes are safe somewhere: at the latest
        when the patience with the storage is over, counted from that save's own start, and the local disk has them.
        """
        if self.spool is None:
            self._settle_last(deadline_seconds)
            return
        capture = self._capture
        if capture is not None:
            patience = capture.job.started_at + self._patience_seconds - time.monotonic()
            if not capture.safe.wait(max(0.0, patience)) and capture.claim():
                log.warning("save of step %d: the storage does not take it in time", capture.job.handle.step)
                self._hand_over(capture, None, None)
            if not capture.safe.wait(deadline_seconds):
                raise Unavailable(
                    f"the local disk did not take the save of step {capture.job.handle.step} within"
                    f" {deadline_seconds:.0f} s",
                    do=f"Look at the disk that {self.spool.folder} is on.",
                )
        self._raise_what_is_final()

    def settle(self, deadline_seconds: float) -> None:
        """Wait until everything is durable, and raise what made it fail unless the caller knows already."""
        if self.spool is None:
            self._settle_last(deadline_seconds)
            self._uploader.flush()
            return
        give_up_at = time.monotonic() + deadline_seconds
        late = [handle for handle in self._open if not handle.join(max(0.0, give_up_at - time.monotonic()))]
        self._raise_what_is_final()
        if late:
            steps = [handle.step for handle in late]
            raise Unavailable(
                f"the saves of steps {steps} are not durable after {deadline_seconds:.0f} s; durable is step"
                f" {self.tally.durable_step}",
                do="Bring the storage back; a later start resumes from what is durable.",
                steps=steps,
            )
        self._settle_last(0.0)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(None if self.spool is None else SLACK_SECONDS)
        self._uploader.flush()
        self._uploader.close()

    def _settle_last(self, deadline_seconds: float) -> None:
        if self._last is not None and not self._last.told:
            self._last.wait(deadline_seconds + SLACK_SECONDS)

    def _raise_what_is_final(self) -> None:
        """With a spool an outage is no error: it is counted and logged. What no waiting mends is raised, once, or
        each time if a younger incarnation has taken over."""
        if self._uploader.fenced is not None:
            raise self._uploader.fenced
        ended = [handle for handle in self._open if handle.over]
        self._open = [handle for handle in self._open if handle not in ended]
        for handle in ended:
            if handle.error is not None and not handle.told and _is_final(handle):
                handle.told = True
                raise handle.error

    # With a spool.

    def _secure(self, capture: _Capture) -> None:
        """On the save thread: to the storage, if that is there; else the spool."""
        payload: ObjectRef | None = None
        failure: BaseException | None = None
        job = capture.job
        try:
            if job.captured is not None and not self._uploader.away:
                payload = self._steps.write_payload(job, seconds=self._patience_seconds)
        except Unavailable as error:
            log.warning("save of step %d goes to the spool: %s", job.handle.step, describe(error))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's next call
            failure = error
        if capture.claim():
            self._hand_over(capture, payload, failure)
        else:
            what = describe(failure) if failure is not None else "done" if payload else "not done"
            log.info("save of step %d: the write that took too long was not used (%s)", job.handle.step, what)

    def _hand_over(self, capture: _Capture, payload: ObjectRef | None, failure: BaseException | None) -> None:
        """The claimed bytes are made safe, the buffer is let go, the uploader has the rest."""
        job, spool = capture.job, self.spool
        assert spool is not None
        item = Item(job, payload=payload)
        try:
            if failure is not None:
                raise failure
            self.watch.look(job.captured, job.weights, job.handle.step, job.handle.warnings)
            if job.captured is not None and payload is None:
                item.file = spool.write(job.handle.save, job.captured)
                job.handle.spooled = True
                self.tally.spool()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's next call
            failure = error
        if job.captured is not None:
            job.captured.release()
        if failure is None:
            self._uploader.add(item)
        else:
            job.handle.finish(failure)
            log.warning("save of step %d failed: %s %s", job.handle.step, describe(failure), self.tally.counts)
            self._uploader.owe(job, failure)
        capture.safe.set()

    # Without a spool.

    def _run(self, job: Job) -> None:
        """On the save thread: every outcome ends up in the handle. Of a failure the caller learns at once, and the
        others as soon as the storage takes the word: the same fault may have the storage silent for a while."""
        error: BaseException | None = None
        doubt: tuple[Item, Unavailable] | None = None
        shared_work = True  # whether others wait for this rank's share in it
        try:
            self._bring(job)
            shared_work = job.rank == 0
            doubt = self._conclude(job)
        except BaseException as caught:  # noqa: BLE001 - handed to the caller's next call
            error = caught
        if job.captured is not None:
            job.captured.release()  # before the outcome is known: who learns of it may save again at once
        if doubt is not None:
            self._uploader.ask_on(*doubt)
            return
        if error is None:
            log.info("save of step %d durable (%s)", job.handle.step, job.handle.save)
        else:
            log.error("save of step %d failed: %s", job.handle.step, describe(error))
            if shared_work:
                self._uploader.owe(job, error)
        job.handle.finish(error)

    def _bring(self, job: Job) -> None:
        """Payload, then the part manifest that says it is whole."""
        if job.captured is None:
            return
        look = self._unchanged.look(job.handle.save, job.captured)
        ref = self._steps.write_payload(job, seconds=job.left_seconds, count=look.count)
        self._steps.put_part(job, ref, look.borrowed)
        self._unchanged.wrote(look, ref, job.captured, lambda: job.handle.became_durable)
        if job.rank == 0:
            self.watch.look(job.captured, job.weights, job.handle.step, job.handle.warnings)

    def _conclude(self, job: Job) -> tuple[Item, Unavailable] | None:
        """None when it is durable; what is left to be asked if that is not known at the deadline."""
        if job.rank != 0:
            if self._steps.is_durable(job, deadline_seconds=job.left_seconds, wanted=lambda: not ending()):
                return None
            return Item(job), not_committed(job)
        found, missing = self._steps.find_parts(job, deadline_seconds=job.left_seconds)
        if missing:
            raise self._steps.missing(job, missing)
        ref = self._steps.write_manifest(job, found)
        self._insist(job, self._steps.declare_ready)
        job.point("before-commit")
        try:
            self._insist(job, lambda: self._steps.commit(job, ref))
        except Unavailable as error:
            return Item(job, manifest=ref), not_known(job, error)
        return None

    def _insist(self, job: Job, call: Callable[[], None]) -> None:
        """Repeat while the outcome is open and there is time: the call recognises its own earlier write."""
        while True:
            try:
                return call()
            except Unavailable:
                if job.left_seconds == 0.0:
                    raise
            time.sleep(min(RETRY_SECONDS, job.left_seconds))


def _is_final(handle: SaveHandle) -> bool:
    """Whether the caller has to do something about it. A save that others called off, or newer ones took the place
    of, costs a checkpoint and no more."""
    error = handle.error
    called_off = isinstance(error, Conflict) and "called_off" in error.fields
    return not (isinstance(error, Unavailable) or handle.superseded or called_off)
