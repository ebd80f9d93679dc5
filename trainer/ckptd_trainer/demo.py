"""`make demo`: train on two nodes, kill a rank, kill a node, and show that nothing but a few steps was lost.

Two runs with the same settings: one is left alone, one is disturbed. Afterwards the losses of both must be equal to
the last bit at every step, and so must the final weights. Everything lies in one folder, which is named at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from ckptd.testing.processes import ServiceProcess
from ckptd.testing.seaweed import SeaweedProcess
from ckptd.testing.torchrun import Node
from ckptd_trainer.lines import read_lines
from ckptd_trainer.metrics import read_metrics

PHASE_SECONDS = 300.0
LOOK_SECONDS = 0.05
LINE_SECONDS = 5.0
RANKS_PER_NODE = 2


class DemoFailed(Exception):
    """Something that the demo promises does not hold."""


@dataclass
class Kill:
    """One disturbance and what came after it."""

    what: str
    generation: int
    killed_at_step: int
    time: float
    durable_step: int = -1
    resumed_from: int = -1
    resumed_generation: int = -1
    resumed_after_seconds: float = -1.0

    @property
    def steps_lost(self) -> int:
        return self.killed_at_step - self.resumed_from


@dataclass
class Job:
    """A training on two torchrun agents, followed through the progress file of whichever rank is 0."""

    name: str
    folder: Path
    url: str
    env: Mapping[str, str]
    options: Sequence[str]
    say: Callable[[str], None]
    nodes: list[Node] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Job]:
        port = _free_port()
        env = {**self.env, "CKPTD_URL": self.url, "CKPTD_RUN": self.name, "CKPTD_JOB": self.name}
        command = ["-m", "ckptd_trainer", "--output", str(self.folder / self.name), *self.options]
        for number in (1, 2):
            log = self.folder / f"{self.name}-node{number}.log"
            serves = number == 1
            node = Node(command, log, ranks=RANKS_PER_NODE, nodes=2, port=port, serves=serves, job=self.name, env=env)
            self.nodes.append(node)
        try:
            for node in self.nodes:
                node.start()
            yield self
        finally:
            for node in self.nodes:
                node.kill()

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / self.name / "progress.jsonl"
        return [json.loads(line) for line in read_lines(path)] if path.exists() else []

    def until(self, what: str, found: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Follow the training until `found` finds something in its events, with a line now and then."""
        give_up_at, next_line = time.monotonic() + PHASE_SECONDS, time.monotonic()
        while True:
            events = self.events()
            result = found(events)
            if result:
                return result
            if any(node.agent.poll() not in (None, 0) for node in self.nodes):
                raise DemoFailed(
                    f"{self.name}: a torchrun agent ended; look into {self.folder}/{self.name}-node*.log"
                )
            if time.monotonic() > give_up_at:
                raise DemoFailed(f"{self.name}: {what} did not come within {PHASE_SECONDS:.0f} s")
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + LINE_SECONDS
                self.say(f"{self.name}: {_position(events)}, waiting for {what}")
            time.sleep(LOOK_SECONDS)

    def durable_step(self, url: str, *, of: int) -> int:
        """The step of the newest checkpoint of a generation, 0 if it has none yet."""
        checkpoints = httpx.get(f"{url}/v1/runs/{self.name}/checkpoints").raise_for_status().json()
        return max((c["step"] for c in checkpoints if c["generation"] == of), default=0)

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the training; its result."""
        result: dict[str, Any] = self.until("the end", lambda events: _named(events, "end"))[-1]
        for node in self.nodes:
            if node.wait(PHASE_SECONDS) != 0:
                raise DemoFailed(f"{self.name}: torchrun ended with {node.agent.returncode}; look into {node.log}")
        return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for everything (default: a new one in demo-output/)")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--storage", choices=("folder", "s3"), default="folder", help="where the checkpoints go")
    args = parser.parse_args(argv)
    folder = (args.output or Path("demo-output") / time.strftime("%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    console = Console(soft_wrap=True, highlight=False)
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - started:5.0f} s] {text}", markup=False)

    say(f"everything of this demo lies in {folder}")
    try:
        with (
            storage_of(args.storage, folder) as (storage, env),
            ServiceProcess(storage, log=folder / "service.log", env=env) as service,
        ):
            say(f"the service listens at {service.url} and keeps runs on {storage}")
            held = demonstrate(folder, service.url, env, args.quick, say, console)
    except DemoFailed as failure:
        console.print(f"FAILED: {failure}", style="red", markup=False)
        return 1
    console.print(f"\nTo look around:\n{_look_around(folder, args.storage)}", markup=False)
    return 0 if held else 1


@contextmanager
def storage_of(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The storage's URL, and the environment that a process needs to reach it."""
    if kind == "folder":
        yield f"file://{folder}/shared-drive", {}
    else:
        with SeaweedProcess(folder / "s3") as server:
            yield server.url("demo"), server.env


