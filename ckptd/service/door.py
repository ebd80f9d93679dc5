"""The two questions that all ranks of a job ask at the same moment, answered before the framework begins: where does
my attempt start from, and what became of this save? A job of 10,000 ranks asks each of them 10,000 times.

    GET /v1/runs/{run}/attempts/{attempt}/answer?fallback_of=3&wait_seconds=2
    GET /v1/runs/{run}/saves/{save}?wait_seconds=2

`pinned_answer` and `status_of_save` are what the routes of the same paths say, too. A request that is not exactly as
above goes on to them, so that what is wrong with it is told as everywhere.
"""

from __future__ import annotations

import re

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ckptd import layout
from ckptd.errors import CkptdError
from ckptd.service.context import Service
from ckptd.service.pinned import body_of
from ckptd.service.problems import problem

ANSWER = re.compile(rf"/v1/runs/({layout.RUN_NAME.pattern})/attempts/({layout.TOKEN_ID.pattern})/answer")
STATUS = re.compile(rf"/v1/runs/({layout.RUN_NAME.pattern})/saves/({layout.SAVE_ID.pattern})")
PARAMETER = re.compile(rb"(?:(wait_seconds)=([0-9]{1,3}(?:\.[0-9]{1,20})?)|(fallback_of)=([1-9][0-9]{0,7}))")


async def pinned_answer(
    service: Service, run: str, attempt: str, fallback_of: int | None, wait_seconds: float
) -> Response:
    """The bytes of the answer, made once for all ranks; 204 while there is none. Once it is pinned nobody looks at
    the storage for it again."""

    def look() -> bytes | None:
        answer = service.ledger.join(run, attempt, fallback_of)
        return body_of(answer) if answer is not None else None

    key = (run, attempt, fallback_of)
    body = service.pinned.get(key)
    if body is None:
        wait = service.wait_seconds(wait_seconds)
        body = await service.lookout.ask(
            run, ("answer", attempt, fallback_of), look, lambda body: body is not None, wait
        )
        if body is None:
            return Response(status_code=204)
        service.pinned.keep(key, body)
    return Response(body, media_type="application/json")


async def status_of_save(service: Service, run: str, save: str, wait_seconds: float) -> Response:
    """The bytes of the status, made once for all who wait for it."""

    def look() -> tuple[bool, bytes]:
        status = service.ledger.save_status(run, save)
        return status.status != "pending", body_of(status)

    wait = service.wait_seconds(wait_seconds)
    _, body = await service.lookout.ask(run, ("save", save), look, lambda found: found[0], wait)
    return Response(body, media_type="application/json")


class Door:
    """ASGI, within the limits and behind the token."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            return await self._app(scope, receive, send)
        asked = ANSWER.fullmatch(scope["path"]) or STATUS.fullmatch(scope["path"])
        given = parameters(scope["query_string"]) if asked is not None else None
        if asked is None or given is None:
            return await self._app(scope, receive, send)
        (run, name), (wait_seconds, fallback_of) = asked.group(1, 2), given
        try:
            if asked.re is ANSWER:
                response = await pinned_answer(self._service, run, name, fallback_of, wait_seconds)
            else:
                response = await status_of_save(self._service, run, name, wait_seconds)
        except CkptdError as error:
            response = problem(error)
        await response(scope, receive, send)


def parameters(query: bytes) -> tuple[float, int | None] | None:
    """`wait_seconds` and `fallback_of`; None if there is anything else, or one of them twice."""
    found: dict[bytes, bytes] = {}
    for item in query.split(b"&") if query else ():
        match = PARAMETER.fullmatch(item)
        if match is None:
            return None
        name, value = (group for group in match.groups() if group is not None)
        if name in found:
            return None
        found[name] = value
    fallback_of = found.get(b"fallback_of")
    return float(found.get(b"wait_seconds", b"0")), int(fallback_of) if fallback_of is not None else None
