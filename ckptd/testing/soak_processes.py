"""The processes of a soak, through all their lives, and when somebody is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from signal import SIGTERM, Signals
from typing import Literal

from ckptd.testing.soak_hand import Orders

END_SECONDS = 120.0
KILL_SECONDS = 10.0
SERVICE_SHARE = 0.4

Victim = Literal["process", "service"]


class Process:
    """One process of the soak. It goes on where its journal ends."""

    def __init__(self, name: str, folder: Path, orders: Callable[[Process], Orders]) -> None:
        self.name = name
        self.journal = folder / f"{name}.jsonl"
        self.log = folder / f"{name}.log"
        self.lives = 0
        self._orders = orders
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The next life."""
        self.lives += 1
        command = [sys.executable, "-m", "ckptd.testing.soak_worker"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None
        with self._process.stdin as orders:
            orders.write(self._orders(self).stored())

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, sig: Signals) -> None:
        """To the process, if it is alive."""
        if self._process is not None:
            self._process.send_signal(sig)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> str | None:
        """Wait until it has ended by itself; what is wrong with that, if anything."""
        if self._process is None:
            return f"{self.name} was never started"
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"{self.name} did not end within {END_SECONDS:g} s"
        if code in (0, -SIGTERM):  # it may be asked to end before it listens
            return None
        tail = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"{self.name} ended with exit code {code}: {''.join(tail)}"


def kills_in_time(random: Random) -> Iterator[tuple[float, Victim]]:
    """Without an end: after how many seconds somebody is killed, and who."""
    at = 0.0
    while True:
        at += KILL_SECONDS * (0.5 + random.random())
        yield at, "service" if random.random() < SERVICE_SHARE else "process"


def kills_in_operations(operations: int) -> Iterator[tuple[float, Victim]]:
    """Three: after how many operations somebody is killed, and who."""
    yield operations * 0.2, "process"
    yield operations * 0.4, "process"
    yield operations * 0.6, "service"  # last, for it takes a while until it is back
