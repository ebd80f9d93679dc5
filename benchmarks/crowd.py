"""Thousands of ranks that ask a service on one core at once: new connections, and answers that are waited for."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import httpx

from benchmarks.costs import memory_bytes
from benchmarks.jobs import Job
from benchmarks.ours import new_root
from benchmarks.results import Figure, Part, Row, Table
from benchmarks.rounds import Tell
from benchmarks.served import BareRoute
from ckptd import layout
from ckptd.testing.processes import ServiceProcess

YIELDS = frozenset({"crowd, seconds", "crowd, errors", "crowd, memory"})
RUN = "crowd"
BARE, BEGUN, PARKED = "a bare FastAPI route", "ranks ask after the begin", "ranks wait for the begin"
LOAD_SECONDS = 240.0


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    allow_many_files()
    cores = sorted(os.sched_getaffinity(0))
    rows: list[Row] = []
    with ServiceProcess(new_root(folder / "crowd"), log=folder / "service.log") as service:
        pin(service.pid, cores[0])
        tell(f"{job.count:,} ranks, begun before")
        attempt = open_attempt(service.url, job.count)
        begin(service.url, attempt, job.count)
        path = f"/v1/runs/{RUN}/attempts/{attempt}/answer"
        answer = httpx.get(service.url + path).raise_for_status().content
        rows.append(_row(BEGUN, service.pid, Crowd(service.url, path, job.count, cores[-1]).finish()))

        tell(f"{job.count:,} ranks, waiting for the begin")
        attempt = open_attempt(service.url, job.count)
        path = f"/v1/runs/{RUN}/attempts/{attempt}/answer?wait_seconds=30"
        crowd = Crowd(service.url, path, job.count, cores[-1])
        crowd.until_all_asked()
        begin(service.url, attempt, job.count)
        rows.append(_row(PARKED, service.pid, crowd.finish()))

    tell(f"{job.count:,} connections to a bare route")
    with BareRoute(answer, log=folder / "bare.log") as bare:
        pin(bare.pid, cores[0])
        rows.insert(0, _row(BARE, bare.pid, Crowd(bare.url.rstrip("/"), "/", job.count, cores[-1]).finish()))
    title = f"{job.count:,} ranks at once, the server on one core"
    table = Table(group="crowd", title=title, rows=tuple(rows), reference=BARE, note=NOTE)
    return Part(tables=(table,), figures=figures_of(table, job.count))


NOTE = (
    "Seconds until the last rank has its answer, from the first connection or, if all wait for it, from the begin. "
    "A rank that is told to come again does so, as the client does."
)


def figures_of(table: Table, count: int) -> tuple[Figure, ...]:
    rows = [table.row(BEGUN), table.row(PARKED)]
    at = f"{count:,} ranks"
    return (
        Figure(figure="crowd, seconds", at=at, value=max(row.median("seconds") for row in rows)),
        Figure(figure="crowd, errors", at=at, value=sum(row.median("errors") for row in rows)),
        Figure(figure="crowd, memory", at=at, value=max(row.median("peak_bytes") for row in rows) / 10**6),
    )


class Crowd:
    """`benchmarks.crowd_load` in a process and on a core of its own."""

    def __init__(self, url: str, path: str, count: int, core: int) -> None:
        command = [sys.executable, "-m", "benchmarks.crowd_load", url, path, str(count)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        pin(self._process.pid, core)

    def until_all_asked(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def finish(self) -> dict[str, float]:
        """What it counted; `seconds` from the first connection, `waited_seconds` from when all had asked."""
        try:
            said, _ = self._process.communicate(timeout=LOAD_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
        found: dict[str, float] = json.loads(said.splitlines()[-1])
        return found


def _row(name: str, pid: int, found: dict[str, float]) -> Row:
    waited = found.pop("waited_seconds")
    if name == PARKED:
        found["seconds"] = waited
    found["peak_bytes"] = float(memory_bytes(pid, "VmHWM"))
    return Row(name=name, samples={key: (value,) for key, value in found.items()})


def open_attempt(url: str, world: int) -> str:
    attempt = layout.new_attempt()
    body = {"attempt": attempt, "job": "crowd", "host": "bench"}
    httpx.post(f"{url}/v1/runs/{RUN}/attempts", json=body).raise_for_status()
    return attempt


def begin(url: str, attempt: str, world: int) -> None:
    body = {"attempt": attempt, "job": "crowd", "world": world}
    httpx.post(f"{url}/v1/runs/{RUN}/generations", json=body, timeout=LOAD_SECONDS).raise_for_status()


def pin(pid: int, core: int) -> None:
    """All threads of a process onto one core; those they start later follow."""
    for task in _tasks(pid):
        os.sched_setaffinity(task, {core})


def _tasks(pid: int) -> Iterable[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def allow_many_files() -> None:
    """For this process and those it starts: a socket is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
