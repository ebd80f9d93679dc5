"""The service as a real process, to be killed and started again: for tests, the demo, and trying faults."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ckptd.errors import Unavailable
from ckptd.testing.owned import OwnedProcess

START_SECONDS = 60.0
_LISTENING = re.compile(rb"^ckptd serves .* at (https?://\S+)\n", re.MULTILINE)


class ServiceProcess(OwnedProcess):
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
        super().__init__()
        self.storage_url = storage_url
        self.log = Path(log)
        self.port = port
        self.url = ""
        self._options = [*(["--init"] if init else []), *options]
        self._env = {**os.environ, **(env or {})}
        self._start_seconds = start_seconds

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ckptd", "serve", "--storage", self.storage_url, "--port", str(self.port)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Requests are answered. The port stays the same over restarts."""
        self.url = self._read_url(process)
        self.port = urlsplit(self.url).port or self.port

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
