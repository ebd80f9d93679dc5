"""Memory of a process that saves in the background, over many saves: the peak beyond what it had, and its growth."""

from __future__ import annotations

from pathlib import Path

from benchmarks.costs import family_bytes, forget_peak, memory_bytes
from benchmarks.jobs import Job
from benchmarks.ours import Saving, new_root
from benchmarks.results import Figure, Part, Row, Table
from benchmarks.rounds import Tell
from benchmarks.states import State, make

YIELDS = frozenset({"memory", "memory growth"})
LOOK_SECONDS = 0.02
SAVE_DEADLINE_SECONDS = 300.0
TEN = 10


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    tell("making the state")
    state = make(job.gigabytes, job.tensors)
    state.change()  # whatever that takes for itself is no cost of saving
    saving = Saving(new_root(folder / "ours"))
    before = Level()
    peaks = []
    for number in range(job.count):
        tell(f"save {number + 1} of {job.count}")
        state.change()
        peaks.append(before.peak_beyond(saving, state))
        saving.forget()
    saving.close()

    row = Row(name="ckptd", samples={"peak_bytes": tuple(peaks), "state_bytes": (float(state.size_bytes),)})
    table = Table(group="memory", title=f"Memory of {job.count} async saves of {job.label}", rows=(row,), note=NOTE)
    at, size = f"{job.count} saves", state.size_bytes
    growth = max(peaks[-TEN:]) - max(peaks[:TEN])
    figures = (
        Figure(figure="memory", at=at, value=max(peaks) / size, best=min(peaks) / size),
        Figure(figure="memory growth", at=at, value=growth / size),
    )
    return Part(tables=(table,), figures=figures)


NOTE = "The larger of the process's own peak and what it and its children hold together, beyond what it held before."


class Level:
    """What the process and its children held before the first save."""

    def __init__(self) -> None:
        self._own, self._family = memory_bytes(), family_bytes()

    def peak_beyond(self, saving: Saving, state: State) -> float:
        """The peak of one save until it is durable, beyond that."""
        forget_peak()
        handle = saving.start(state)
        family = 0
        while not handle.join(LOOK_SECONDS):
            family = max(family, family_bytes())
        handle.wait(SAVE_DEADLINE_SECONDS)
        family = max(family, family_bytes())
        return float(max(memory_bytes(field="VmHWM") - self._own, family - self._family))
