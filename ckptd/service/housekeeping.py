"""Housekeeping: in the background every run is kept in order.

For each run in turn: readers that fell silent let go of what they held; retention verifies, retires and collects.
Several services may do it at once, and people beside them: the log orders them. An error costs this pass of this run
and nothing else; it is logged once, and `GET /v1/housekeeping` tells it.
"""

from __future__ import annotations

import logging
import random
import threading
from datetime import UTC, datetime

from ckptd.errors import CkptdError, Conflict, NotFound, Unavailable, describe
from ckptd.keeper import Keeper
from ckptd.manifest import Frozen
from ckptd.retaining import RetainAnswer, RetainRequest, retain
from ckptd.retention import Policy
from ckptd.service.holds import Holds
from ckptd.state import RunState
from ckptd.storage.root import refill_reserve

LOOK_AGAIN = 60  # so many passes later a run in which nothing happened is looked through again
MAX_BACKOFF = 16  # the pause between passes that fail grows to so many times the usual one
_log = logging.getLogger("ckptd.service")


class HousekeepingOfRun(Frozen):
    """Counts since the service started. `waiting` says why retention could not go on; `error` what failed last."""

    run: str
    released: int = 0
    verified: int = 0
    damaged: int = 0
    retired: int = 0
    purged: int = 0
    objects: int = 0
    waiting: str | None = None
    error: str | None = None


class HousekeepingInfo(Frozen):
    """`policy` is None if nothing is ever retired. `error` is about the storage as a whole."""

    policy: Policy | None
    interval_seconds: float
    passes: int = 0
    last_pass: str | None = None
    error: str | None = None
    runs: tuple[HousekeepingOfRun, ...] = ()


class Housekeeper:
    """One per service, on a thread of its own between `start` and `stop`. Tests call `pass_once` without it.

    Without a `policy` nothing is retired; what ended generations left behind is collected all the same.
    """

    def __init__(self, keeper: Keeper, holds: Holds, policy: Policy | None, *, interval_seconds: float) -> None:
        self._keeper = keeper
        self._holds = holds
        self._policy = policy
        self._interval_seconds = interval_seconds
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # of what `info` tells
        self._info = HousekeepingInfo(policy=policy, interval_seconds=interval_seconds)
        self._runs: dict[str, HousekeepingOfRun] = {}
        self._looked: dict[str, tuple[int, int]] = {}  # by run: its last slot at the last look, and that pass

    def start(self) -> None:
        threading.Thread(target=self._run, name="ckptd-housekeeping", daemon=True).start()

    def stop(self) -> None:
        """Ends it soon. Nobody waits for that: it may hang in a dead mount, and can be ended anywhere."""
        self._stopped.set()

    def info(self) -> HousekeepingInfo:
        """Any thread."""
        with self._lock:
            return self._info.model_copy(update={"runs": tuple(self._runs[run] for run in sorted(self._runs))})

    def pass_once(self) -> bool:
        """Go through all runs; False if the storage was not available for one of them. Raises nothing that a storage
        or a run can be the cause of."""
        number, names, error = self._info.passes + 1, list[str](), None
        try:
            names = self._keeper.ledger.runs()
            refill_reserve(self._keeper.ledger.storage)
        except CkptdError as caught:
            error = describe(caught)
        self._log_once("", self._info.error, error)
        available = error is None
        for run in names:
            if not self._stopped.is_set():
                available = self._pass_of(run, number) and available
        with self._lock:
            if error is None:
                self._runs = {run: told for run, told in self._runs.items() if run in names}
            told = {"passes": number, "last_pass": datetime.now(UTC).isoformat(timespec="seconds"), "error": error}
            self._info = self._info.model_copy(update=told)
        return available

    def _pass_of(self, run: str, number: int) -> bool:
        before = told = self._runs.get(run, HousekeepingOfRun(run=run))
        error: CkptdError | None = None
        try:
            told = self._keep(run, number, before)
        except NotFound as caught:
            _log.debug("run %s: %s", run, caught.message)  # no run yet, or somebody else was faster
        except CkptdError as caught:
            error = caught
        told = told.model_copy(update={"error": describe(error) if error is not None else None})
        self._log_once(f" of run {run}", before.error, told.error)
        with self._lock:
            self._runs[run] = told
        return not isinstance(error, Unavailable)

    def _keep(self, run: str, number: int, told: HousekeepingOfRun) -> HousekeepingOfRun:
        """One run. What was done before an error stays done; only the count of it is lost."""
        state = self._keeper.ledger.state(run)
        released = self._release_silent(run, state)
        seen, looked = self._looked.get(run, (0, 0))
        if not released and seen == state.seq and told.error is None and number < looked + LOOK_AGAIN:
            return told
        answer, waiting = self._retain(run)
        self._looked[run] = (state.seq, number)
        damaged = [verified for verified in answer.verified if verified.result != "whole"]
        for verified in damaged:
            _log.warning("run %s: step %d is %s: %s", run, verified.step, verified.result, verified.detail)
        if answer.retired or answer.objects:
            _log.info("run %s: %d retired, %d objects collected", run, len(answer.retired), answer.objects)
        return HousekeepingOfRun(
            run=run,
            released=told.released + released,
            verified=told.verified + len(answer.verified) - len(damaged),
            damaged=told.damaged + len(damaged),
            retired=told.retired + len(answer.retired),
            purged=told.purged + len(answer.purged),
            objects=told.objects + answer.objects,
            waiting=waiting,
        )

    def _release_silent(self, run: str, state: RunState) -> int:
        released = 0
        for save, who, turn in self._holds.silent(run, state):
            try:
                self._keeper.release_silent(run, save, who, turn)
            except Conflict as error:
                _log.info("run %s: the hold of %s ended or began anew: %s", run, who, error.message)
            else:
                _log.info("run %s: %s fell silent and lets go of %s", run, who, save)
                released += 1
        return released

    def _retain(self, run: str) -> tuple[RetainAnswer, str | None]:
        """What was done, and why the rest has to wait."""
        waiting = None
        if self._policy is not None:
            try:
                return retain(self._keeper, run, RetainRequest(**self._policy.model_dump()), self._watch), None
            except Conflict as error:
                waiting = error.message
        collected = self._keeper.collect(run)
        return RetainAnswer(decisions=(), purged=collected.purged, objects=collected.objects), waiting

    def _watch(self, count: int) -> None:
        if self._stopped.is_set():
            raise Unavailable("housekeeping ends", do="The next service goes on with it.")

    def _log_once(self, of: str, before: str | None, now: str | None) -> None:
        if now is not None and now != before:
            _log.warning("housekeeping%s failed, and is tried again: %s", of, now)
        elif now is None and before is not None:
            _log.info("housekeeping%s works again", of)

    def _run(self) -> None:
        pause = 1
        while not self._stopped.wait(self._interval_seconds * pause * random.uniform(0.5, 1.5)):
            try:
                available = self.pass_once()
            except Exception as fault:  # noqa: BLE001 - told; one run must not end it for the others
                _log.error("housekeeping met a fault of ckptd, and goes on with the next pass", exc_info=fault)
                with self._lock:
                    self._info = self._info.model_copy(update={"error": f"a fault of ckptd: {describe(fault)}"})
                available = False
            pause = 1 if available else min(pause * 2, MAX_BACKOFF)