def demonstrate(
    folder: Path, url: str, env: Mapping[str, str], quick: bool, say: Callable[[str], None], console: Console
) -> bool:
    """Both trainings and the tables; whether everything held."""
    epochs, limit, save_every = ("2", "1000", "3") if quick else ("8", "3000", "10")
    options = ["--epochs", epochs, "--limit", limit, "--save-every", save_every]
    options += ["--micro-batch", "16", "--accumulate", "2", "--validate-samples", "32", "--no-tensorboard"]
    kill_rank_at, kill_node_at = (5, 11) if quick else (34, 118)

    with Job("undisturbed", folder, url, env, options, say).running() as job:
        undisturbed = job.finish()
    say(f"undisturbed: finished at step {undisturbed['step']}, loss {undisturbed['loss']:.4f}")

    with Job("disturbed", folder, url, env, options, say).running() as job:
        kills = [
            disturb(job, url, "kill -9 of rank 0", kill_rank_at, lambda: job_kill_rank(job)),
            disturb(job, url, "kill -9 of node 2", kill_node_at, lambda: job_kill_node(job)),
        ]
        disturbed = job.finish()
    say(f"disturbed: finished at step {disturbed['step']}, loss {disturbed['loss']:.4f}")
    return report(folder, undisturbed, disturbed, kills, console)


def disturb(job: Job, url: str, what: str, step: int, strike: Callable[[], None]) -> Kill:
    """Wait for `step` and for something durable to go back to, strike, and wait for the first new step after it."""

    def reached(events: list[dict[str, Any]]) -> Any:
        steps = [e for e in _named(events, "step") if e["step"] >= step]
        return steps if steps and job.durable_step(url, of=steps[-1]["generation"]) else None

    generation = int(job.until(f"step {step}", reached)[-1]["generation"])
    strike()
    struck = time.time()
    last = [e for e in _named(job.events(), "step") if e["generation"] == generation][-1]
    kill = Kill(what, generation, last["step"], struck)
    job.say(f"{job.name}: {what} at step {kill.killed_at_step}")

    def resumed(events: list[dict[str, Any]]) -> Any:
        return [e for e in _named(events, "step") if e["generation"] > generation]

    first = job.until("the first step after it", resumed)[0]
    start = next(e for e in _named(job.events(), "start") if e["generation"] == first["generation"])
    kill.resumed_from, kill.resumed_generation = start["step"], start["generation"]
    kill.resumed_after_seconds = first["time"] - struck
    kill.durable_step = job.durable_step(url, of=generation)
    job.say(f"{job.name}: goes on from step {kill.resumed_from}, {kill.resumed_after_seconds:.1f} s after the kill")
    return kill


def job_kill_rank(job: Job) -> None:
    """Rank 0 may be on either node."""
    for node in job.nodes:
        if 0 in node.workers():
            node.kill_rank(0)
            return
    raise DemoFailed(f"{job.name}: no rank 0 to kill")


