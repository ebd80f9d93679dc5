"""The service as a real process, to be killed and started again: for tests, the demo, and trying faults."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from ckptd.errors import Unavailable

START_SECONDS = 60.0
STOP_SECONDS = 30.0
_LISTENING = re.compile(rb"^ckptd serves .* at (https?://\S+)\n", re.MULTILINE)


class ServiceProcess:
    """`with ServiceProcess("file:///mnt/ckpts", log=folder / "service.log") as service: ... service.url`.

    The process is this object's own: it is ended by its pid, always, at the end of the `with` block at the latest.
    """

    def __init__(
        self,
        storage_url: str,
        *,
        log: str | Path,
        port: int = 0,
        init: bool = True,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.storage_url = storage_url
        self.log = Path(log)
        self.port = port
        self.url = ""
        self._options = [*(["--init"] if init else []), *options]
        self._env = {**os.environ, **(env or {})}
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Returns when requests are answered. `Unavailable`, with the end of the log, if that does not come."""
        if self.alive:
            return self
        command = [sys.executable, "-m", "ckptd", "serve", "--storage", self.storage_url, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
            )
        try:
            self.url = self._read_url(self._process)
        except BaseException:
            self.kill()
            raise
        self.port = urlsplit(self.url).port or self.port
        return self

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ValueError("the service was not started")
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL: no goodbye to anybody."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and the exit code once it has ended. SIGKILL if that takes too long."""
        return self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Start again on the same port, after a SIGKILL if it still runs."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _end(self, sig: signal.Signals) -> int:
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(sig)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            if process.stdout is not None:
                process.stdout.close()

    def _read_url(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the line that says where the service listens."""
        assert process.stdout is not None
        give_up_at = time.monotonic() + self._start_seconds
        said = b""
        while True:
            left = give_up_at - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise self._failed(f"said nothing within {self._start_seconds:g} s")
            chunk = os.read(process.stdout.fileno(), 4096)
            if not chunk:
                raise self._failed(f"ended with exit code {process.wait()}")
            said += chunk
            found = _LISTENING.search(said)
            if found is not None:
                return found.group(1).decode()

    def _failed(self, what: str) -> Unavailable:
        tail = self.log.read_text(errors="replace").strip().splitlines()[-10:]
        return Unavailable(
            f"the service on {self.storage_url} {what}: {' | '.join(tail) or 'no log'}", do=f"Look into {self.log}."
        )
