"""A soak: several processes and services work on the same runs for minutes, and are killed now and then.

    python -m ckptd.testing.soak --minutes 10 --processes 3 --seed 7

Each process does at random what trainers, people, readers and retention do, and some damage, through a service or
straight on the storage; the services retire and collect on their own. The auditor and `soak_custody` read every run,
every minute while all are stopped and once more at the end, and compare it with what the processes were told. The
exit code is 1 if anything is not as it must be.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM, Signals
from typing import Annotated

import typer

from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.storage import init_root, open_storage
from ckptd.testing.auditor import Auditor
from ckptd.testing.processes import ServiceProcess
from ckptd.testing.soak_custody import Custody
from ckptd.testing.soak_hand import Orders
from ckptd.testing.soak_journal import Tally
from ckptd.testing.soak_processes import Process, Victim, kills_in_operations, kills_in_time
from ckptd.testing.soak_summary import listed, summary

POLL_SECONDS = 0.05
PROGRESS_SECONDS = 10.0
AUDIT_SECONDS = 60.0
HOLD_SECONDS = 5.0
FAULTS = ("fault of ckptd", "under reference", "Traceback")  # in the log of a service


class Soak:
    """One soak on `storage_url`, whose root is initialised, for some minutes or for a number of operations in all.
    `folder` is for logs and journals. `run` does everything; the process that calls it is not killed."""

    def __init__(
        self, storage_url: str, folder: Path, *, seed: int, processes: int = 3, services: int = 2,
        minutes: float = 0.0, operations: int | None = None, say: Callable[[str], None] = typer.echo,
    ) -> None:  # fmt: skip
        self.tally = Tally(folder)
        self.kills: Counter[Victim] = Counter()
        self.audits = 0
        self._url, self._seed = storage_url, seed
        self._seconds, self._operations = 60 * minutes, operations
        self._say = say
        self._random = random.Random(seed)
        self._plan = kills_in_time(self._random) if operations is None else kills_in_operations(operations)
        self._next = next(self._plan)
        self._storage = open_storage(storage_url)
        self._ledger = Ledger(self._storage)
        self.custody: dict[str, Custody] = {}
        self.service_actors = set[str]()
        self.leftovers = 0
        self._auditors: dict[str, Auditor] = {}
        self._findings: dict[str, None] = {}
        self._began = 0.0
        self._services = [
            ServiceProcess(storage_url, log=folder / f"service-{number}.log", init=False, env=_manners(number))
            for number in range(services)
        ]
        self._processes = [Process(f"process-{number}", folder, self._orders) for number in range(processes)]

    def run(self) -> list[str]:
        """The findings; there should be none."""
        self._began = time.monotonic()
        with contextlib.ExitStack() as ended:
            for service in self._services:
                ended.enter_context(service)
                self._met(service)
            for process in self._processes:
                ended.callback(process.kill)
                process.start()
            self._work()
            self._find(found for process in self._processes if (found := process.end()))
            for service in self._services:
                service.stop()
            self.tally.read_on()
            runs = sorted({*self._ledger.runs(), *self.tally.counting})
            self._audit(runs)
            self._collect(runs)
            self._read_service_logs()
        return list(self._findings)

    def summary(self) -> str:
        """What happened, in a few lines."""
        infos = [self._ledger.run_info(run) for run in self._ledger.runs()]
        told = summary(self.tally, infos, self.custody, self.service_actors)
        ends = [
            f"objects collected at the end: {self.leftovers}",
            f"kills: {listed(Counter(map(str, self.kills.elements())))}",
            f"audits: {self.audits}",
        ]
        return "\n".join([*told, *ends])

    # Work

    def _work(self) -> None:
        """Until the time is over, or every process has done its part."""
        touched = set[str]()
        last_audit = last_line = time.monotonic()
        while not self._over():
            time.sleep(POLL_SECONDS)
            touched |= self.tally.read_on()
            if self._passed() > self._next[0]:
                self._kill(self._next[1])
                self._next = next(self._plan, (float("inf"), "process"))
            if time.monotonic() - last_line > PROGRESS_SECONDS:
                last_line = time.monotonic()
                self._say(self._progress())
            if time.monotonic() - last_audit > AUDIT_SECONDS:
                with self._standstill():
                    touched |= self.tally.read_on()
                    self._audit(touched)
                touched.clear()
                last_audit = time.monotonic()
        for process in self._processes if self._operations is None else ():
            process.send(SIGTERM)

    def _passed(self) -> float:
        """Seconds since the beginning, or operations: whichever this soak is measured in."""
        return time.monotonic() - self._began if self._operations is None else self.tally.operations.total()

    def _over(self) -> bool:
        alive = sum(process.alive for process in self._processes)
        if self._operations is None:  # a process that ended unasked ends the soak: its exit code is a finding
            return self._passed() > self._seconds or alive < len(self._processes)
        return alive == 0

    def _kill(self, victim: Victim) -> None:
        """SIGKILL, and a new life at once."""
        if victim == "service":
            service = self._random.choice(self._services)
            service.restart()
            self._met(service)
        else:
            alive = [process for process in self._processes if process.alive]
            if not alive:
                return
            process = self._random.choice(alive)
            process.kill()
            process.start()
        self.kills[victim] += 1

    @contextlib.contextmanager
    def _standstill(self) -> Iterator[None]:
        """All processes are stopped, wherever they are, and then all services, for they retire and delete, too."""
        self._send_all(SIGSTOP)
        try:
            yield
        finally:
            self._send_all(SIGCONT)

    def _send_all(self, sig: Signals) -> None:
        for process in self._processes:
            process.send(sig)
        for service in self._services:
            if service.alive:
                os.kill(service.pid, sig)

    def _met(self, service: ServiceProcess) -> None:
        self.service_actors.add(f"{socket.gethostname()} pid {service.pid}")

    def _orders(self, process: Process) -> Orders:
        operations = None
        if self._operations is not None:
            share, rest = divmod(self._operations, len(self._processes))
            operations = share + (self._processes.index(process) < rest)
        return Orders(
            name=process.name,
            storage=self._url,
            services=tuple(service.url for service in self._services),
            journal=str(process.journal),
            seed=f"{self._seed}/{process.name}/{process.lives}",
            operations=operations,
        )

    def _progress(self) -> str:
        told = self.tally
        return (
            f"{time.monotonic() - self._began:5.0f} s: {told.operations.total()} operations,"
            f" {sum(map(len, told.durable.values()))} saves acknowledged, {self.kills.total()} kills,"
            f" {self.audits} audits, {len(self._findings) + len(told.findings)} findings"
        )

    # Checks

    def _audit(self, runs: Iterable[str]) -> None:
        """Read these runs as they are now. Nothing that processes may be told or damage is unknown to `tally`."""
        self.audits += 1
        self.tally.read_on()
        self._find(self.tally.findings)
        for run in sorted(set(runs)):
            told = self.tally
            auditor = self._auditors.setdefault(run, Auditor(self._storage, run))
            found = auditor.check(
                acknowledged=told.durable[run], refused=told.refused[run], damaged=told.damaged[run]
            )
            self._find(f"{run}: {finding}" for finding in found)
            self._compare(run)

    def _compare(self, run: str) -> None:
        """What the auditor is not asked: other records than commits, and who is answerable for what."""
        custody = self.custody.setdefault(run, Custody(self._storage, run, hold_seconds=HOLD_SECONDS))
        self._find(f"{run}: {finding}" for finding in custody.check(self.tally))
        for rid in sorted(self.tally.counting[run] - custody.state.accepted.keys()):
            self._find([f"{run}: {rid} was acknowledged, and does not count"])

    def _collect(self, runs: Iterable[str]) -> None:
        """With everybody gone, all that is not needed can be collected, and nothing that is."""
        keeper = Keeper(self._ledger)
        for run in runs:
            if self.custody[run].state.seq:
                self.leftovers += keeper.collect(run).objects
                self._find(f"{run}: {left}" for left in self.custody[run].leftovers(self.tally.damaged_saves[run]))
        self._audit(runs)

    def _read_service_logs(self) -> None:
        for service in self._services:
            lines = service.log.read_text(errors="replace").splitlines()
            self._find(f"{service.log.name}: {line}" for line in lines if any(fault in line for fault in FAULTS))

    def _find(self, findings: Iterable[str]) -> None:
        for finding in findings:
            if finding not in self._findings:
                self._findings[finding] = None
                self._say(f"FINDING {finding}")


def _manners(number: int) -> dict[str, str]:
    """How the service of this number keeps the runs: each has another policy, and all are in a hurry."""
    every = {"CKPTD_KEEP_EVERY": "10"} if number % 2 else {}
    return every | {
        "CKPTD_IN_USE_SECONDS": "2",
        "CKPTD_KEEP_LAST": str(3 + number % 2),
        "CKPTD_HOUSEKEEPING_SECONDS": "1",
        "CKPTD_HOLD_SECONDS": f"{HOLD_SECONDS:g}",
    }


@contextlib.contextmanager
def storage_at(url: str, folder: Path) -> Iterator[str]:
    """The storage that is meant: a URL, `file` for a new folder, or `s3` for a SeaweedFS of our own."""
    if url == "file":
        url = f"file://{folder}/root"
    if url != "s3":
        init_root(url)
        yield url
        return
    from ckptd.testing.seaweed import SeaweedProcess  # only here: it needs the S3 libraries

    with SeaweedProcess(folder / "seaweed") as server:
        os.environ.update(server.env)
        url = server.url("soak")
        init_root(url)
        yield url


def main(
    storage: Annotated[str, typer.Option(help="A storage URL, file (a new folder), or s3 (SeaweedFS).")] = "file",
    minutes: Annotated[float, typer.Option(min=0.0, help="How long.")] = 10.0,
    operations: Annotated[int | None, typer.Option(min=1, help="How many operations, instead of minutes.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=100)] = 3,
    services: Annotated[int, typer.Option(min=1, max=100)] = 2,
    seed: Annotated[int | None, typer.Option(help="By default a new one.")] = None,
) -> None:
    """Let processes work on the same runs, kill some, and check everything."""
    seed = secrets.randbelow(10**6) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="ckptd-soak-"))
    typer.echo(f"seed {seed}; logs and journals in {folder}")
    with storage_at(storage, folder) as url:
        soak = Soak(
            url, folder, seed=seed, processes=processes, services=services, minutes=minutes, operations=operations
        )
        findings = soak.run()
        typer.echo(soak.summary())
    typer.echo(f"findings: {len(findings)}")
    raise typer.Exit(1 if findings else 0)


if __name__ == "__main__":
    typer.run(main)
