"""One process of a soak: does to a few runs what trainers do, and some of what they should not.

`python -m ckptd.testing.soak_worker`, with its orders as JSON on standard input; `ckptd.testing.soak` starts it, and
may kill it at any moment. It ends by itself after its number of operations, or at SIGTERM. What it was told it writes
into its journal, and it says there at once what contradicts what it was told before.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ckptd import layout
from ckptd.errors import AlreadyExists, Conflict, Corrupt, Fenced, InUse, NotFound, OutcomeUnknown, Unavailable
from ckptd.ledger import Ledger
from ckptd.manifest import Frozen
from ckptd.records import Damage
from ckptd.second import this_process
from ckptd.storage import open_storage
from ckptd.testing.soak_journal import Journal, operations_in
from ckptd.testing.soak_saves import overwrite, write_save
from ckptd.testing.soak_sides import OverHttp, Side
from ckptd.wire import AbortRequest, Answer, BeginRequest, CommitRequest, DamageReport, OpenRequest

T = TypeVar("T")
RUNS = 2
RECORDS_PER_RUN = 300  # then a fresh run, so that an audit stays short
APPEND_SECONDS = 20.0
TRIES = 6
KEPT = 20
KEEP_VALID = 3
LINE_OF_WORK = {"start": 10, "save": 45, "repeat": 8, "abort": 6, "latest": 15, "join": 8, "late": 4, "damage": 2}


class Orders(Frozen):
    name: str
    storage: str
    services: tuple[str, ...]
    journal: str
    seed: str
    operations: int | None


@dataclass
class Job:
    """An incarnation this process believes to be."""

    run: str
    side: Side
    attempt: str
    answer: Answer
    step: int
    count: int = 0
    durable: list[CommitRequest] = field(default_factory=list)
    refused: list[CommitRequest] = field(default_factory=list)


class Worker:
    """One thread; everything it rolls comes from its seed."""

    def __init__(self, orders: Orders, journal: Journal) -> None:
        self._journal = journal
        self._random = random.Random(orders.seed)
        self._ledger = Ledger(open_storage(orders.storage), deadline_seconds=APPEND_SECONDS)
        self._sides: list[Side] = [self._ledger, *map(OverHttp, orders.services)]
        self._name = orders.name
        self._numbers = [0] * RUNS
        self._jobs: dict[str, Job] = {}
        self._past: list[Job] = []
        self._opened: list[tuple[str, str]] = []

    def operate(self) -> None:
        """One operation, chosen by lot. What may happen to anybody ends it; what must not comes through."""
        name = self._random.choices(list(LINE_OF_WORK), weights=list(LINE_OF_WORK.values()))[0]
        self._journal.operation(name)
        try:
            getattr(self, f"_{name}")()
        except Unavailable:
            self._journal.event("gave up")
        except InUse:
            self._journal.event("in use")
        time.sleep(self._random.random() * 0.02)  # the pace of the load; nothing waits for it

    # Incarnations

    def _start(self) -> None:
        run, attempt = self._run(), layout.new_attempt()
        opening = OpenRequest(attempt=attempt, job=self._name, host="soak")
        self._insist(self._any(), lambda side: side.open(run, opening))
        self._journal.counts(run, f"open:{attempt}")
        if self._random.random() < 0.15:
            self._opened.append((run, attempt))
        else:
            self._begin(run, attempt)

    def _late(self) -> None:
        """Begin what was opened a while ago: a process that was stopped in between."""
        if self._opened:
            self._begin(*self._opened.pop(self._random.randrange(len(self._opened))))

    def _begin(self, run: str, attempt: str, fallback_of: int | None = None) -> None:
        home = self._any()
        takeover = self._random.random() < 0.9
        request = BeginRequest(attempt=attempt, job=self._name, world=2, fallback_of=fallback_of, takeover=takeover)
        try:
            answer = self._insist(home, lambda side: side.begin(run, request))
        except Fenced:
            self._journal.event("fenced")
            return
        except Corrupt as error:
            if not error.fields.get("candidates"):
                raise
            self._journal.event("no valid checkpoint is left")
            self._numbers[int(run.split("-")[1])] += 1
            return
        self._journal.counts(run, f"begin:{attempt}:{fallback_of or 0}")
        if fallback_of is None and self._random.random() < 0.1:
            self._begin(run, attempt, answer.generation)
            return
        job = Job(run, home, attempt, answer, answer.checkpoint.step if answer.checkpoint else 0)
        self._past = [*self._past, *filter(None, [self._jobs.get(run)])][-KEPT:]
        self._jobs[run] = job
        if self._random.random() < 0.95:
            self._ready(job)

    def _ready(self, job: Job) -> None:
        generation = job.answer.generation
        try:
            self._insist(job.side, lambda side: side.ready(job.run, job.attempt, generation))
        except Fenced:
            self._journal.event("fenced")
        else:
            self._journal.counts(job.run, f"ready:{job.attempt}:{generation}")

    def _join(self) -> None:
        """Every rank that asks is told the same, by whomever it asks."""
        job = self._job()
        if job is not None:
            found = self._insist(self._any(), lambda side: side.join(job.run, job.attempt, job.answer.fallback_of))
            if found != job.answer:
                self._journal.finding(job.run, f"rank 0 was answered {job.answer}, another rank {found}")

    # Saves

    def _save(self) -> None:
        job = self._job()
        if job is None:
            self._start()
        else:
            self._commit(job, self._written(job))

    def _written(self, job: Job) -> CommitRequest:
        """A save that lacks nothing but its commit."""
        job.count += 1
        job.step += self._random.randrange(3)
        name = layout.save_id(job.answer.generation, job.step, all_ranks=True, count=job.count)
        return write_save(self._ledger.storage, job.run, name, self._random)

    def _commit(self, job: Job, request: CommitRequest) -> None:
        rid = f"commit:{request.save}:{request.manifest.sha256}"
        try:
            self._insist(job.side, lambda side: side.commit(job.run, request))
        except (Fenced, Conflict) as error:
            if isinstance(error, Fenced) and self._jobs.get(job.run) is job:
                self._past = [*self._past, self._jobs.pop(job.run)][-KEPT:]
            if error.fields.get("final"):
                self._journal.refused(job.run, rid)
                job.refused.append(request)
            self._journal.event("commit refused")
            return
        self._journal.durable(job.run, request.save, rid)
        job.durable.append(request)
        if self._random.random() < 0.3:
            found = self._insist(self._any(), lambda side: side.save_status(job.run, request.save))
            if found.status != "durable":
                self._journal.finding(job.run, f"{request.save} was acknowledged, and then {found}")

    def _repeat(self) -> None:
        """Ask again for what was decided: it stays decided, whatever happened since and whoever is asked."""
        jobs = [*self._jobs.values(), *self._past]
        decided = [(job, request, True) for job in jobs for request in job.durable[-5:]]
        decided += [(job, request, False) for job in jobs for request in job.refused[-5:]]
        if not decided:
            return
        job, request, durable = self._random.choice(decided)
        try:
            self._insist(self._any(), lambda side: side.commit(job.run, request))
        except (Fenced, Conflict) as error:
            if durable:
                self._journal.finding(job.run, f"{request.save} was acknowledged, and then {error.message}")
        else:
            if not durable:
                self._journal.finding(job.run, f"{request.save} was refused for good, and then committed")

    def _abort(self) -> None:
        """A save is called off; after that nobody can commit it."""
        job = self._job()
        if job is None:
            return
        request = self._written(job)
        off = AbortRequest(generation=request.generation, reason="soak")
        try:
            self._insist(job.side, lambda side: side.abort(job.run, request.save, off))
        except (Fenced, Conflict):
            self._journal.event("abort refused")
            return
        self._journal.counts(job.run, f"abort:{request.save}")
        try:
            self._insist(self._any(), lambda side: side.commit(job.run, request))
        except (Fenced, Conflict):
            job.refused.append(request)
        else:
            self._journal.finding(job.run, f"{request.save} was aborted, and then committed")

    # Questions, and damage

    def _latest(self) -> None:
        job = self._job()
        run = job.run if job is not None else self._run()
        found = self._insist(self._any(), lambda side: side.latest(run))
        if found.answer == "none" and job is not None and job.durable:
            self._journal.finding(run, f"{job.durable[-1].save} was acknowledged, and the latest is {found}")

    def _damage(self) -> None:
        """A checkpoint rots, or somebody only says so. Some are always left alone."""
        run = self._run()
        try:
            valid = [info for info in self._ledger.checkpoints(run) if info.status == "valid"]
        except NotFound:
            return
        if len(valid) <= KEEP_VALID:
            return
        info = self._random.choice(valid)
        key = self._ledger.manifest(info.manifest).objects()[0].key
        rot = self._random.choice(["none", "flip", "cut", "delete"])
        if rot != "none":
            self._journal.damaged(run, info.save, key)
            try:
                overwrite(self._ledger.storage, key, rot)
            except (NotFound, AlreadyExists):
                self._journal.event("damaged by two at once")
        if rot in ("cut", "delete") and self._random.random() < 0.3:
            return  # whoever starts next finds it
        damage = Damage(object=key, expected="whole", observed="other bytes")
        report = DamageReport(save=info.save, damage=damage, reader=this_process())
        answer = self._insist(self._any(), lambda side: side.report_damage(run, report))
        self._journal.event("quarantined" if answer.confirmed else "reported in vain")
        if rot != "none" and not answer.confirmed:
            self._journal.finding(run, f"{key} is damaged ({rot}), and the second reading says {answer.detail}")

    # Who and where

    def _insist(self, first: Side, call: Callable[[Side], T]) -> T:
        """Ask `first`, and anybody after it, until somebody answers."""
        side = first
        for left in reversed(range(TRIES)):
            try:
                return call(side)
            except Unavailable as error:
                self._journal.event("unknown" if isinstance(error, OutcomeUnknown) else "unavailable")
                if not left:
                    raise
            side = self._any()
        raise AssertionError("the last try returns or raises")

    def _any(self) -> Side:
        return self._random.choice(self._sides)

    def _job(self) -> Job | None:
        """One that is believed to be current, or, now and then, one that is not."""
        if self._past and self._random.random() < 0.1:
            return self._random.choice(self._past)
        return self._random.choice(list(self._jobs.values())) if self._jobs else None

    def _run(self) -> str:
        which = self._random.randrange(RUNS)
        while True:
            run = f"soak-{which}-{self._numbers[which]}"
            try:
                if self._ledger.run_info(run).records < RECORDS_PER_RUN:
                    return run
            except NotFound:
                return run
            self._numbers[which] += 1


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    orders = Orders.model_validate_json(sys.stdin.buffer.read())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    path = Path(orders.journal)
    done = operations_in(path)
    with Journal(path) as journal:
        worker = Worker(orders, journal)
        while not stop.is_set() and (orders.operations is None or done < orders.operations):
            worker.operate()
            done += 1


if __name__ == "__main__":
    main()
