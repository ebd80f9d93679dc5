"""The job as the harness sees it: two torchrun agents, what their ranks told, and what they are told.

An agent is real: torchrun's own code and its own rendezvous. Only that it and its ranks are forked from a process
that has imported torch already, see `zygote`. `supervise` is the outside: an agent that ended is started again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckptd.testing.chaos import stub
from ckptd.testing.chaos.zygote import Forked, Zygote
from ckptd.testing.torchrun import FRESH_STORE, QUICK_RENDEZVOUS, end

NODES, RANKS_PER_NODE = 2, 2
WORLD = NODES * RANKS_PER_NODE
PHASE_SECONDS = 120.0
LOOK_SECONDS = 0.02
MODULES = ["torch.distributed.run", "torch._dynamo", "ckptd_client", "ckptd.storage.s3", "ckptd_trainer.chaos_rank"]
Event = dict[str, Any]
T = TypeVar("T")


class ChaosFailed(AssertionError):
    """The job did not do in time what it must."""


class Node:
    """One agent. Number 1 holds the rendezvous: when it dies, so does the other one."""

    def __init__(
        self, number: int, zygote: Zygote, command: list[str], log: Path, port: int, env: Mapping[str, str],
        host: str = "127.0.0.1", address: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        rendezvous = f"{QUICK_RENDEZVOUS},is_host={int(number == 1)}"
        self.number, self.log, self._zygote = number, log, zygote
        self._argv = [
            "-m", "ckptd_trainer.chaos_agent", f"--nnodes={NODES}", f"--nproc-per-node={RANKS_PER_NODE}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", "--rdzv-id=chaos", f"--rdzv-conf={rendezvous}",
            f"--local-addr={address}", "--max-restarts=1000000", "--monitor-interval=0.1", "--no-python",
            sys.executable, "-SE", stub.__file__, *command,
        ]  # fmt: skip
        self._env = {
            **os.environ, **FRESH_STORE, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            stub.SOCKET: str(zygote.path), "CHAOS_NODE": str(number), **env,
        }  # fmt: skip
        self._agent: Forked | None = None
        self.starts = 0

    def start(self) -> None:
        self.kill_agent()
        self.starts += 1
        self._agent = self._zygote.fork(self._argv, self._env, self.log)

    @property
    def alive(self) -> bool:
        return self._agent is not None and self._agent.poll() is None

    def kill_agent(self) -> None:
        """The agent alone: its ranks live on as orphans."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None


