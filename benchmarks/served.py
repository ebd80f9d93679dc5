"""A bare FastAPI route in a process of its own: what an answer costs when nobody has to find it.

`python -m benchmarks.served` serves the bytes that it gets on standard input.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Response

from ckptd.testing.owned import OwnedProcess

START_SECONDS = 60.0


class BareRoute(OwnedProcess):
    """`url` answers every GET with the same bytes."""

    def __init__(self, answer: bytes, *, log: Path) -> None:
        super().__init__()
        self.url = ""
        self._answer, self._log = answer, log

    def _launch(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.served"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdin is not None
        process.stdin.write(self._answer)
        process.stdin.close()
        return process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.url = process.stdout.readline().decode().strip()
        give_up_at = time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(self.url).raise_for_status()
                return
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise
            time.sleep(0.05)


def main() -> None:
    answer = sys.stdin.buffer.read()
    app = FastAPI()

    @app.get("/")
    async def tell() -> Response:
        return Response(answer, media_type="application/json")

    config = uvicorn.Config(app, log_config=None, access_log=False, port=0)
    listener = config.bind_socket()
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/\n")
    sys.stdout.flush()
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
