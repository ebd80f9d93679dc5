"""Work that takes long and that its caller follows: one line of JSON after another on one answer.

    {"read_bytes": 16777216}
    {"answer": {...}}          or {"problem": {...}}, as the last line

What is done in a moment has only the last line, and its errors are answers of their own, as everywhere. A caller who
goes away ends the work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from ckptd.errors import CkptdError, Unavailable
from ckptd.service.problems import body_of
from ckptd.service.threads import Threads
from ckptd.watched import Watch

MEDIA_TYPE = "application/x-ndjson"
MOMENT_SECONDS = 0.25
BETWEEN_SECONDS = 1.0


class Followed(BaseModel):
    """A line: the last one has the answer or the problem."""

    read_bytes: int | None = None
    answer: Any = None
    problem: dict[str, Any] | None = None


class _Work:
    """Runs on a thread, tells here how far it is, and learns here that nobody waits for it any more."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.left = False

    def watch(self, count: int) -> None:
        self.read_bytes += count
        if self.left:
            raise Unavailable("nobody waits for the end of this any more", do="Ask again.")


async def followed(threads: Threads, call: Callable[[Watch], BaseModel]) -> Response:
    """`call` on one of `threads`, as an answer to be followed."""
    work = _Work()
    future = threads.run(lambda: call(work.watch))
    await asyncio.wait([future], timeout=MOMENT_SECONDS)
    if future.done():
        return Response(_line(answer=future.result().model_dump(mode="json")), media_type=MEDIA_TYPE)
    return StreamingResponse(_lines(work, future), media_type=MEDIA_TYPE)


async def _lines(work: _Work, future: asyncio.Future[BaseModel]) -> AsyncIterator[bytes]:
    try:
        while not future.done():
            yield _line(read_bytes=work.read_bytes)
            await asyncio.wait([future], timeout=BETWEEN_SECONDS)
        try:
            yield _line(answer=future.result().model_dump(mode="json"))
        except CkptdError as error:
            yield _line(problem=body_of(error).model_dump())
    finally:
        work.left = True
        future.add_done_callback(_seen)


def _seen(future: asyncio.Future[BaseModel]) -> None:
    """Nobody is told of an error any more."""
    if not future.cancelled():
        future.exception()


def _line(**said: Any) -> bytes:
    return json.dumps(said, default=str).encode() + b"\n"
