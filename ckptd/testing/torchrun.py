"""torchrun agents as tests and the demo need them: started, found, killed like a machine that loses power.

A `Node` is one agent with its workers. `kill` sends SIGKILL to all of them at once, which is how a node dies;
`kill_agent` leaves the workers behind as orphans that go on training, which happens too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

# Without it restarted gloo ranks look for the dead ones: the agent's store outlives them (pytorch issue 135712).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
QUICK_RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


class Node:
    """One torchrun agent on this machine. `log` gets what the agent and its workers print."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        ranks: int,
        nodes: int = 1,
        port: int | None = None,
        serves: bool = True,
        job: str = "job",
        max_restarts: int = 5,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is what follows torchrun's own options: `["-m", "ckptd_trainer", ..]` or a script. With `nodes`
        over 1, `port` is the rendezvous's, and exactly one node `serves` it: when that one dies, so does the job."""
        rendezvous = ["--standalone"] if nodes == 1 else _c10d(port, nodes, job, serves)
        options = [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}", "--monitor-interval=0.1"]
        self.log = log
        self._command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *options, *command]
        self._env = {**os.environ, **FRESH_STORE, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    @property
    def agent(self) -> subprocess.Popen[bytes]:
        if self._agent is None:
            raise ValueError("this node was not started")
        return self._agent

    def workers(self) -> dict[int, int]:
        """The living workers' process ids, by rank."""
        found = {}
        for pid in _children(self.agent.pid):
            rank = _environment(pid).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def kill_rank(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal one worker; its process id. `KeyError` if there is no such rank here now."""
        pid = self.workers()[rank]
        os.kill(pid, number)
        return pid

    def kill_agent(self) -> list[int]:
        """The agent dies, the workers live on as orphans; their process ids, for the caller to end."""
        orphans = list(_children(self.agent.pid))
        self.agent.kill()
        self.agent.wait()
        return orphans

    def kill(self) -> None:
        """The whole node is gone at once. Nothing to do for one that has finished or never started."""
        if self._agent is not None:
            for pid in self.kill_agent():
                end(pid)

    def wait(self, deadline_seconds: float) -> int:
        """The agent's exit code. `TimeoutExpired` past the deadline."""
        return self.agent.wait(deadline_seconds)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self.start() if self._agent is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def end(pid: int) -> None:
    """SIGKILL a process that may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP a process, and let it go on at the end, whatever happened."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _c10d(port: int | None, nodes: int, job: str, serves: bool) -> list[str]:
    return [
        f"--nnodes={nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-id={job}",
        f"--rdzv-conf={QUICK_RENDEZVOUS},is_host={int(serves)}",
        "--local-addr=127.0.0.1",
    ]


def _children(parent: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(int(entry.name)) == parent:
            yield int(entry.name)


def _parent(pid: int) -> int | None:
    try:
        # The name in parentheses may hold anything; the fields after it are fixed.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _environment(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if b"=" in item)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
