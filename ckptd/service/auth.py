"""The token: with one set, every path but health and the documentation wants it."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from ckptd.errors import Unauthorized
from ckptd.service.problems import problem

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/openapi.json"})


class TokenGate:
    """ASGI: lets requests with `Authorization: Bearer <token>` pass, before anything of them is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = _digest(token.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(scope):
            return await self._app(scope, receive, send)
        refused = problem(
            Unauthorized(f"{scope['method']} {scope['path'][:300]}: the token is missing or another one"),
            headers={"WWW-Authenticate": 'Bearer realm="ckptd"'},
        )
        await refused(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # Digests have one length, so the time tells nothing about the token.
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip()), self._expected)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
