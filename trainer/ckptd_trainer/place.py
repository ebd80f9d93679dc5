"""Where this process stands in the job, and what the ranks tell each other before training.

Only the process group's store is used here, never a shared disk and never a collective of the training
backend.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ckptd.errors import Invalid, Unavailable


@dataclass(frozen=True)
class Place:
    """What torchrun says about this process; alone (rank 0 of 1) without torchrun."""

    rank: int
    local_rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Rank 0 of the job, on whichever host that is: it alone writes metrics."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"


def find_place(device: str = "auto") -> Place:
    """Read RANK, LOCAL_RANK and WORLD_SIZE. Every process, before its process group forms."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda" and torch.cuda.device_count() <= local_rank:
        raise Invalid(
            f"setting device is 'cuda': local rank {local_rank} has no GPU, this host has "
            f"{torch.cuda.device_count()}",
            do="Start as many processes per host as it has GPUs, or use --device cpu.",
            field="device",
        )
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    where = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    return Place(int(os.environ.get("RANK", "0")), local_rank, int(os.environ.get("WORLD_SIZE", "1")), where)


@contextmanager
def process_group(place: Place, timeout_seconds: float) -> Iterator[Store]:
    """Form the group of all ranks; yields its store, leaves the group at the end. Every rank."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if place.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.cuda.set_device(place.device)
    if "MASTER_ADDR" in os.environ:
        store: Store = next(rendezvous("env://", place.rank, place.world, timeout=timeout))[0]
    else:
        store = HashStore()
    dist.init_process_group(place.backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    try:
        yield PrefixStore("ckptd-trainer", store)
    finally:
        dist.destroy_process_group()


def warn_about_restarts(place: Place) -> None:
    """Say so when torchrun may restart the ranks but is set up such that they cannot meet again."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if place.is_first and restarts and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        print(
            "warning: torchrun may restart the ranks, but with its shared store restarted gloo ranks look for "
            "the dead ones. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment, and use "
            "--standalone or --rdzv-backend=c10d.",
            file=sys.stderr,
            flush=True,
        )


def from_first_rank(store: Store, place: Place, name: str, make: Callable[[], str]) -> str:
    """What `make` returns on rank 0, on every rank; `make` runs on rank 0 only."""
    if place.is_first:
        store.set(name, make())
    return _read(store, name, owner=0).decode()


def agree(store: Store, place: Place, name: str, digest: str) -> list[dict[str, object]]:
    """Check that all ranks hold the same digest of the thing called `name`; every rank.

    Returns rank, host and process id of all ranks, in rank order. Raises `Invalid` on every rank that sees a
    difference, with the hosts that differ.
    """
    mine = {"rank": place.rank, "host": socket.gethostname(), "pid": os.getpid(), "digest": digest}
    store.set(f"{name}/{place.rank}", json.dumps(mine))
    ranks = [json.loads(_read(store, f"{name}/{rank}", owner=rank)) for rank in range(place.world)]
    others = [r for r in ranks if r["digest"] != ranks[0]["digest"]]
    if others:
        listed = ", ".join(f"rank {r['rank']} on {r['host']} {r['digest']}" for r in others[:8])
        raise Invalid(
            f"the ranks hold different {name}: rank 0 on {ranks[0]['host']} {ranks[0]['digest']}, but {listed}",
            do="Give all hosts the same data, settings and versions of pycountry, django and torch.",
            field="dataset",
        )
    return [{key: r[key] for key in ("rank", "host", "pid")} for r in ranks]


def _read(store: Store, key: str, *, owner: int) -> bytes:
    try:
        return bytes(store.get(key))
    except dist.DistStoreError as error:
        raise Unavailable(f"rank {owner} did not publish {key!r} in time: {error}", rank=owner) from error
