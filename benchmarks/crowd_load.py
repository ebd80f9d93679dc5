"""The crowd: `python -m benchmarks.crowd_load URL PATH COUNT` asks once for each rank, all at once, each on a
connection of its own, and prints what became of them as JSON. It says `asked` when all have sent their question.

A rank that gets 204, 503 or a broken connection asks again a little later, until the deadline.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

DEADLINE_SECONDS = 120.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.1, 1.0


class Asker(asyncio.Protocol):
    """One question on one connection; `status` is the answer's, 0 if none came whole."""

    def __init__(self, question: bytes, load: Load) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._question, self._load, self._said = question, load, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._question)
        self._load.asked()

    def data_received(self, data: bytes) -> None:
        self._said += data

    def connection_lost(self, error: Exception | None) -> None:
        if not self.status.done():
            self.status.set_result(_status(self._said))


def _status(said: bytes) -> int:
    head, separator, body = said.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
    whole = bool(separator) and len(body) == length
    return int(lines[0].split()[1]) if whole else 0


class Load:
    """All ranks together."""

    def __init__(self, url: str, path: str, count: int) -> None:
        place = urlsplit(url)
        self._host, self._port, self._count = str(place.hostname), int(place.port or 80), count
        self._question = f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n\r\n".encode()
        self._asked = 0
        self.all_asked_at = 0.0
        self.told: Counter[str] = Counter()

    def asked(self) -> None:
        self._asked += 1
        if self._asked == self._count:
            self.all_asked_at = time.perf_counter()
            sys.stdout.write("asked\n")
            sys.stdout.flush()

    async def rank(self) -> None:
        pause, give_up_at = FIRST_PAUSE_SECONDS, time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < give_up_at:
            status = await self._ask()
            if status == 200:
                return
            self.told["asked again"] += 1
            if status != 204:
                await asyncio.sleep(pause * (0.5 + random.random()))
                pause = min(2 * pause, LAST_PAUSE_SECONDS)
        self.told["errors"] += 1

    async def _ask(self) -> int:
        loop = asyncio.get_running_loop()
        try:
            _, asker = await loop.create_connection(lambda: Asker(self._question, self), self._host, self._port)
        except OSError:
            return 0
        return await asker.status


async def main() -> None:
    url, path, count = sys.argv[1:]
    load = Load(url, path, int(count))
    began = time.perf_counter()
    await asyncio.gather(*(load.rank() for _ in range(int(count))))
    ended = time.perf_counter()
    found = {
        "seconds": ended - began,
        "waited_seconds": ended - load.all_asked_at,
        "errors": float(load.told["errors"]),
        "asked_again": float(load.told["asked again"]),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
