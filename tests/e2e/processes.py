"""Real processes for the end-to-end tests: started, followed, and always ended by their own pid.

They are forked from one process that has imported torch and the client and done nothing else: an import takes
seconds, and there are a hundred of them.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ckptd.failpoints import VARIABLE

LOOP = Path(__file__).with_name("loop.py")
DEADLINE_SECONDS = 120.0
T = TypeVar("T")
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(["pytest", "torch.distributed", "torch._dynamo", "ckptd_client", "ckptd.storage.s3"])


def run_script(script: Path, arguments: list[str], env: dict[str, str], log: Path) -> None:
    """In the new process: what `python script arguments` would do with this environment, both outputs to `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(env)
    faulthandler.register(signal.SIGUSR1)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def until(what: str, found: Callable[[], T | None]) -> T:
    """Look until `found` finds something. The deadline is for a broken test, not for timing."""
    give_up_at = time.monotonic() + DEADLINE_SECONDS
    while True:
        result = found()
        if result:
            return result
        assert time.monotonic() < give_up_at, f"{what} did not come within {DEADLINE_SECONDS} s"
        time.sleep(0.02)


class Loop:
    """One process of `loop.py`."""

    def __init__(
        self, folder: Path, url: str, run: str, *options: str, failpoints: str = "", env: dict[str, str] | None = None
    ) -> None:
        number = len(list(folder.glob("loop-*.log")))
        self.events_path = folder / f"loop-{number}.jsonl"
        self.log = folder / f"loop-{number}.log"
        arguments = [url, run, str(self.events_path), *options]
        environment = {**os.environ, "CKPTD_JOB": "the-job", **(env or {}), VARIABLE: failpoints}
        self.log.touch()
        self._process = _FORKING.Process(target=run_script, args=(LOOP, arguments, environment, self.log))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def events(self, name: str) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        events = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [event for event in events if event["event"] == name]

    def until(self, name: str, **wanted: object) -> dict[str, Any]:
        """Wait for an event with these values."""

        def found() -> dict[str, Any] | None:
            matching = (e for e in self.events(name) if all(e.get(key) == value for key, value in wanted.items()))
            event = next(matching, None)
            if event is None:
                assert self._process.is_alive(), f"the loop ended with {self._process.exitcode}: {self.output()}"
            return event

        return until(f"{name} {wanted}", found)

    def until_stopped(self) -> None:
        """Wait until the process has been stopped by SIGSTOP."""
        stat = Path(f"/proc/{self.pid}/stat")
        until("the stop", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> int:
        """The exit code; negative for the signal that killed it."""
        self._process.join(DEADLINE_SECONDS)
        if self._process.exitcode is None:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            os.kill(self.pid, signal.SIGUSR1)  # it writes down where all its threads are
            self._process.join(2.0)
            raise AssertionError(f"the loop did not end within {DEADLINE_SECONDS} s, {state}: {self.output()}")
        return self._process.exitcode

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
