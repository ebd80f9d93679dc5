"""Bounds on what a client can make the service hold: bytes, depth, time to send, and requests at one time."""

from __future__ import annotations

import asyncio
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptd.errors import CkptdError, Invalid, Unavailable
from ckptd.service.problems import problem

MAX_DEPTH = 32
RETRY_SECONDS = 2
# Possessive, and content with a missing end quote: no input makes it go over a byte twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


class Refused(Exception):
    """A request that was not read to its end, and the status that says why."""

    def __init__(self, status: int, error: CkptdError) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error


class Gone(Exception):
    """The client went away before it had sent its request."""


class Limits:
    """ASGI: reads the body within the bounds and hands it on in one piece; answers itself when they are passed."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_deadline_seconds: float, max_requests: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_deadline_seconds = body_deadline_seconds
        self._max_requests = max_requests
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if self._requests >= self._max_requests and not scope["path"].startswith("/health/"):
            full = Unavailable(f"the service has {self._requests} requests under way, as many as it takes")
            return await problem(full, headers={"Retry-After": str(RETRY_SECONDS)})(scope, receive, send)
        self._requests += 1
        try:
            body = await self._body(scope, receive)
            check_depth(body)
        except Refused as refused:
            # What was not read stays on the line, so the line cannot be used again.
            answer = problem(refused.error, status=refused.status, headers={"Connection": "close"})
            await answer(scope, receive, send)
        except Invalid as error:
            await problem(error)(scope, receive, send)
        except Gone:
            return
        else:
            await self._app(scope, _once(body, receive), send)
        finally:
            self._requests -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced[:20]) > self._max_body_bytes:
            raise self._too_large(f"{announced[:20].decode()} announced")
        try:
            async with asyncio.timeout(self._body_deadline_seconds):
                return await self._read(receive)
        except TimeoutError as error:
            what = f"the body did not arrive within {self._body_deadline_seconds:g} s"
            raise Refused(408, Invalid(what, do="Send it again.", field="body")) from error

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_body_bytes:
                raise self._too_large("more sent")
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self, found: str) -> Refused:
        what = f"the body is too large: expected at most {self._max_body_bytes} bytes, {found}"
        do = "Send less; payload goes to the storage, never through the service."
        return Refused(413, Invalid(what, do=do, field="body"))


def check_depth(body: bytes) -> None:
    """`Invalid` for JSON nested deeper than any request of ours; says nothing about other faults."""
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise Invalid(f"the body is nested deeper than {MAX_DEPTH} levels", field="body")


def _once(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, and then what the connection has to say."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
