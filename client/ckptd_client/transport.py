"""The client's way to the ledger: through the service, or straight on the storage.

With a storage URL the client runs the protocol itself. With a service URL it asks the service, and when that does
not answer for `patience_seconds` it goes to the storage directly (unless `direct` is off): the log orders both, so
going around the service is always safe. Every call is idempotent; `Unavailable` means: not now.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ckptd import layout
from ckptd.errors import Invalid, NotInitialised, Unavailable, Unreachable, describe
from ckptd.ledger import Ledger
from ckptd.storage import open_storage
from ckptd.storage.base import Storage
from ckptd.storage.probe import refuse_unfit
from ckptd.wire import (
    AbortRequest,
    Answer,
    BeginRequest,
    CommitRequest,
    DamageAnswer,
    DamageReport,
    Heartbeat,
    HeartbeatAnswer,
    OpenRequest,
    PartReport,
    PartsAnswer,
    ReadyRequest,
    SaveStatus,
    StorageInfo,
)
from ckptd_client.patience import again
from ckptd_client.service import Service

log = logging.getLogger("ckptd")
T = TypeVar("T")

HINT_SECONDS = 5.0
FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 2.0, 8.0
DAMAGE_SECONDS = 3600.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.02, 1.0


class Transport:
    """Callable from any thread. `url` is a service's or a storage's; `storage_url` is where this machine sees the
    service's storage, if that differs from what the service calls it. With `probing` the storage is tried when it is
    first used, and `Unfit` if it cannot carry a run: rank 0 does that for all."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        token: str | None = None,
        storage_url: str | None = None,
        direct: bool = True,
        patience_seconds: float = 5.0,
        probing: bool = False,
    ) -> None:
        self.run = layout.check_run(run)
        self._direct = direct
        self._patience_seconds = patience_seconds
        self._probing = probing
        self._storage_url = storage_url
        self._ledger: Ledger | None = None
        self._lock = threading.Lock()
        self._service: Service | None = None
        self._down = False
        if url.startswith(("http://", "https://")):
            self._service = Service(url, token)
        elif not url:
            raise Invalid("the URL is empty: expected that of a service or of a storage", field="url")
        else:
            self._storage_url = url

    @property
    def storage(self) -> Storage:
        return self.ledger.storage

    @property
    def ledger(self) -> Ledger:
        """The ledger on the storage as this machine sees it. `NotInitialised` if that is another storage than the
        service's: on this machine the drive is not mounted."""
        with self._lock:
            if self._ledger is None:
                self._ledger = self._open_ledger()
            return self._ledger

    def _open_ledger(self) -> Ledger:
        url, info = self._storage_url, None
        if self._service is not None:
            service = self._service
            try:
                info = self._retrying(lambda: service.get(StorageInfo, "/v1/storage"))
            except Unavailable as error:
                if url is None:
                    raise Unreachable(
                        f"the service {service.url} does not answer, and where its storage lies is not known:"
                        f" {error.message}",
                        do="Start the service, or set CKPTD_STORAGE (storage=) so that the client can do without it.",
                    ) from error
        ledger = Ledger(open_storage(url or _known(info).url))
        if info is not None and info.uuid != ledger.uuid:
            raise NotInitialised(
                f"{ledger.storage.url} is storage {ledger.uuid} here, the service's is {info.uuid}",
                do="Mount the service's storage on this machine, or name where it is mounted with CKPTD_STORAGE.",
            )
        if self._probing:
            refuse_unfit(ledger.storage)
        return ledger

    def open(self, request: OpenRequest) -> None:
        self._do(
            lambda service: service.tell(self._path("/attempts"), request),
            lambda ledger: ledger.open(self.run, request),
        )

    def begin(self, request: BeginRequest) -> Answer:
        return self._do(
            lambda service: service.ask(Answer, self._path("/generations"), request),
            lambda ledger: ledger.begin(self.run, request),
        )

    def join(self, attempt: str, fallback_of: int | None, *, deadline_seconds: float) -> Answer:
        """Wait for the answer of this attempt. `Unreachable` past the deadline."""
        path = self._path(f"/attempts/{attempt}/answer")
        params = {"fallback_of": fallback_of} if fallback_of is not None else {}
        answer = self._until(
            deadline_seconds,
            lambda service, wait: service.get_if_any(Answer, path, {**params, "wait_seconds": wait}),
            lambda ledger: ledger.join(self.run, attempt, fallback_of),
            lambda answer: answer is not None,
        )
        if answer is None:
            raise Unreachable(
                f"run {self.run}: rank 0 did not begin within {deadline_seconds:.0f} s", run=self.run, attempt=attempt
            )
        return answer

    def ready(self, attempt: str, generation: int) -> None:
        request = ReadyRequest(attempt=attempt)
        self._do(
            lambda service: service.tell(self._path(f"/generations/{generation}/ready"), request),
            lambda ledger: ledger.ready(self.run, attempt, generation),
        )

    def report_part(self, save: str, writer: int) -> None:
        """Tell the service that a part lies in storage. Only a hint: without a service there is nobody to tell."""
        if self._service is not None:
            path = self._path(f"/saves/{save}/parts")
            try:
                self._service.tell(path, PartReport(writer=writer), timeout_seconds=HINT_SECONDS)
            except Unavailable as error:
                log.info("part of save %s was not announced, it will be found by listing: %s", save, describe(error))

    def parts(self, save: str, writers: int, *, deadline_seconds: float) -> PartsAnswer:
        """Wait for the parts of `writers` writers; those that are there at the deadline."""
        path = self._path(f"/saves/{save}/parts")
        return self._until(
            deadline_seconds,
            lambda service, wait: service.get(PartsAnswer, path, {"writers": writers, "wait_seconds": wait}),
            lambda ledger: ledger.parts(self.run, save),
            lambda answer: all(str(writer) in answer.parts for writer in range(writers)),
        )

    def commit(self, request: CommitRequest) -> None:
        def over_http(service: Service) -> None:
            service.ask(SaveStatus, self._path(f"/saves/{request.save}/commit"), request)

        self._do(over_http, lambda ledger: ledger.commit(self.run, request))

    def abort(self, save: str, request: AbortRequest) -> None:
        self._do(
            lambda service: service.tell(self._path(f"/saves/{save}/abort"), request),
            lambda ledger: ledger.abort(self.run, save, request),
        )

    def save_status(
        self, save: str, *, deadline_seconds: float, wanted: Callable[[], bool] = lambda: True
    ) -> SaveStatus:
        """Wait until a save is no longer pending, the deadline passes, or nobody wants to know any more."""
        return self._until(
            deadline_seconds,
            lambda service, wait: service.get(SaveStatus, self._path(f"/saves/{save}"), {"wait_seconds": wait}),
            lambda ledger: ledger.save_status(self.run, save),
            lambda status: status.status != "pending" or not wanted(),
        )

    def report_damage(self, report: DamageReport) -> DamageAnswer:
        return self._do(
            lambda service: service.ask(DamageAnswer, self._path("/damage"), report, timeout_seconds=DAMAGE_SECONDS),
            lambda ledger: ledger.report_damage(self.run, report),
        )

    def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer | None:
        """None without a service: then nobody listens."""
        if self._service is None:
            return None
        return self._service.ask(HeartbeatAnswer, self._path("/heartbeat"), beat, timeout_seconds=HINT_SECONDS)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    # How.

    def _do(self, over_http: Callable[[Service], T], directly: Callable[[Ledger], T]) -> T:
        service = self._service
        if service is None:
            return directly(self.ledger)
        try:
            return self._retrying(lambda: over_http(service))
        except Unavailable as error:
            if not self._direct:
                raise
            if not self._down:
                log.warning("service %s: %s; going to the storage directly", service.url, error.message)
                self._down = True
            try:
                return directly(self.ledger)
            except Unavailable as second:
                second.add_note(f"the service had failed before: {error.message}")
                raise

    def _until(
        self,
        deadline_seconds: float,
        over_http: Callable[[Service, float], T],
        directly: Callable[[Ledger], T],
        enough: Callable[[T], bool],
    ) -> T:
        """Ask again and again until the answer is enough or the deadline passes; then the last answer. Outages are
        waited out as long as there is time; a drive that is not mounted is none."""
        give_up_at = time.monotonic() + deadline_seconds
        pause, wait = FIRST_PAUSE_SECONDS, FIRST_POLL_SECONDS
        while True:
            asked_at = time.monotonic()
            left = max(give_up_at - asked_at, 0.0)
            poll = functools.partial(_with_wait, over_http, min(left, wait))
            try:
                answer = self._do(poll, directly)
                if enough(answer) or left == 0.0:
                    return answer
            except Unavailable as error:
                if left == 0.0 or isinstance(error, NotInitialised):
                    raise
            # A long poll has waited already; a look at the storage has not.
            time.sleep(min(left, max(0.0, pause - (time.monotonic() - asked_at))))
            pause = min(pause * 1.5, LAST_PAUSE_SECONDS) * _jitter()
            wait = min(wait * 1.5, LAST_POLL_SECONDS) * _jitter()

    def _retrying(self, call: Callable[[], T]) -> T:
        """Patient with a service that fails for the first time; one that is known to be down is tried once."""
        result = again(call, seconds=self._patience_seconds, tries=1 if self._down else None)
        self._down = False
        return result

    def _path(self, tail: str) -> str:
        return f"/v1/runs/{self.run}{tail}"


def _jitter() -> float:
    """Ranks that began to wait together need not ask together ever after."""
    return random.uniform(0.8, 1.0)


def _with_wait(ask: Callable[[Service, float], T], wait_seconds: float, service: Service) -> T:
    return ask(service, wait_seconds)


def _known(value: T | None) -> T:
    if value is None:
        raise AssertionError("a value that must be known here is not")
    return value
