"""From the death of a rank to the first new training step: with ckptd, and the same job without it.

Both jobs run under torchrun at the same time and are killed in turns; the one whose turn it is not waits in its step.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from benchmarks.ours import RUN, new_root
from benchmarks.results import Figure, Part, Row, Table
from benchmarks.rounds import Contender, Tell, take_turns
from ckptd.testing.processes import ServiceProcess
from ckptd.testing.torchrun import Node

YIELDS = frozenset({"restart"})
BARE, OURS = "torchrun alone", "with ckptd"
STEP_DEADLINE_SECONDS = 180.0
LOOK_SECONDS = 0.01
STEPS_BEFORE = 12  # a save is durable by then


class Training:
    """`benchmarks.restart_rank` on some ranks, followed through what rank 0 writes."""

    def __init__(self, folder: Path, name: str, ranks: int, env: dict[str, str]) -> None:
        self._events, self._pause = folder / f"{name}.jsonl", folder / f"{name}.pause"
        command = ["-m", "benchmarks.restart_rank", str(self._events), str(self._pause)]
        self.node = Node(command, folder / f"{name}.log", ranks=ranks, max_restarts=100, env=env)
        self._victim = ranks - 1
        self._events.touch()

    def restart(self) -> dict[str, float]:
        """Kill a rank; seconds to the first step of the ranks that come after."""
        steps = self.events()
        before = steps[-1]["pid"]
        self.node.kill_rank(self._victim)
        struck = time.time()
        first = self._until(lambda event: event["pid"] != before and event["time"] > struck)
        return {"seconds": first["time"] - struck, "step": float(first["step"])}

    def go(self) -> None:
        """Out of the pause, and far enough to be killed."""
        self._pause.unlink(missing_ok=True)
        seen = len(self.events())
        self._until(lambda event: True, after=seen + STEPS_BEFORE)

    def pause(self) -> None:
        self._pause.touch()

    def events(self) -> list[dict[str, Any]]:
        lines = self._events.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def _until(self, wanted: Any, after: int = 0) -> dict[str, Any]:
        give_up_at = time.monotonic() + STEP_DEADLINE_SECONDS
        while time.monotonic() < give_up_at:
            found = next((event for event in self.events()[after:] if wanted(event)), None)
            if found is not None:
                return found
            if self.node.agent.poll() is not None:
                raise RuntimeError(f"torchrun ended with {self.node.agent.returncode}: {self.node.output()[-2000:]}")
            time.sleep(LOOK_SECONDS)
        raise TimeoutError(f"no step within {STEP_DEADLINE_SECONDS:g} s: {self.node.output()[-2000:]}")


def measure(job: Job, folder: Path, tell: Tell) -> Part:
    with ServiceProcess(new_root(folder / "restart"), log=folder / "service.log") as service:
        bare = Training(folder, "bare", job.count, {"CKPTD_URL": ""})
        ours = Training(folder, "ours", job.count, {"CKPTD_URL": service.url, "CKPTD_RUN": RUN})
        with bare.node, ours.node:
            for training in (bare, ours):
                tell("starting the ranks")
                training.go()
                training.pause()
            contenders = [
                Contender(name, training.restart, before=training.go, after=training.pause)
                for name, training in ((BARE, bare), (OURS, ours))
            ]
            rows = take_turns(contenders, job.rounds, tell, warm_up=0)
    return _part(rows, job)


def _part(rows: list[Row], job: Job) -> Part:
    title = f"Kill of a rank to the first new step, {job.count} ranks"
    rows = [row.only("seconds", "step") for row in rows]
    table = Table(group="restart", title=title, rows=tuple(rows), reference=BARE, note=NOTE)
    bare, ours = table.row(BARE), table.row(OURS)
    if min(ours.samples["step"]) <= 1:
        raise ValueError("a restarted training began anew: there was no checkpoint to go on from")
    value = ours.median("seconds") - bare.median("seconds")
    best = ours.best("seconds") - bare.best("seconds")
    return Part(tables=(table,), figures=(Figure(figure="restart", at=f"{job.count} ranks", value=value, best=best),))


NOTE = "The state is small, so that reading it takes no time. The job without ckptd starts again from nothing."
