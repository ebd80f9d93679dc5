"""Errors as HTTP answers: RFC 9457 problems with a stable `code`, and `do`, what to do about it."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptd.errors import CkptdError, Invalid, NotFound

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 20
_log = logging.getLogger("ckptd.service")


class Problem(BaseModel):
    """Every answer that is not a success. `code` and `fields` rebuild the error on the other side."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    do: str
    fields: dict[str, Any]


def problem(error: CkptdError, *, status: int | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """`error` as an answer."""
    body = body_of(error, status)
    content = json.dumps(body.model_dump(), default=str)
    return Response(content, body.status, headers, MEDIA_TYPE)


def body_of(error: CkptdError, status: int | None = None) -> Problem:
    """What an answer says of `error`."""
    told = error.to_dict()
    return Problem(
        type=f"urn:ckptd:problem:{error.code}",
        title=error.code.replace("-", " ").capitalize(),
        status=status or error.status,
        detail=told["message"],
        code=told["code"],
        do=told["do"],
        fields=told["fields"],
    )


class CatchAll:
    """ASGI: what nobody expected becomes a problem with a reference, and the traceback goes to the log with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            if started or scope["type"] != "http":
                raise
            reference = secrets.token_hex(6)
            _log.exception("reference %s: %s %s failed", reference, scope["method"], scope["path"])
            error = CkptdError(
                f"the service failed; its log says more under reference {reference}", reference=reference
            )
            await problem(error)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Turn every error below `app` into a problem."""
    app.add_exception_handler(CkptdError, _of_ours)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(HTTPException, _of_http)


async def _of_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, CkptdError)
    return problem(error)


async def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [{"field": _field(e["loc"], e["type"]), "message": str(e["msg"])} for e in error.errors()[:MAX_ERRORS]]
    first = found[0]
    return problem(
        Invalid(
            f"{request.method} {request.url.path[:300]}: {first['field']}: {first['message']}",
            field=first["field"],
            errors=found,
        )
    )


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:300]}"
    if error.status_code == 404:
        return problem(NotFound(f"there is no {asked}", do="See /openapi.json for what there is.", field="path"))
    if error.status_code == 405:
        refused = Invalid(f"there is no {asked}", do="See /openapi.json for its methods.", field="method")
        return problem(refused, status=405, headers=error.headers)
    if error.status_code == 400:
        return problem(Invalid(f"{asked}: the body is not JSON that can be read", field="body"))
    return problem(CkptdError(f"{asked}: {error.detail}"), status=error.status_code, headers=error.headers)


def _field(where: tuple[int | str, ...], kind: str) -> str:
    """The name of what is wrong: `body.manifest.key` is called `manifest.key`, a body that is no JSON `body`."""
    return "body" if kind == "json_invalid" else ".".join(map(str, where[1:])) or str(where[0])
