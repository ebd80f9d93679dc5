"""Real processes for the end-to-end tests: started, followed, and always ended by their own pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
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
        command = [sys.executable, str(LOOP), url, run, str(self.events_path), *options]
        environment = {**os.environ, "CKPTD_JOB": "the-job", **(env or {}), VARIABLE: failpoints}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

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
                assert self.process.poll() is None, f"the loop ended with {self.process.returncode}: {self.output()}"
            return event

        return until(f"{name} {wanted}", found)

    def until_stopped(self) -> None:
        """Wait until the process has been stopped by SIGSTOP."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        until("the stop", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """The exit code; negative for the signal that killed it."""
        return self.process.wait(DEADLINE_SECONDS)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
