"""Long histories: `latest` over HTTP on a short run and on a long one, and reading a long log for the first time."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import httpx

from benchmarks.jobs import Job
from benchmarks.ours import make_snapshot, new_root, replay
from benchmarks.results import Figure, Part, Row, Table
from benchmarks.rounds import Contender, Tell, take_turns
from benchmarks.served import BareRoute
from ckptd.storage import open_storage
from ckptd.testing.histories import write_history
from ckptd.testing.processes import ServiceProcess

YIELDS = frozenset({"latest", "replay"})
SHORT, LONG = 10, 10_000
RECORDS_OF_THREE = 10
READ, REPLAYED = "the whole log", "from a snapshot"
REPLAYS = 5
BARE = "a bare FastAPI route with the answer's bytes"


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    url = new_root(folder / "runs")
    storage = open_storage(url)
    checkpoints = {SHORT: f"run-{SHORT}", min(LONG, job.count): f"run-{min(LONG, job.count)}"}
    for count, run in checkpoints.items():
        tell(f"writing a run with {count:,} checkpoints")
        write_history(storage, run, records=-(-count * RECORDS_OF_THREE // 3))
    latest, figure = ask(url, checkpoints, job.rounds, folder, tell)
    tell(f"writing a log of {job.count:,} records")
    write_history(storage, "long", records=job.count)
    replays = replay_both(url, job.count, tell)
    at = f"{job.count:,} records"
    row = replays.row(REPLAYED)
    found = Figure(figure="replay", at=at, value=row.median("seconds"), best=row.best("seconds"))
    return Part(tables=(latest, replays), figures=(figure, found))


def ask(url: str, checkpoints: dict[int, str], rounds: int, folder: Path, tell: Tell) -> tuple[Table, Figure]:
    """`latest` of each run in turns, on one connection that stays open."""
    with (
        ServiceProcess(url, log=folder / "service.log", init=False) as service,
        httpx.Client(base_url=service.url, timeout=120.0) as client,
    ):
        paths = {count: f"/v1/runs/{run}/latest" for count, run in checkpoints.items()}
        answers = {count: client.get(path).raise_for_status().content for count, path in paths.items()}
        tell(f"asking {rounds} times each")
        with BareRoute(answers[SHORT], log=folder / "bare.log") as bare:
            contenders = [Contender(BARE, partial(_get, client, bare.url))]
            contenders += [Contender(_name(count), partial(_get, client, path)) for count, path in paths.items()]
            turns = take_turns(contenders, rounds, lambda doing: None, warm_up=10)
    title = "`latest` over HTTP, seconds of one request"
    table = Table(group="runs", title=title, rows=tuple(row.only("seconds") for row in turns), reference=BARE)
    medians, bests = ([getattr(table.row(_name(c)), of)("seconds") for c in paths] for of in ("median", "best"))
    at = f"{max(paths):,} checkpoints"
    value, best = max(medians) / min(medians), max(bests) / min(bests)
    return table, Figure(figure="latest", at=at, value=value, best=best)


def _name(count: int) -> str:
    return f"{count:,} checkpoints"


def _get(client: httpx.Client, path: str) -> None:
    client.get(path).raise_for_status()


def replay_both(url: str, count: int, tell: Tell) -> Table:
    """Reading a log as a new process does: once all of it, then some times with a snapshot."""
    tell(f"reading {count:,} records")
    whole = _seconds(url)
    tell("making a snapshot")
    make_snapshot(url, "long")
    tell(f"reading {count:,} records from a snapshot")
    shorter = tuple(_seconds(url) for _ in range(REPLAYS))
    rows = (Row(name=READ, samples={"seconds": (whole,)}), Row(name=REPLAYED, samples={"seconds": shorter}))
    return Table(group="runs", title=f"First look at a log of {count:,} records", rows=rows, reference=READ)


def _seconds(url: str) -> float:
    began = time.perf_counter()
    if not replay(url, "long"):
        raise ValueError("the long run has no generation")
    return time.perf_counter() - began
