"""Long polls over HTTP: join, save status and parts, on one service and over two."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptd import layout
from ckptd.ledger import Ledger
from ckptd.storage.base import Storage
from ckptd.wire import AbortRequest, BeginRequest, OpenRequest
from tests.service.calling import client, ledger_on, make_app
from tests.service.writing import start, write_part, write_save

ATTEMPT = "1" * 32
RUN = "/v1/runs/en-it"
WAIT = {"wait_seconds": 30}


def announce(monkeypatch: pytest.MonkeyPatch, ledger: Ledger, method: str) -> threading.Event:
    """An event for when `method` of the ledger has answered once: from then on whoever asked waits."""
    looked = threading.Event()
    original: Callable[..., Any] = getattr(ledger, method)

    def watched(*args: Any) -> Any:
        answer = original(*args)
        looked.set()
        return answer

    monkeypatch.setattr(ledger, method, watched)
    return looked


def test_join_by_four_ranks_gives_equal_bytes_when_rank_0_begins(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_on(store)
    ledger.open("en-it", OpenRequest(attempt=ATTEMPT, job="j", host="h"))
    app = make_app(ledger, relook_seconds=3600)
    looked = announce(monkeypatch, ledger, "join")

    async def scenario() -> None:
        async with client(app) as http:
            joins = [asyncio.create_task(http.get(f"{RUN}/attempts/{ATTEMPT}/answer", params=WAIT)) for _ in range(4)]
            await asyncio.to_thread(looked.wait)
            begun = await http.post(
                f"{RUN}/generations", json=BeginRequest(attempt=ATTEMPT, job="j", world=4).model_dump()
            )
            answers = await asyncio.gather(*joins)
            assert begun.status_code == 200
            assert {answer.content for answer in answers} == {begun.content}

    asyncio.run(scenario())


def test_a_wait_is_cut_to_the_maximum_of_the_service(store: Storage) -> None:
    app = make_app(ledger_on(store), max_wait_seconds=0.01)

    async def scenario() -> None:
        async with client(app) as http:
            answer = await http.get(f"{RUN}/attempts/{ATTEMPT}/answer", params={"wait_seconds": 3000})
            assert (answer.status_code, answer.content) == (204, b"")

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["durable", "aborted"])
def test_save_status_returns_when_it_is_decided(store: Storage, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    ledger = ledger_on(store)
    start(ledger, "en-it")
    commit = write_save(ledger.storage, "en-it", 1, 5)
    app = make_app(ledger, relook_seconds=3600)
    looked = announce(monkeypatch, ledger, "save_status")

    async def scenario() -> None:
        async with client(app) as http:
            waiting = asyncio.create_task(http.get(f"{RUN}/saves/{commit.save}", params=WAIT))
            await asyncio.to_thread(looked.wait)
            if end == "durable":
                await http.post(f"{RUN}/saves/{commit.save}/commit", json=commit.model_dump())
            else:
                request = AbortRequest(generation=1, reason="disk full")
                await http.post(f"{RUN}/saves/{commit.save}/abort", json=request.model_dump())
            assert (await waiting).json()["status"] == end

    asyncio.run(scenario())


def test_parts_return_when_the_last_one_is_reported(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_on(store)
    start(ledger, "en-it")
    save = layout.save_id(1, 5, all_ranks=True, count=1)
    write_part(ledger.storage, "en-it", save, 0, 5)
    app = make_app(ledger, relook_seconds=3600)
    looked = announce(monkeypatch, ledger, "parts")

    async def scenario() -> None:
        async with client(app) as http:
            waiting = asyncio.create_task(http.get(f"{RUN}/saves/{save}/parts", params={"writers": 2, **WAIT}))
            await asyncio.to_thread(looked.wait)
            write_part(ledger.storage, "en-it", save, 1, 5)
            await http.post(f"{RUN}/saves/{save}/parts", json={"writer": 1})
            assert set((await waiting).json()["parts"]) == {"0", "1"}

    asyncio.run(scenario())


def test_what_another_service_appends_is_found(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = ledger_on(store), ledger_on(store)
    here.open("en-it", OpenRequest(attempt=ATTEMPT, job="j", host="h"))
    app, other = make_app(here, relook_seconds=0.001), make_app(there)
    looked = announce(monkeypatch, here, "join")

    async def scenario() -> None:
        async with client(app) as http, client(other) as second:
            waiting = asyncio.create_task(http.get(f"{RUN}/attempts/{ATTEMPT}/answer", params=WAIT))
            await asyncio.to_thread(looked.wait)
            begun = await second.post(
                f"{RUN}/generations", json=BeginRequest(attempt=ATTEMPT, job="j", world=1).model_dump()
            )
            assert (await waiting).content == begun.content

    asyncio.run(scenario())
