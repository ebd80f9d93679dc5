"""How much a training step is slowed down while a save is under way: a real small model in a real loop."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.jobs import Job
from benchmarks.ours import Saving, new_root
from benchmarks.peers import DcpAsync, load_peer_libraries
from benchmarks.references import remove
from benchmarks.results import Figure, Part, Row, Table
from benchmarks.rounds import Contender, Tell, take_turns
from benchmarks.stalls import MEMCPY, OURS, PROCESS, THREAD, Copying
from benchmarks.states import make

YIELDS = frozenset({"step, median", "step, worst"})
QUIET_STEPS = 20
LEAST_STEPS = 5
SHOWN = ("step_seconds", "step_ratio", "worst_step_ratio", "worst_alone_ratio", "steps")

Start = Callable[[], Callable[[], object]]


class Training:
    """A Transformer layer on one thread, forward, backward and AdamW: some tens of milliseconds a step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self._model = nn.Sequential(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True), nn.Linear(256, 256)
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batch = torch.randn(8, 64, 256)

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self._optimizer.zero_grad()
        loss = (self._model(self._batch) - self._batch).square().mean()
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - began


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    load_peer_libraries(job.peers)
    tell("making the state")
    state = make(job.gigabytes, job.tensors)
    training = Training()
    copying = Copying(state, folder / "copied")
    by_thread, by_process = DcpAsync(process=False), DcpAsync(process=True)
    ours = Saving(new_root(folder / "ours"))
    target = folder / "dcp"

    def turn(name: str, start: Start, forget: Callable[[], None], *, peer: bool = False) -> Contender:
        missing = job.left_out if peer else ""
        return Contender(name, lambda: beside(training, start), after=forget, peer=peer, missing=missing)

    contenders = [
        turn(MEMCPY, copying.start, copying.forget),
        turn(OURS, lambda: ours.start(state).wait, ours.forget),
        turn(THREAD, lambda: by_thread.start(state, target), lambda: remove(target), peer=True),
        turn(PROCESS, lambda: by_process.start(state, target), lambda: remove(target), peer=True),
    ]
    rows = take_turns(contenders, job.rounds, tell, each_round=state.change)
    ours.close()
    by_thread.close()
    by_process.close()
    title = f"Training steps while {job.label} are saved"
    shown = tuple(row.only(*SHOWN) for row in rows)
    table = Table(group="training", title=title, rows=shown, note=NOTE)
    return Part(tables=(table,), figures=figures_of(table.row(OURS), job.label))


NOTE = (
    "Each save follows steps without one; median and worst step of a save are over the median of those. The worst "
    "step is that of one save, its median over the rounds; the stall of the save itself lies between steps."
)


def beside(training: Training, start: Start) -> dict[str, float]:
    """Steps alone, then a save, and steps until it is durable."""
    quiet = [training.step() for _ in range(QUIET_STEPS)]
    wait = start()
    over = threading.Event()
    errors: list[BaseException] = []

    def follow() -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        finally:
            over.set()

    follower = threading.Thread(target=follow)
    follower.start()
    steps: list[float] = []
    while not over.is_set() or len(steps) < LEAST_STEPS:
        steps.append(training.step())
    follower.join()
    if errors:
        raise errors[0]
    normal = statistics.median(quiet)
    return {
        "step_seconds": normal,
        "step_ratio": statistics.median(steps) / normal,
        "worst_step_ratio": max(steps) / normal,
        "worst_alone_ratio": max(quiet) / normal,
        "steps": float(len(steps)),
    }


def figures_of(ours: Row, at: str) -> tuple[Figure, ...]:
    return tuple(
        Figure(figure=name, at=at, value=ours.median(key), best=ours.best(key))
        for name, key in (("step, median", "step_ratio"), ("step, worst", "worst_step_ratio"))
    )
