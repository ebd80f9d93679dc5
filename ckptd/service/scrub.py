"""Scrubbing: committed bytes are read again and again, slowly, so that damage is found while there are others.

On a thread of its own, as one checkpoint may take hours. What is read whole is `checkpoint-verified`; damage goes the
way of all damage, to a second reading.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime

from ckptd import layout
from ckptd.encoding import MAX_RECORD_BYTES, decode
from ckptd.errors import CkptdError, Conflict, Invalid, NotFound, describe
from ckptd.keeper import Keeper
from ckptd.lineage import is_valid
from ckptd.manifest import Frozen
from ckptd.retaining import verify
from ckptd.state import Checkpoint, RunState
from ckptd.watched import Pace
from ckptd.wire import VerifyAnswer

_log = logging.getLogger("ckptd.service")


class ScrubInfo(Frozen):
    """Counts since the service started. `reading` is the save that is read now."""

    mib_per_second: float
    again_seconds: float
    reading: str | None = None
    whole: int = 0
    damaged: int = 0
    read_bytes: int = 0
    error: str | None = None


class Scrubber:
    """One per service, on a thread of its own between `start` and `stop`. Tests call `scrub_once` without it.

    A checkpoint is read again once its last verification is `again_seconds` old, by the time in that record: a choice
    of what to do, and no verdict, may read a clock. `wait` sleeps and says whether to end; `now` is the time of day.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        mib_per_second: float,
        again_seconds: float,
        idle_seconds: float,
        wait: Callable[[float], bool] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._keeper = keeper
        self._again_seconds = again_seconds
        self._idle_seconds = idle_seconds
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._now = now
        self._pace = Pace(mib_per_second * 2**20, self._wait)
        self._lock = threading.Lock()  # of what `info` tells
        self._info = ScrubInfo(mib_per_second=mib_per_second, again_seconds=again_seconds)
        self._tried: dict[tuple[str, str], float] = {}  # when a reading began that ended in no record
        self._last_run = ""

    def start(self) -> None:
        threading.Thread(target=self._run, name="ckptd-scrub", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def info(self) -> ScrubInfo:
        """Any thread."""
        with self._lock:
            return self._info

    def scrub_once(self) -> VerifyAnswer | None:
        """Read one checkpoint; None if none is due. The runs take turns, so that none waits for a larger one."""
        runs = self._keeper.ledger.runs()
        for run in [*(r for r in runs if r > self._last_run), *(r for r in runs if r <= self._last_run)]:
            checkpoint = self._due(run)
            if checkpoint is not None:
                self._last_run = run
                return self._scrub(run, checkpoint)
        return None

    def _scrub(self, run: str, checkpoint: Checkpoint) -> VerifyAnswer | None:
        """None if it was retired, or given up, while it was read."""
        began, answer = self._now(), None
        self._tell(reading=checkpoint.save)
        try:
            answer = verify(self._keeper, run, checkpoint.step, checkpoint.save, self._watch)
        except (Conflict, Invalid, NotFound) as error:
            _log.debug("scrubbing of %s of run %s came to nothing: %s", checkpoint.save, run, error.message)
        finally:
            self._tell(reading=None)
        if answer is None or not answer.recorded:
            self._tried[run, checkpoint.save] = began
        if answer is not None and answer.result == "whole":
            self._tell(whole=self._info.whole + 1)
        elif answer is not None:
            self._tell(damaged=self._info.damaged + 1)
            _log.warning("run %s: step %d is %s: %s", run, answer.step, answer.result, answer.detail)
        return answer

    def _due(self, run: str) -> Checkpoint | None:
        """Of a run that can be read, the checkpoint that was not verified for the longest time, if that is long; of
        those that never were, the newest."""
        try:
            state = self._keeper.ledger.state(run)
        except CkptdError as error:
            _log.debug("scrubbing passes over run %s: %s", run, error.message)  # housekeeping tells of it
            return None
        since = self._now() - self._again_seconds
        untried = [
            c
            for c in reversed(state.checkpoints.values())
            if is_valid(state, c.save) and self._tried.get((run, c.save), float("-inf")) <= since
        ]
        oldest = min(untried, key=lambda c: state.verified.get(c.save, 0), default=None)
        return oldest if oldest is not None and self._last_read(run, state, oldest.save) <= since else None

    def _last_read(self, run: str, state: RunState, save: str) -> float:
        """When the log says it was verified last, in seconds of the time of day; long ago if never."""
        slot = state.verified.get(save)
        if slot is None:
            return float("-inf")
        key = layout.log_key(run, slot)
        said = decode(self._keeper.ledger.storage.get(key, MAX_RECORD_BYTES), key=key, seq=slot).time
        try:
            return datetime.fromisoformat(said).timestamp()
        except ValueError:
            return float("-inf")  # the time is for people, and this one is none

    def _watch(self, count: int) -> None:
        self._tell(read_bytes=self._info.read_bytes + count)
        self._pace(count)

    def _tell(self, **changes: object) -> None:
        with self._lock:
            self._info = self._info.model_copy(update=changes)

    def _run(self) -> None:
        done: VerifyAnswer | None = None
        while not self._wait(0.0 if done is not None else self._idle_seconds):
            done, error = None, None
            try:
                done = self.scrub_once()
            except CkptdError as caught:
                error = describe(caught)
            except Exception as fault:  # noqa: BLE001 - told, and tried again
                error = f"a fault of ckptd: {describe(fault)}"
                _log.error("scrubbing met a fault of ckptd, and goes on", exc_info=fault)
            if error is not None and error != self._info.error and not self._stopped.is_set():
                _log.warning("scrubbing failed, and is tried again: %s", error)
            self._tell(error=error)