def job_kill_node(job: Job) -> None:
    """The second node loses power, and a scheduler starts it again."""
    job.nodes[1].kill()
    job.nodes[1].start()


def report(
    folder: Path, undisturbed: dict[str, Any], disturbed: dict[str, Any], kills: list[Kill], console: Console
) -> bool:
    """Print what happened; whether it is what was promised."""
    table = Table("", "killed at step", "resumed from", "steps lost", "seconds to the first new step", "generation")
    for kill in kills:
        numbers = map(str, (kill.killed_at_step, kill.resumed_from, kill.steps_lost))
        seconds = f"{kill.resumed_after_seconds:.1f}"
        table.add_row(kill.what, *numbers, seconds, f"{kill.generation} -> {kill.resumed_generation}")
    console.print(table)

    losses = {name: read_metrics(folder / name / "metrics.csv") for name in ("undisturbed", "disturbed")}
    one, other = ({row.step: row.loss for row in rows} for rows in losses.values())
    differing = [step for step in one.keys() | other.keys() if one.get(step) != other.get(step)]
    curve = Table("step", "loss, undisturbed", "loss, disturbed", "generation", title="Loss, to the last bit")
    last = max(one)
    for row in losses["disturbed"]:
        if row.step in {1, last} or any(row.step in (kill.resumed_from + 1, kill.killed_at_step) for kill in kills):
            curve.add_row(str(row.step), repr(one.get(row.step)), repr(row.loss), str(row.generation))
    console.print(curve)

    same_weights = undisturbed["weights_sha256"] == disturbed["weights_sha256"]
    promises = {
        f"steps where the losses differ: {len(differing)} of {len(one)}": not differing,
        f"final weights are equal: {same_weights} (sha256 {disturbed['weights_sha256'][:16]}..)": same_weights,
        f"all {last} steps are there": set(one) == set(other) == set(range(1, last + 1)),
    }
    for kill in kills:
        text = f"{kill.what}: resumed from step {kill.resumed_from}, the last durable one ({kill.durable_step})"
        promises[text] = kill.resumed_from == kill.durable_step > 0
    for text, held in promises.items():
        console.print(f"{'ok    ' if held else 'FAILED'} {text}", markup=False, style=None if held else "red")

    console.print("\nTwo sample translations after the disturbed training:")
    _show_translations(folder, console)
    return all(promises.values())


def _show_translations(folder: Path, console: Console) -> None:
    events = [json.loads(line) for line in read_lines(folder / "disturbed" / "progress.jsonl")]
    for sample in _named(events, "validation")[-1]["translations"]:
        lines = (
            f"English:   {sample['source']}",
            f"model:     {sample['output']}",
            f"reference: {sample['reference']}",
        )
        console.print("\n  " + "\n  ".join(lines), markup=False)


def _look_around(folder: Path, kind: str) -> str:
    ckptd = f"{os.path.relpath(Path(sys.executable).parent)}/ckptd"
    storage = f"file://{folder}/shared-drive"
    lines = [
        f"{ckptd} runs --url {storage}    # the service has ended; this reads the storage",
        f"{ckptd} ls disturbed --url {storage}",
        f"{ckptd} latest disturbed --url {storage}",
        f"{ckptd} serve --storage {storage}    # then open http://127.0.0.1:8440/docs",
    ]
    if kind == "s3":
        lines = [f"ls {folder}/s3    # the S3 server has ended; its data and its log are here"]
    return "\n".join(f"  {line}" for line in [*lines, f"less {folder}/disturbed-node1.log"])


def _named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def _position(events: list[dict[str, Any]]) -> str:
    steps = _named(events, "step")
    if not steps:
        return "starting"
    return f"generation {steps[-1]['generation']}, step {steps[-1]['step']}, loss {steps[-1]['loss']:.4f}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
