"""Other ways to save and load the same tensors, each with the settings that serve it best. All saves are fsynced.

A peer that is not installed says so; `pip install 'ckptd[bench]'` brings all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load_into
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save_to

from benchmarks.references import sync_files
from benchmarks.states import State

SAFETENSORS, TORCHSNAPSHOT, LIGHTNING = "safetensors", "torchsnapshot", "lightning_fabric"
MOST_FILES = 1_000
DCP_IS_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


@dataclass(frozen=True)
class Peer:
    """`save` returns when the state is durable at a new path; `load` brings the live tensors to what is there."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None] | None = None
    module: str = ""
    many_files: bool = False

    def why_missing(self, tensors: int) -> str:
        """Why it takes no part in a job with so many tensors, if it does not."""
        if self.module and not importlib.util.find_spec(self.module):
            return "not installed"
        if self.many_files and tensors > MOST_FILES:
            return f"would write {tensors:,} files"
        return ""


def torch_save(state: State, path: Path) -> None:
    torch.save(state.tensors(), path)
    sync_files(path)


def torch_save_without_crc(state: State, path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch_save(state, path)
    finally:
        torch.serialization.set_crc32_options(before)


def torch_load(state: State, path: Path) -> None:
    copy_in(torch.load(path, weights_only=True), state)


def torch_load_mapped(state: State, path: Path) -> None:
    copy_in(torch.load(path, weights_only=True, mmap=True), state)


def safetensors_save(state: State, path: Path) -> None:
    importlib.import_module("safetensors.torch").save_file(state.tensors(), path)
    sync_files(path)


def safetensors_load(state: State, path: Path) -> None:
    copy_in(importlib.import_module("safetensors.torch").load_file(path), state)


def dcp_save(state: State, path: Path) -> None:
    """As it comes; its file writer fsyncs by itself."""
    dcp_save_to(state.tensors(), storage_writer=FileSystemWriter(path, sync_files=True), no_dist=True)


def dcp_save_by_two(state: State, path: Path) -> None:
    """Two threads, and a file for each tensor, without which they do not help."""
    writer = FileSystemWriter(path, sync_files=True, thread_count=2, single_file_per_rank=False)
    dcp_save_to(state.tensors(), storage_writer=writer, no_dist=True)


def dcp_load(state: State, path: Path) -> None:
    dcp_load_into(state.tensors(), storage_reader=FileSystemReader(path), no_dist=True)


def torchsnapshot_save(state: State, path: Path) -> None:
    library = importlib.import_module(TORCHSNAPSHOT)
    library.Snapshot.take(str(path), {"state": library.StateDict(**state.tensors())})
    sync_files(path)


def torchsnapshot_load(state: State, path: Path) -> None:
    library = importlib.import_module(TORCHSNAPSHOT)
    library.Snapshot(str(path)).restore({"state": library.StateDict(**state.tensors())})


def lightning_save(state: State, path: Path) -> None:
    """What Lightning's checkpoint plugin does with a local path."""
    importlib.import_module(f"{LIGHTNING}.utilities.cloud_io")._atomic_save(state.tensors(), path)
    sync_files(path)


def copy_in(found: dict[str, torch.Tensor], state: State) -> None:
    live = state.tensors()
    for name, tensor in found.items():
        live[name].copy_(tensor)


PEERS = (
    Peer("torch.save + fsync", torch_save, torch_load),
    Peer("torch.save, CRC off, + fsync", torch_save_without_crc),
    Peer("safetensors + fsync", safetensors_save, safetensors_load, SAFETENSORS),
    Peer("dcp.save", dcp_save, dcp_load),
    Peer("dcp.save, 2 threads", dcp_save_by_two, many_files=True),
    Peer("torchsnapshot + fsync", torchsnapshot_save, torchsnapshot_load, TORCHSNAPSHOT, True),
    Peer("Lightning's atomic save + fsync", lightning_save, None, LIGHTNING),
)


def load_peer_libraries(wanted: bool = True) -> None:
    """Import what is installed now, so that no turn is charged for it."""
    for name in (f"{SAFETENSORS}.torch", TORCHSNAPSHOT, f"{LIGHTNING}.utilities.cloud_io"):
        if wanted and importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    warnings.filterwarnings("ignore", message=DCP_IS_ALONE)


class DcpAsync:
    """`dcp.async_save` with a stager that keeps its buffers from save to save. It wants a process group; this one has
    one rank."""

    def __init__(self, *, process: bool) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(StagingOptions(False, process, False, False))

    def start(self, state: State, path: Path) -> Callable[[], object]:
        """Returns when the state may change again; what to call to wait until it is durable."""
        future: Any = async_save(
            state.tensors(),
            storage_writer=FileSystemWriter(path, sync_files=True),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        wait: Callable[[], object] = future.result
        return wait

    def close(self) -> None:
        with closing(self._stager):
            if dist.is_initialized():
                dist.destroy_process_group()
