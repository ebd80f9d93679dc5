"""Several ranks on one node: restoring the same state, and saving it together. Real processes over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.jobs import Job
from benchmarks.ours import Saving, new_root
from benchmarks.results import Figure, Part, Row, Table, ratio
from benchmarks.rounds import Tell
from benchmarks.states import make

YIELDS = frozenset({"restore bytes", "restore wall", "parallel save"})
OURS, BROADCAST, EVERY = "ckptd", "one rank reads, one flat broadcast", "every rank reads"
SHARES, DCP = "each rank writes its share + fsync", "dcp.save"
RESULT = "result.json"


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    tell("saving what the ranks will restore")
    state = make(job.gigabytes, job.tensors)
    size = state.size_bytes
    saving = Saving(new_root(folder / "ours"))
    saving.save(state)
    saving.close()
    del state
    tell(f"{job.count} ranks restore and save, {job.rounds} rounds")
    run_ranks(job, folder)
    tables = Part.model_validate_json((folder / RESULT).read_text()).tables
    return Part(tables=tables, figures=figures_of(job, tables, size))


def run_ranks(job: Job, folder: Path) -> None:
    """`python -m benchmarks.rank` once for each rank; the first that fails ends all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(job.count)}
    command = [sys.executable, "-m", "benchmarks.rank", job.model_dump_json(), str(folder)]
    ranks = [subprocess.Popen(command, env={**os.environ, **address, "RANK": str(rank)}) for rank in range(job.count)]
    try:
        codes = [rank.wait(job.deadline_seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}; their words are in the log")


def figures_of(job: Job, tables: tuple[Table, ...], size: int) -> tuple[Figure, ...]:
    """Bytes are those of the cold restore: of a warm one nothing comes from the storage, whoever reads. Of the
    seconds the worse one counts, warm or cold."""
    warm, cold, saves = tables
    at = f"{job.count} ranks"
    read = Figure(figure="restore bytes", at=at, value=cold.row(OURS).median("read_call_bytes") / size)
    walls = [
        figure
        for table in (warm, cold)
        for figure in ratio("restore wall", at, table.row(OURS), _better(table.row(BROADCAST), table.row(EVERY)))
    ]
    worst = max(walls, key=lambda figure: figure.value)
    return (read, worst, *ratio("parallel save", at, saves.row(OURS), saves.row(SHARES)))


def _better(one: Row, other: Row) -> Row:
    return min(one, other, key=lambda row: row.median("seconds"))
