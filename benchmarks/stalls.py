"""Async saves: how long training stands still, and how long until the state is durable."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import torch

from benchmarks.jobs import Job
from benchmarks.ours import Saving, new_root, prepare
from benchmarks.peers import DcpAsync, load_peer_libraries
from benchmarks.references import bytes_of, remove, warm_buffer, write
from benchmarks.results import Figure, Part, Table, ratio
from benchmarks.rounds import Contender, Tell, take_turns
from benchmarks.states import State, make, packed

YIELDS = frozenset({"stall/memcpy", "first stall/memcpy", "durable/dcp"})
MEMCPY, OURS, FIRST = "memcpy, then write + fsync in a thread", "ckptd", "ckptd, first save after prepare()"
THREAD, PROCESS = "DCP async, thread", "DCP async, process"

Start = Callable[[], Callable[[], object]]


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    load_peer_libraries(job.peers)
    tell("making the state")
    state = make(job.gigabytes, job.tensors)
    copying = Copying(state, folder / "copied")
    by_thread, by_process = DcpAsync(process=False), DcpAsync(process=True)
    ours = Saving(new_root(folder / "ours"))
    first = First(state, folder)
    target = folder / "dcp"
    contenders = [
        Contender(MEMCPY, lambda: in_background(copying.start), after=copying.forget),
        Contender(OURS, lambda: in_background(lambda: ours.start(state).wait), after=ours.forget),
        Contender(FIRST, lambda: in_background(first.start), before=first.prepare, after=first.forget),
        Contender(
            THREAD,
            lambda: in_background(lambda: by_thread.start(state, target)),
            after=lambda: remove(target),
            peer=True,
            missing=job.left_out,
        ),
        Contender(
            PROCESS,
            lambda: in_background(lambda: by_process.start(state, target)),
            after=lambda: remove(target),
            peer=True,
            missing=job.left_out,
        ),
    ]
    rows = take_turns(contenders, job.rounds, tell, each_round=state.change)
    ours.close()
    by_thread.close()
    by_process.close()
    title = f"Async save, {job.label}: seconds that training stands still, and until durable"
    note = "CPU seconds are those of the training's process, until the state is durable."
    table = Table(group="stalls", title=title, rows=tuple(rows), reference=MEMCPY, note=note)
    figures: list[Figure] = [
        *ratio("stall/memcpy", job.label, table.row(OURS), table.row(MEMCPY)),
        *ratio("first stall/memcpy", job.label, table.row(FIRST), table.row(MEMCPY)),
        *ratio("durable/dcp", job.label, table.row(OURS), table.row(THREAD), "durable_seconds"),
    ]
    return Part(tables=(table,), figures=tuple(figures))


def in_background(start: Start) -> dict[str, float]:
    """Seconds until the state may change again, and until it is durable."""
    began = time.perf_counter()
    wait = start()
    stalled = time.perf_counter()
    wait()
    return {"seconds": stalled - began, "durable_seconds": time.perf_counter() - began}


class Copying:
    """The least an async save can do: one copy into a buffer it has, and a thread that writes it."""

    def __init__(self, state: State, path: Path) -> None:
        self._state, self._path = state, path
        self._buffer: torch.Tensor = warm_buffer(state.size_bytes)

    def start(self) -> Callable[[], object]:
        packed(self._state, self._buffer)
        thread = Thread(target=write, args=(self._path, bytes_of(self._buffer)[: self._state.size_bytes]))
        thread.start()
        return thread.join

    def forget(self) -> None:
        remove(self._path)


class First:
    """A client that was told of its first save ahead of time, new for each turn."""

    def __init__(self, state: State, folder: Path) -> None:
        self._state, self._folder = state, folder / "first"
        self._saving: Saving | None = None

    def prepare(self) -> None:
        self._saving = Saving(new_root(self._folder))
        prepare(self._saving.client, self._state)

    def start(self) -> Callable[[], object]:
        assert self._saving is not None
        return self._saving.start(self._state).wait

    def forget(self) -> None:
        if self._saving is not None:
            self._saving.close()
        remove(self._folder)
