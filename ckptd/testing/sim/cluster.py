"""What the actors of a simulated cluster share: the drive, the clock, and the real ledger put on both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ckptd.errors import CkptdError, Conflict, Fenced, NotInitialised, Unavailable, Unreachable
from ckptd.ledger import Ledger
from ckptd.log import Build, RunLog
from ckptd.manifest import ManifestRef, ObjectRef
from ckptd.records import Observer
from ckptd.second import Reading, read_here
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.testing.sim.baton import Baton, BatonLock, Process
from ckptd.testing.sim.drive import Drive
from ckptd.testing.sim.truth import RUN, Truth

T = TypeVar("T")
PATIENCE_SECONDS, REQUEST_SECONDS = 2.0, 10.0
FIRST_SECONDS, LAST_SECONDS = 0.1, 2.0


@dataclass(frozen=True)
class Manners:
    """How patient this seed's actors are, in seconds, and how many there are of each."""

    append_seconds: float
    start_seconds: float
    save_seconds: float
    max_world: int
    max_jobs: int
    services: int
    keepers: int
    keep_last: int
    keep_every: int | None
    snapshot_records: int


def draw_manners(rng: random.Random) -> Manners:
    return Manners(
        append_seconds=rng.choice((0.5, 3.0, 30.0)),
        start_seconds=rng.choice((5.0, 20.0, 60.0)),
        save_seconds=rng.choice((3.0, 10.0, 30.0)),
        max_world=rng.choice((1, 2, 3)),
        max_jobs=rng.choice((1, 2, 3)),
        services=rng.choice((0, 1, 2)),
        keepers=rng.choice((1, 1, 2)),
        keep_last=rng.choice((2, 2, 3, 4)),
        keep_every=rng.choice((None, None, 4, 10)),
        snapshot_records=rng.choice((1, 5, 20, 1000)),
    )


class Cluster:
    """One per seed."""

    def __init__(self, baton: Baton, rng: random.Random, drive: Drive, truth: Truth, manners: Manners) -> None:
        self.baton, self.rng, self.drive, self.truth, self.manners = baton, rng, drive, truth, manners
        self.services: list[Service] = []
        self.outcomes: Counter[str] = Counter()
        self._readers = 0

    def second_reader(self, storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
        """Another process, with a view of the storage of its own. The reading itself is real."""
        self._readers += 1
        name = f"reader {self._readers}"
        reading = read_here(self.drive.view(Process(name, mortal=False)), ref)
        return Reading(reader=Observer(host="another", process=name), damage=reading.damage)

    def again(self, call: Callable[[], T], *, seconds: float, tries: int | None = None) -> T:
        """As `ckptd_client.patience.again`, in virtual time."""
        give_up_at, pause, done = self.baton.now + seconds, FIRST_SECONDS, 0
        while True:
            done += 1
            try:
                return call()
            except NotInitialised:
                raise
            except Unavailable:
                if done == tries or self.baton.now + pause > give_up_at:
                    raise
            self.baton.pause(pause * (1 + self.rng.random()))
            pause = min(2 * pause, LAST_SECONDS)

    def patiently(self, call: Callable[[], T], seconds: float) -> T:
        """As `ckptd_client.patience.patiently`, in virtual time."""
        try:
            return self.again(call, seconds=seconds)
        except (NotInitialised, Unreachable):
            raise
        except Unavailable as error:
            raise Unreachable(error.message, **error.fields) from error

    def count(self, who: str, what: str, error: CkptdError | None = None) -> None:
        """For the summary and the trace."""
        outcome = f"{what}: {type(error).__name__ if error else 'ok'}"
        self.outcomes[outcome] += 1
        self.drive.say(who, f"{outcome}{f' ({error.message[:120]})' if error else ''}")


class SimLedger(Ledger):
    """The real one. What its callers are told is compared with the truth; many threads of its process may use it."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        super().__init__(
            cluster.drive.view(process),
            second_reader=cluster.second_reader,
            deadline_seconds=cluster.manners.append_seconds,
            pause=cluster.baton.pause,
            clock=cluster.baton.clock,
            snapshot_records=cluster.manners.snapshot_records,
            aside=self._aside,
        )
        self.actor = process.name

    def _aside(self, call: Callable[[], None]) -> None:
        self._cluster.baton.start(self._process, call)

    def append(self, run: str, build: Build) -> None:
        rid, truth, began = "", self._cluster.truth, self._cluster.baton.now

        def watched(state: RunState) -> Any:
            nonlocal rid
            body = build(state)
            rid = body.rid
            return body

        try:
            super().append(run, watched)
        except (Fenced, Conflict) as error:
            if error.fields.get("final"):
                truth.refused(rid)
            raise
        finally:
            if self._process.asleep_until <= began:  # a process that was stopped cannot be in time
                seconds = self._cluster.baton.now - began
                truth.took(rid, seconds, self.deadline_seconds)
        truth.appended(rid)

    def _log(self, run: str) -> RunLog:
        log = super()._log(run)
        if not isinstance(log.lock, BatonLock):
            cast(Any, log).lock = BatonLock(self._cluster.baton)
        return log


class Service:
    """A process with a ledger that many ask at the same time, each request on a thread of its own."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.process = Process(name)
        self._cluster = cluster
        self._ledger: SimLedger | None = None

    def ledger(self) -> SimLedger:
        if self._ledger is None:
            self._ledger = SimLedger(self._cluster, self.process)
        return self._ledger

    def ask(self, request: Callable[[Ledger], T]) -> T:
        """From another process: its answer or its error; `Unavailable` if none comes in time. The request goes on."""
        baton, rng = self._cluster.baton, self._cluster.rng
        answers: list[T] = []
        errors: list[CkptdError] = []

        def work() -> None:
            try:
                answers.append(request(self.ledger()))
            except CkptdError as error:
                errors.append(error)

        if not self.process.dead:
            baton.start(self.process, work)
        process = self.process
        baton.wait(lambda: bool(answers or errors) or process.dead, baton.now + REQUEST_SECONDS)
        if rng.random() < self._cluster.drive.weather.lost or not (answers or errors):
            raise Unavailable(f"simulated: {process.name} does not answer")
        if errors:
            raise errors[0]
        return answers[0]


class Way:
    """A process's way to the ledger: through a service while one answers, or straight on the storage; the order of
    `ckptd_client.transport`."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self.process = process
        self._cluster = cluster
        self._ledger: SimLedger | None = None
        self._service = int(cluster.rng.random() * 4)

    @property
    def ledger(self) -> SimLedger:
        if self._ledger is None:
            self._ledger = SimLedger(self._cluster, self.process)
        return self._ledger

    def do(self, call: Callable[[Ledger], T]) -> T:
        services = self._cluster.services
        if self._service < len(services):
            service = services[self._service]
            try:
                return self._cluster.again(lambda: service.ask(call), seconds=PATIENCE_SECONDS)
            except Unavailable:
                return call(self.ledger)
        return call(self.ledger)

    def until(self, seconds: float, call: Callable[[Ledger], T], enough: Callable[[T], bool]) -> T:
        """Ask until the answer is enough or the deadline passes; then the last answer."""
        baton, pause = self._cluster.baton, 0.1
        give_up_at = baton.now + seconds
        while True:
            try:
                answer = self.do(call)
                if enough(answer) or baton.now >= give_up_at:
                    return answer
            except NotInitialised:
                raise
            except Unavailable:
                if baton.now >= give_up_at:
                    raise
            baton.pause(pause)
            pause = min(pause * 1.5, 2.0)


__all__ = ["RUN", "Cluster", "Manners", "Service", "SimLedger", "Way", "draw_manners"]
