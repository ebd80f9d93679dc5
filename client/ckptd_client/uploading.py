"""What is still to be done for saves of which training need not know: one thread, first in, first out.

With a spool, every save ends here: its bytes lie in the spool or on the storage already, and the thread brings them
to the storage, writes the part manifest and, on rank 0, waits for the other parts and commits. While the storage is
away the first save is tried again and again, and the others wait behind it. With or without a spool, a commit whose
outcome is unknown is asked for again until it is known; later saves go on meanwhile, for the log orders them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from ckptd.errors import CkptdError, Conflict, Fenced, SaveOff, Unavailable, describe
from ckptd_client.course import Course, Item
from ckptd_client.handle import Job, Tally
from ckptd_client.steps import SUPERSEDED, Steps, ending, not_committed, not_known

log = logging.getLogger("ckptd")
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.05, 5.0
JOIN_SECONDS = 60.0
MAX_ASKED = 16  # saves of which the outcome is asked for at the same time; of older ones it stays unknown


class Uploader:
    """`add`, `ask_on` and `owe` come from the save thread or the training thread; the rest happens on its own
    thread, which lives while there is something to do. At most `waiting` saves wait, besides one that is moving."""

    def __init__(self, steps: Steps, tally: Tally, *, waiting: int, patience_seconds: float) -> None:
        self._steps, self._tally = steps, tally
        self._waiting, self._patience_seconds = waiting, patience_seconds
        self._changed = threading.Condition()
        self._course = Course(steps, self._changed)
        self._items: list[Item] = []
        self._owed: deque[tuple[Job, BaseException]] = deque(maxlen=waiting + 2)  # what anybody can still wait for
        self._thread: threading.Thread | None = None
        self._closing = self._news = False
        self._ends_at: float | None = None
        self._current: Item | None = None
        self.fenced: Fenced | None = None

    @property
    def away(self) -> bool:
        """Whether bytes wait in the spool, or the storage did not answer last: then new bytes go there, too."""
        with self._changed:
            return self._course.failing or any(item.file is not None for item in self._items)

    def add(self, item: Item) -> None:
        """The next save. If too many wait, the one that waits longest is given up: newer ones are worth more."""
        victim: Item | None = None
        with self._changed:
            if item.file is not None:
                item.file.moved = self._course.taking
            self._items.append(item)
            waiting = [i for i in self._items if i.asked_at is None and not self._is_moving(i)]
            if len(waiting) > self._waiting:
                victim = waiting[0]
                victim.given_up = self._superseded(victim, item)
                self._items.remove(victim)
            self._wake()
        if victim is not None and victim.given_up is not None:
            self._end(victim, victim.given_up, superseded=True)

    def ask_on(self, item: Item, error: Unavailable) -> None:
        """The deadline of a save passed, and its outcome is open."""
        with self._changed:
            item.asked_at = item.asked_at or time.monotonic()
            self._items.append(item)
            if not ending():
                self._wake()
        self._doubt(item, error)

    def owe(self, job: Job, error: BaseException) -> None:
        """Others have to be told that this rank gave a save up, once the storage takes it."""
        with self._changed:
            self._owed.append((job, error))
            self._wake()

    def flush(self) -> None:
        """Wait until the others were told what they have to be told, for as long as one is patient."""
        give_up_at = time.monotonic() + self._patience_seconds
        with self._changed:
            while self._owed and time.monotonic() < give_up_at:
                self._changed.wait(max(0.0, give_up_at - time.monotonic()))

    def close(self) -> None:
        """Stop. What is not durable yet will not be; what is unknown stays unknown."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(JOIN_SECONDS)
        self._drop_all()

    # On its own thread.

    def _wake(self) -> None:
        """With the lock held."""
        self._news = True
        self._changed.notify_all()
        if self._thread is None and not self._closing:
            # No daemon: at the program's end the interpreter waits for it, so what is spooled still gets home.
            self._thread = threading.Thread(target=self._run, name="ckptd-upload")
            self._thread.start()

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            with self._changed:
                self._let_go_at_the_end()
                if self._closing or not (self._items or self._owed):
                    self._thread = None
                    break
                self._news = False
            self._tell_others()
            self._go_through()
            with self._changed:
                if not self._news:
                    self._changed.wait(pause)
                pause = min(2 * pause, LAST_PAUSE_SECONDS) if self._course.failing else FIRST_PAUSE_SECONDS
        self._drop_all(only_if_ending=True)

    def _go_through(self) -> None:
        """Bring each save as far as it comes. One that waits for the storage or for parts holds those behind it up;
        one whose outcome is asked for does not."""
        with self._changed:
            items = list(self._items)
        for item in items:
            with self._changed:
                if self._closing or item.given_up is not None:
                    continue
                self._current, alone = item, len(items) == 1
                self._course.move()
            try:
                over = self._course.advance(item, self._alone if alone else _never)
            except SaveOff as error:
                self._fail(item, error)
            except Unavailable as error:
                self._course.failing, item.answered_at = True, None
                if item.asked_at is None:
                    log.info("save of step %d waits for the storage: %s", item.job.handle.step, describe(error))
                    return
                if item.late:
                    self._doubt(item, not_known(item.job, error))
            except BaseException as error:  # noqa: BLE001 - handed to the caller's next call
                self._fail(item, error)
            else:
                if over:
                    self._succeed(item)
                elif item.asked_at is None:
                    return
                elif item.late:
                    self._doubt(item, not_committed(item.job))
            finally:
                with self._changed:
                    self._current = None

    def _alone(self) -> bool:
        """Whether there is still nothing else to do than to wait."""
        return not (self._news or ending())

    def _is_moving(self, item: Item) -> bool:
        """Whether this save is on its way at this moment. To give it up would waste what was done, each time anew."""
        recent = time.monotonic() - self._course.moved_at < self._patience_seconds
        return item is self._current and recent and not self._course.failing and item.answered_at is None

    # How a save ends.

    def _succeed(self, item: Item) -> None:
        handle = item.job.handle
        after_all = " after all" if handle.status == "unknown" else ""
        self._remove(item)
        if not handle.over:  # told before whoever waits for it goes on
            log.info("save of step %d durable%s (%s)", handle.step, after_all, handle.save)
        handle.finish()

    def _fail(self, item: Item, error: BaseException) -> None:
        self._remove(item)
        if isinstance(error, Fenced):
            self.fenced = error
            self._end(item, error)
            self._drop_all(error)  # but for those that may have been committed before: they are asked for
            return
        newest, detail = self._tally.durable_step, ""
        if isinstance(error, Conflict):
            detail = str(error.fields.get("called_off", ""))
        overtaken = isinstance(error, Conflict) and newest is not None and item.job.handle.step < newest
        self._end(item, error, superseded=overtaken or SUPERSEDED in detail)

    def _end(self, item: Item, error: BaseException, *, superseded: bool = False) -> None:
        """A save that failed: its file goes, its handle tells, and the others will be told."""
        handle = item.job.handle
        if item.file is not None:
            item.file.refusal = error if isinstance(error, Exception) else None
            item.file.remove()
        if not handle.finish(error, superseded=superseded):
            return
        level = logging.WARNING if isinstance(error, Unavailable) or superseded else logging.ERROR
        log.log(level, "save of step %d failed: %s %s", handle.step, describe(error), self._tally.counts)
        if not isinstance(error, Fenced) and not (item.job.rank != 0 and item.asked_at is not None):
            self.owe(item.job, error)

    def _superseded(self, victim: Item, newer: Item) -> SaveOff:
        step, count = victim.job.handle.step, self._waiting
        return SaveOff(
            f"save of step {step} is {SUPERSEDED}: the storage is away, at most {count} saves wait, and step"
            f" {newer.job.handle.step} came",
            save=victim.job.handle.save,
        )

    def _doubt(self, item: Item, error: Unavailable) -> None:
        handle = item.job.handle
        if handle.status == "queued":
            log.log(
                logging.INFO if ending() else logging.ERROR,
                "save of step %d: its outcome is unknown and asked for again: %s", handle.step, describe(error),
            )  # fmt: skip
        handle.doubt(error)
        with self._changed:
            unknown = [i for i in self._items if i.job.handle.status == "unknown"]
            dropped = unknown[:-MAX_ASKED]
        for old in dropped:
            self._remove(old)
            old.job.handle.leave_open(error)

    def _remove(self, item: Item) -> None:
        with self._changed:
            if item in self._items:
                self._items.remove(item)
            self._changed.notify_all()

    def _tell_others(self) -> None:
        with self._changed:
            owed = list(self._owed)
        for job, error in owed:
            try:
                self._steps.tell_others(job, error)
            except Unavailable as second:
                self._course.failing = True
                log.info("save of step %d cannot be called off yet: %s", job.handle.step, describe(second))
                return
            except CkptdError as second:
                log.info("save of step %d was not called off: %s", job.handle.step, describe(second))
            with self._changed:
                if (job, error) in self._owed:
                    self._owed.remove((job, error))
                self._changed.notify_all()

    def _let_go_at_the_end(self) -> None:
        """With the lock held. When the program has ended, what was saved is still brought home, until its deadline,
        and the others are told what they have to be told; nobody asks what became of it."""
        if not ending():
            return
        now = time.monotonic()
        owing = self._patience_seconds if self._owed else 0.0
        last = max([owing, *(item.job.deadline_seconds for item in self._items)])
        self._ends_at = self._ends_at or now + last
        only_asked = all(item.job.rank != 0 and item.asked_at is not None for item in self._items)
        if (only_asked and not self._owed) or now >= self._ends_at:
            self._closing = True

    def _drop_all(self, error: CkptdError | None = None, *, only_if_ending: bool = False) -> None:
        """Nothing of what is here will be done."""
        if only_if_ending and not self._closing:
            return
        with self._changed:
            items = [item for item in self._items if error is None or item.asked_at is None]
            self._items = [item for item in self._items if item not in items]
            self._owed.clear()
            for item in items:
                item.given_up = error or SaveOff("the client was closed", save=item.job.handle.save)
            self._changed.notify_all()
        for item in items:
            assert item.given_up is not None
            if item.asked_at is not None:
                item.job.handle.leave_open(item.given_up)
            else:
                self._end(item, item.given_up)


def _never() -> bool:
    return False