class Job:
    """A training, its control file and its events. `control` may be changed by `tell`; ranks look at every step."""

    def __init__(
        self, folder: Path, run: str, *, url: str, seed: int, save_every: int = 2, pause: float = 0.0
    ) -> None:
        self.folder, self.run = folder, run
        self.events: list[Event] = []
        self.damaged: set[str] = set()
        """Saves whose bytes were damaged on purpose."""
        self._events, self._control = folder / f"{run}.jsonl", folder / f"{run}-control.json"
        self._read = 0
        self.control: dict[str, Any] = {
            "limit": 0, "orders": "", "url": url, "harness": os.getpid(), "end": False, "again": False, "seed": seed,
            "save_every": save_every, "pause": pause, "group_seconds": 60.0, "parallel": seed % 2 == 1,
        }  # fmt: skip
        self.nodes: list[Node] = []
        self.tell()

    def tell(self, **control: Any) -> None:
        self.control.update(control)
        new = self._control.with_suffix(".new")
        new.write_text(json.dumps(self.control))
        new.replace(self._control)

    def start(
        self, zygotes: list[Zygote], port: int, envs: list[dict[str, str]],
        addresses: Sequence[str] = ("127.0.0.1", "127.0.0.1"),
    ) -> None:  # fmt: skip
        for number, (zygote, env) in enumerate(zip(zygotes, envs, strict=True), 1):
            command = ["-m", "ckptd_trainer.chaos_rank", self.run, str(self._control)]
            env = {**env, stub.EVENTS: str(self._events), "CKPTD_JOB": "chaos"}
            log = self.folder / f"{self.run}-node{number}.log"
            node = Node(number, zygote, command, log, port, env, host=addresses[0], address=addresses[number - 1])
            self.nodes.append(node)
        for node in self.nodes:
            node.start()

    def look(self) -> list[Event]:
        """Read what was told since the last look; all events."""
        if self._events.exists():
            with self._events.open("rb") as stream:
                stream.seek(self._read)
                data = stream.read()
            whole = data.rpartition(b"\n")[0]
            if whole:
                self._read += len(whole) + 1
                self.events += [json.loads(line) for line in whole.split(b"\n")]
        return self.events

    def named(self, name: str, **wanted: object) -> list[Event]:
        return [e for e in self.events if e["event"] == name and all(e.get(k) == v for k, v in wanted.items())]

    # Where it is.

    @property
    def generation(self) -> int:
        """The newest one that all ranks started; 0 if there is none."""
        return max((g for g, starts in self.starts().items() if len(starts) == WORLD), default=0)

    def starts(self) -> dict[int, dict[int, Event]]:
        """What each rank of each generation told at its start."""
        found: dict[int, dict[int, Event]] = {}
        for event in self.named("start"):
            found.setdefault(event["generation"], {})[event["rank"]] = event
        return found

    def ranks(self) -> dict[int, Event]:
        """The starts of the newest generation, by rank: process ids and nodes."""
        return self.starts().get(self.generation, {})

    @property
    def step(self) -> int:
        """The last step of the newest generation."""
        generation = self.generation
        start = self.ranks()[0]["step"] if generation else 0
        steps = (e["step"] for e in self.named("step", generation=generation, rank=0))
        return max(steps, default=int(start))

    def durable(self) -> dict[int, str]:
        """The newest acknowledged save of each step."""
        return {event["step"]: event["save"] for event in self.named("durable")}

    # Waiting.

    def until(
        self, what: str, found: Callable[[], T | None], *, seconds: float = PHASE_SECONDS, watch: bool = True
    ) -> T:
        """Look until `found` finds something; agents that ended are started again unless `watch` is off."""
        give_up_at = time.monotonic() + seconds
        while True:
            self.look()
            result = found()
            if result:
                return result
            if watch:
                self.supervise()
            if time.monotonic() > give_up_at:
                last = [e for e in self.events if e["event"] != "step"][-12:]
                raise ChaosFailed(f"{what} did not come within {seconds:.0f} s; the last events: {last}")
            time.sleep(LOOK_SECONDS)

    def supervise(self) -> None:
        """What a scheduler does."""
        for node in self.nodes:
            if not node.alive:
                node.start()

    def settle(self, limit: int) -> None:
        """Let all ranks train up to `limit`, and return when they wait there with their saves settled."""
        self.tell(limit=limit)
        generation = self.generation
        self.until(f"step {limit} of generation {generation}", lambda: self._all_at(limit))

    def _all_at(self, limit: int) -> bool:
        generation = self.generation
        return len({e["rank"] for e in self.named("gate", generation=generation, step=limit)}) == WORLD

    def until_generation(self, after: int) -> int:
        """A generation younger than `after` that all ranks started."""
        self.until(f"a generation after {after}", lambda: self.generation > after)
        return self.generation

    def finish(self) -> None:
        """All ranks stop where they wait, and so do the agents."""
        self.tell(end=True)
        for node in self.nodes:
            self.until("the end", lambda node=node: not node.alive, watch=False)  # type: ignore[misc]

    def close(self) -> None:
        """Kill the agents, then every rank that ever told its process id and still lives."""
        for node in self.nodes:
            node.kill_agent()
        self.look()
        for pid in {event["pid"] for event in self.named("start")} - {e["pid"] for e in self.named("gone")}:
            if is_rank(pid):
                end(pid)
        self.tell(harness=-1)  # those that had not told it yet end at their next look


def is_rank(pid: int) -> bool:
    """Whether a process lives and is one of ours: its number may have been given to another."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and b"ckptd.testing.chaos.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def signal_rank(event: Event, number: signal.Signals) -> None:
    os.kill(int(event["pid"]), number)
