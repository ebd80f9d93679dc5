"""One seed: a cluster and its weather, until so many storage operations are done; then quiet, and a last start.

`simulate` is what everybody calls. It says which invariant broke, or none, and what happened.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from ckptd import layout
from ckptd import log as log_module
from ckptd.testing.auditor_rules import Finding
from ckptd.testing.sim import job as jobs
from ckptd.testing.sim.baton import Baton, Process
from ckptd.testing.sim.cluster import Cluster, Service, draw_manners
from ckptd.testing.sim.drive import Drive, flipped
from ckptd.testing.sim.people import Asker, Operator, ReaderOfCheckpoints, Somebody, TheKeeper
from ckptd.testing.sim.truth import RUN, Truth, Violated
from ckptd.testing.sim.weather import CALM, draw

OPERATIONS = 3000  # of one seed
AUDIT_OPERATIONS = 1000
PROGRESS_OPERATIONS = 3000  # in which a start without faults begins and commits, for a log of this length


@dataclass
class Report:
    """What became of one seed."""

    seed: int
    finding: Finding | None = None
    operations: int = 0
    seconds: float = 0.0  # of virtual time
    counts: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)

    @property
    def rule(self) -> str:
        return self.finding.rule if self.finding is not None else ""


class World:
    def __init__(self, seed: int, operations: int, without: Collection[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.baton = Baton(rng, sticky=rng.choice((0.0, 0.5, 0.9)))
        self.weather = draw(rng).without(without)
        self.drive = Drive(self.baton, rng, self.weather)
        self.truth = Truth(self.drive)
        self.cluster = Cluster(self.baton, rng, self.drive, self.truth, draw_manners(rng))
        self.jobs: list[jobs.Job] = []
        self._operations = operations
        self._people: list[Somebody] = []
        self._names: Counter[str] = Counter()
        self._next_audit = AUDIT_OPERATIONS
        self.drive.after_operation = self._audit_now_and_then

    def run(self) -> None:
        """Raises `Violated`, or an error of the product that nobody expects."""
        self.baton.start(Process("nature", mortal=False), self._nature)
        self.baton.run(lambda: self.drive.operations >= self._operations)
        self.baton.end()
        self._settle()
        self.truth.audit()

    def end(self) -> None:
        self.baton.end()

    # What happens by itself.

    def _nature(self) -> None:
        """Starts what died and new incarnations, and damages files."""
        rng, manners = self.rng, self.cluster.manners
        while True:
            alive = [job for job in self.jobs if not job.over]
            awake = [job for job in alive if all(p.asleep_until <= self.baton.now for p in job.processes)]
            if not awake or (len(alive) < manners.max_jobs and rng.random() < 0.1):
                self._start_job(saves=int(rng.random() ** 2 * 12) + 1)
            self._fill_up()
            if rng.random() < self.weather.damaged:
                self._damage()
            self.baton.pause(rng.choice((2.0, 6.0)) * rng.random())

    def _start_job(self, *, saves: int, mortal: bool = True) -> jobs.Job:
        world = 1 + int(self.rng.random() * self.cluster.manners.max_world)
        job = jobs.start(self.cluster, len(self.jobs) + 1, world=world, saves=saves, mortal=mortal)
        self.jobs.append(job)
        return job

    def _fill_up(self) -> None:
        """As many services, keepers, people as this seed has, if some died."""
        cluster, manners = self.cluster, self.cluster.manners
        cluster.services = [service for service in cluster.services if not service.process.dead]
        while len(cluster.services) < manners.services:
            cluster.services.append(Service(cluster, self._name("service")))
        self._people = [somebody for somebody in self._people if not somebody.process.dead]
        for kind, wanted in ((TheKeeper, manners.keepers), (Operator, 1), (ReaderOfCheckpoints, 1), (Asker, 1)):
            for _ in range(wanted - sum(isinstance(somebody, kind) for somebody in self._people)):
                self._people.append(self._somebody(kind))

    def _somebody(self, kind: type[Somebody]) -> Somebody:
        services = self.cluster.services
        if kind is TheKeeper and services and self.rng.random() < 0.6:
            service = self.rng.choice(services)
            somebody: Somebody = TheKeeper(self.cluster, service.process, service.ledger)
        else:
            somebody = kind(self.cluster, Process(self._name(kind.title)))
        self.baton.start(somebody.process, somebody.live)
        return somebody

    def _name(self, what: str) -> str:
        self._names[what] += 1
        return f"{what} {self._names[what]}"

    def _damage(self) -> None:
        """A snapshot, or an object of a checkpoint that is not retired: a bit, the end, or all of it."""
        rng, state, medium = self.rng, self.truth.state, self.drive.medium
        snapshots = medium.list(layout.snapshots_folder(RUN))
        if snapshots and rng.random() < 0.2:
            return self._spoil(f"{layout.snapshots_folder(RUN)}/{rng.choice(snapshots)}")
        saves = [save for save in state.checkpoints if save not in state.retired]
        if not saves:
            return
        save = rng.choice(saves[-3:])
        folder = layout.payload_folder(RUN, save) if rng.random() < 0.8 else layout.manifest_folder(RUN, save)
        names = [name for name in medium.list(folder) if not name.startswith("part-")]
        if not names:
            return
        self._spoil(f"{folder}/{rng.choice(names)}")

    def _spoil(self, key: str) -> None:
        rng, data = self.rng, self.drive.medium.get(key, 1 << 30)
        how = rng.choice(("flip", "cut", "remove"))
        self.drive.say("nature", f"{how} {key}")
        self.truth.damaged(key)
        if data:
            spoiled = {"flip": flipped(data, rng), "cut": data[: len(data) // 2], "remove": None}
            self.drive.damage(key, spoiled[how])

    def _audit_now_and_then(self) -> None:
        if self.drive.operations >= self._next_audit:
            self._next_audit += AUDIT_OPERATIONS
            self.truth.audit()

    # Then it is quiet.

    def _settle(self) -> None:
        """Without faults a new incarnation begins and commits within a bounded number of operations, if need be after
        a person chose a checkpoint."""
        self.drive.weather, self.drive.full_until = CALM, 0.0
        self.drive.say("nature", "all faults stop")
        self.cluster.services.clear()
        for may_help in (True, False):
            bound = self.drive.operations + PROGRESS_OPERATIONS + 40 * self.truth.state.seq
            job = self._start_job(saves=2, mortal=False)
            self.baton.run(lambda job=job, bound=bound: job.over or self.drive.operations > bound)  # type: ignore[misc]
            self.baton.end()
            if job.durable:
                return
            if may_help:
                self._rescue()
        raise Violated(Finding("I21", RUN, f"no commit within {PROGRESS_OPERATIONS} operations without a fault"))

    def _rescue(self) -> None:
        """A person brings damaged files back, and chooses a checkpoint if none is valid."""
        operator = Operator(self.cluster, Process("the last operator", mortal=False))
        self.baton.start(operator.process, operator.help)
        self.baton.run(lambda: False)


def simulate(seed: int, operations: int = OPERATIONS, *, without: Collection[str] = ()) -> Report:
    """One history. The same arguments always give the same one. `without` names faults to leave out."""
    report = Report(seed)
    world = World(seed, operations, without)
    with _seeded(world):
        try:
            world.run()
        except Violated as error:
            report.finding = error.finding
        except Exception as error:  # noqa: BLE001 - nobody expects it, so it is what was found
            report.finding = Finding("error", type(error).__name__, _where(error))
        finally:
            world.end()
    report.operations, report.seconds = world.drive.operations, world.baton.now
    report.events = list(world.drive.events)
    for prefix, counts in (
        ("record", world.truth.kinds), ("fault", world.drive.met), ("did", world.cluster.outcomes),
    ):  # fmt: skip
        report.counts.update({f"{prefix} {name}": count for name, count in counts.items()})
    report.counts["seeds"], report.counts["audits"] = 1, world.truth.audits
    report.counts["incarnations"], report.counts["records"] = len(world.jobs), world.truth.state.seq
    return report


@contextmanager
def _seeded(world: World) -> Iterator[None]:
    """Everything that is drawn or read from a clock elsewhere comes from the seed, so that a seed can be replayed."""
    rng, log, logger = world.rng, cast(Any, log_module), logging.getLogger("ckptd")
    before, level = (layout.new_attempt, layout.new_nonce, log.random, log.datetime), logger.level

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Any:
            return datetime.fromtimestamp(world.baton.now, tz=cast(Any, tz))

    layout.new_attempt = lambda: f"{rng.getrandbits(128):032x}"
    layout.new_nonce = lambda: f"{rng.getrandbits(64):016x}"
    log.random, log.datetime = rng, Clock
    logger.setLevel(logging.CRITICAL)  # the trace says more
    try:
        yield
    finally:
        layout.new_attempt, layout.new_nonce, log.random, log.datetime = before
        logger.setLevel(level)


def _where(error: BaseException) -> str:
    """A fault of the product or of the simulator: the places, innermost last."""
    places = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return f"{error} at {' > '.join(places[-6:])}"
