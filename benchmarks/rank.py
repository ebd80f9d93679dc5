"""One rank of `benchmarks.ranks`: every rank runs the same turns in the same order, between barriers.

Seconds are rank 0's, from the barrier before to the barrier after, so of the slowest rank. Bytes read are counted by
the kernel for each process, `rchar` in /proc/self/io: what read calls returned, from the disk or from any cache, and
neither sockets nor mapped memory. Their sum over the ranks is what was asked of the storage.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.costs import io
from benchmarks.jobs import Job
from benchmarks.loading import views
from benchmarks.ours import PARALLEL, Loading, Saving, new_root, newest_payload
from benchmarks.ranks import BROADCAST, DCP, EVERY, OURS, RESULT, SHARES
from benchmarks.references import BLOCK_BYTES, bytes_of, cool, read_into, remove, warm_buffer, write
from benchmarks.results import Part, Row, Table
from benchmarks.rounds import Contender, nothing, take_turns
from benchmarks.states import State, make, packed

GROUP_SECONDS = 300


class Rank:
    """This process among the others."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.number, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.place = {"rank": self.number, "world_size": self.world}
        dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_SECONDS))
        self.state: State = make(job.gigabytes, job.tensors)
        self.buffer: torch.Tensor = warm_buffer(self.state.size_bytes)

    def together(self, work: Callable[[], object]) -> dict[str, float]:
        """What all ranks do at once: its seconds, and the bytes that all of them read."""
        dist.barrier()
        before, began = io()["rchar"], time.perf_counter()
        work()
        own = torch.tensor(float(io()["rchar"] - before), dtype=torch.float64)
        dist.barrier()
        seconds = time.perf_counter() - began
        dist.all_reduce(own)
        return {"seconds": seconds, "read_call_bytes": float(own)}

    def turn(
        self,
        name: str,
        work: Callable[[], object],
        before: Callable[[], None] = nothing,
        after: Callable[[], None] = nothing,
    ) -> Contender:
        return Contender(name, lambda: self.together(work), before, after)

    def alone_first(self, work: Callable[[], object]) -> None:
        """Rank 0 does it, and all go on together."""
        if self.number == 0:
            work()
        dist.barrier()

    def table(self, title: str, rows: list[Row], reference: str, note: str = "") -> Table:
        title = f"{title}, {self.job.label}, {self.world} ranks"
        return Table(group="ranks", title=title, rows=tuple(rows), reference=reference, note=note)


def restores(rank: Rank, *, cold: bool) -> Table:
    state, url = rank.state, f"file://{rank.folder / 'ours'}"
    files = newest_payload(url)
    loading = Loading(url, **rank.place)

    def chill_all() -> None:
        for path in files:
            cool(path)

    def chill() -> None:
        if cold:
            rank.alone_first(chill_all)

    def ready() -> None:
        loading.open()
        state.spoil()
        chill()

    def done() -> None:
        state.check(OURS)
        loading.close()

    def broadcast() -> None:
        if rank.number == 0:
            read_into(files, [bytes_of(rank.buffer)])
        dist.broadcast(rank.buffer, 0)
        unpack(rank.buffer, state)

    rows = take_turns(
        [
            rank.turn(EVERY, lambda: read_into(files, views(state)), before=chill),
            rank.turn(BROADCAST, broadcast, before=chill),
            rank.turn(OURS, lambda: loading.restore(state), before=ready, after=done),
        ],
        rank.job.rounds,
        lambda doing: None,
    )
    ours = next(row for row in rows if row.name == OURS)
    if rank.number == 0 and ours.median("read_call_bytes") < 0.95 * state.size_bytes:
        raise ValueError("the state was restored and the counter of read calls did not see it: count another way")
    how = "cold" if cold else "warm"
    return rank.table(f"Restore on every rank, {how}", rows, EVERY, "Bytes read are those of all ranks together.")


def unpack(buffer: torch.Tensor, state: State) -> None:
    offset = 0
    for tensor in state.tensors().values():
        tensor.reshape(-1).view(torch.uint8).copy_(buffer[offset : offset + tensor.nbytes])
        offset += tensor.nbytes


def saves(rank: Rank) -> Table:
    state, folder = rank.state, rank.folder
    packed(state, rank.buffer)
    share = -(-state.size_bytes // rank.world // BLOCK_BYTES) * BLOCK_BYTES
    own = bytes_of(rank.buffer)[rank.number * share : min((rank.number + 1) * share, state.size_bytes)]
    mine, theirs, root = folder / f"share-{rank.number}", folder / "dcp", folder / "parallel"
    rank.alone_first(lambda: new_root(root))
    saving = Saving(f"file://{root}", **rank.place, **PARALLEL)

    def forget(what: Callable[[], object]) -> Callable[[], None]:
        return lambda: rank.alone_first(what)

    rows = take_turns(
        [
            rank.turn(SHARES, lambda: write(mine, own), after=lambda: remove(mine)),
            rank.turn(OURS, lambda: saving.save(state), after=forget(saving.forget)),
            rank.turn(
                DCP,
                lambda: dcp_save(state.tensors(), storage_writer=FileSystemWriter(theirs, sync_files=True)),
                after=forget(lambda: remove(theirs)),
            ),
        ],
        rank.job.rounds,
        lambda doing: None,
        each_round=state.change,
    )
    saving.close()
    return rank.table("Durable save of shared state", rows, SHARES)


def main() -> None:
    torch.set_num_threads(1)
    job, folder = Job.model_validate_json(sys.argv[1]), Path(sys.argv[2])
    rank = Rank(job, folder)
    rank.state.remember()
    tables = (restores(rank, cold=False), restores(rank, cold=True), saves(rank))
    rank.alone_first(nothing)
    if rank.number == 0:
        (folder / RESULT).write_text(Part(tables=tables, figures=()).model_dump_json())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
