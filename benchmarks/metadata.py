"""What a commit costs beyond the payload's own fsync: a tiny state on a local disk, where nothing else counts."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.jobs import Job
from benchmarks.ours import Saving, new_root
from benchmarks.references import bytes_of, warm_buffer, write
from benchmarks.results import Figure, Part, Table
from benchmarks.rounds import Contender, Tell, take_turns
from benchmarks.states import make
from ckptd.testing.processes import ServiceProcess

YIELDS = frozenset({"commit"})
RAW, OURS, SERVED = "raw write + fsync", "ckptd, no service", "ckptd, through a service"
GIGABYTES, TENSORS = 0.0001, 4


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    state = make(GIGABYTES, TENSORS)
    data = bytes_of(warm_buffer(state.size_bytes))
    target = folder / "raw"
    direct = Saving(new_root(folder / "direct"))
    with ServiceProcess(new_root(folder / "served"), log=folder / "service.log") as service:
        served = Saving(service.url)
        contenders = [
            Contender(RAW, lambda: write(target, data), after=target.unlink),
            Contender(OURS, lambda: direct.save(state)),
            Contender(SERVED, lambda: served.save(state)),
        ]
        rows = take_turns(contenders, job.rounds, tell, each_round=state.change)
        served.close()
    direct.close()
    title = f"Save of {state.size_bytes:,} bytes until committed"
    table = Table(group="metadata", title=title, rows=tuple(rows), reference=RAW)
    raw, ours = table.row(RAW), table.row(OURS)
    beyond = [one - other for one, other in zip(ours.samples["seconds"], raw.samples["seconds"], strict=True)]
    figure = Figure(figure="commit", at="", value=1000 * statistics.median(beyond), best=1000 * min(beyond))
    return Part(tables=(table,), figures=(figure,))
