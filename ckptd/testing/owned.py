"""A process of one's own, to be killed and started again, and ended by its own pid whatever happens."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self


class OwnedProcess(ABC):
    """`with` starts it and kills it at the end of the block at the latest."""

    stop_seconds: ClassVar[float] = 30.0

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the program."""

    @abstractmethod
    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Return when it does its work. `Unavailable`, with the end of its log, if that does not come."""

    def start(self) -> Self:
        """Returns when it does its work; at once if it does already."""
        if self.alive:
            return self
        self._process = self._launch()
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ValueError(f"this {type(self).__name__} was not started")
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: no goodbye to anybody."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and the exit code once it has ended. SIGKILL if that takes too long."""
        return self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Start again where it was, after a SIGKILL if it still runs."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            if process.stdout is not None:
                process.stdout.close()
