"""Calling an application in this process, over ASGI."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI
from pydantic import BaseModel

from ckptd.errors import CkptdError, from_dict
from ckptd.ledger import Ledger
from ckptd.records import Observer
from ckptd.second import Reading, read_here
from ckptd.service.app import create_app
from ckptd.service.holds import Holds
from ckptd.service.presence import Presence
from ckptd.service.settings import ServiceSettings
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage

ELSEWHERE = Observer(host="service", process="another")


def memory_ledger() -> Ledger:
    """For requests that never reach the storage, or find nothing there."""
    return ledger_on(MemoryStorage())


def ledger_on(storage: Storage) -> Ledger:
    """A ledger whose second reader counts as another process."""
    return Ledger(
        storage,
        second_reader=lambda storage, ref: Reading(reader=ELSEWHERE, damage=read_here(storage, ref).damage),
    )


def make_app(
    ledger: Ledger, *, presence: Presence | None = None, holds: Holds | None = None, **settings: Any
) -> FastAPI:
    settings.setdefault("storage", ledger.storage.url)
    return create_app(ServiceSettings(**settings), ledger, presence=presence, holds=holds)


def client(app: FastAPI, token: str | None = None) -> httpx.AsyncClient:
    """For scenarios with several requests at one time."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://ckptd", headers=headers, timeout=60)


def call(app: FastAPI, method: str, path: str, body: BaseModel | None = None, **options: Any) -> httpx.Response:
    """One request on an event loop of its own."""
    if body is not None:
        options["content"] = body.model_dump_json()
        options.setdefault("headers", {})["Content-Type"] = "application/json"

    async def ask() -> httpx.Response:
        async with client(app) as http:
            return await http.request(method, path, **options)

    return asyncio.run(ask())


def get(app: FastAPI, path: str, **params: Any) -> httpx.Response:
    return call(app, "GET", path, params=params)


def post(app: FastAPI, path: str, body: BaseModel | dict[str, Any]) -> httpx.Response:
    if isinstance(body, BaseModel):
        return call(app, "POST", path, body)
    return call(app, "POST", path, json=body)


def error_in(answer: httpx.Response) -> CkptdError:
    """The error a problem stands for, rebuilt as a client does it."""
    assert answer.headers["Content-Type"] == "application/problem+json", answer.text
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["type"] == f"urn:ckptd:problem:{problem['code']}"
    assert problem["title"]
    assert problem["do"]
    return from_dict({**problem, "message": problem["detail"]})
