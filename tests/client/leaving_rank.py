"""One rank as a process of its own: it resumes, saves, and leaves at once, in the way it is told to.

    python leaving_rank.py RANK WORLD STORE_PORT STORAGE HOW

HOW: `ends` (off the end of the program, without `close`), `vanishes` (without a save, at once), `closes`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ckptd_client import CheckpointClient

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip


def forbidden(*args: Any, **options: Any) -> Any:
    raise AssertionError("a collective was called")


def main(rank: int, world: int, port: int, storage: str, how: str) -> None:
    torch.set_num_threads(1)
    client = CheckpointClient(storage, "en-it", rank=rank, world_size=world)
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in COLLECTIVES:
        setattr(dist, name, forbidden)
        setattr(dist.distributed_c10d, name, forbidden)
    model = torch.nn.Linear(200, 200)
    step = client.restore({"model": model})
    if how == "vanishes":
        os._exit(0)
    handle = client.save({"model": model}, step=step + 1, per_rank={"rank": rank})
    print(f"rank {rank} {handle.status}")
    if how == "closes":
        client.close()
        print(f"rank {rank} {handle.status}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
