"""What a client can make the service hold is bounded: bytes, depth, time, requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Scope

from ckptd.errors import Invalid, Unavailable
from ckptd.service.limits import MAX_DEPTH, Limits, check_depth
from ckptd.wire import SaveStatus
from tests.service.calling import call, client, error_in, make_app, memory_ledger

PATH = "/v1/runs/en-it/attempts"
BODY = {"attempt": "1" * 32, "job": "j", "host": "h"}
LIMIT = 2048


class Line:
    """An ASGI connection played by hand: gives `messages`, then nothing any more, and keeps what is sent."""

    def __init__(self, *messages: Message) -> None:
        self.left = list(messages)
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self.left:
            return self.left.pop(0)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status


def through(
    line: Line, headers: list[tuple[bytes, bytes]] | None = None, deadline_seconds: float = 60.0
) -> list[bytes]:
    """Send a request through the limits; the bodies that reached the application."""
    reached: list[bytes] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        reached.append((await receive())["body"])

    limits = Limits(app, max_body_bytes=LIMIT, body_deadline_seconds=deadline_seconds, max_requests=10)
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers or []}
    asyncio.run(limits(scope, line.receive, line.send))
    return reached


def chunk(size: int, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": b" " * size, "more_body": more}


def test_an_announced_body_over_the_limit_is_not_read() -> None:
    line = Line(chunk(LIMIT + 1, more=False))
    assert through(line, [(b"content-length", str(LIMIT + 1).encode())]) == []
    assert (line.status, len(line.left)) == (413, 1)


def test_a_chunked_body_is_read_no_further_than_the_limit() -> None:
    line = Line(*(chunk(1000) for _ in range(100)))
    assert through(line) == []
    assert (line.status, len(line.left)) == (413, 97)


def test_a_body_at_the_limit_arrives_in_one_piece() -> None:
    assert through(Line(chunk(LIMIT - 1000), chunk(1000, more=False))) == [b" " * LIMIT]


def test_a_body_that_never_ends_is_given_up() -> None:
    line = Line(chunk(10))
    assert through(line, deadline_seconds=0.01) == []
    assert line.status == 408


def test_a_client_that_goes_away_reaches_nothing() -> None:
    line = Line(chunk(10), {"type": "http.disconnect"})
    assert through(line) == []
    assert line.sent == []


@pytest.mark.parametrize("announced", [b"-1", b"x", b"9" * 400])
def test_odd_lengths_do_not_break_it(announced: bytes) -> None:
    line = Line(chunk(10, more=False))
    assert through(line, [(b"content-length", announced)]) == ([] if announced[0] == ord("9") else [b" " * 10])


def test_a_large_body_over_http() -> None:
    ledger = memory_ledger()
    app = make_app(ledger, max_body_bytes=LIMIT)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 1000

    for content in (b"x" * (LIMIT + 1), chunks()):
        answer = call(app, "POST", PATH, content=content, headers={"Content-Type": "application/json"})
        error = error_in(answer)
        assert (answer.status_code, type(error), error.fields["field"]) == (413, Invalid, "body")
        assert str(LIMIT) in error.message
    assert call(app, "POST", PATH, json=BODY).status_code == 204
    assert ledger.runs() == ["en-it"]


def test_more_requests_than_allowed_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = memory_ledger()
    app = make_app(ledger, max_requests=1)
    looking, go_on = threading.Event(), threading.Event()

    def look(run: str, save: str) -> SaveStatus:
        looking.set()
        go_on.wait()
        return SaveStatus(save=save, status="durable")

    monkeypatch.setattr(ledger, "save_status", look)

    async def scenario() -> None:
        async with client(app) as http:
            waiting = asyncio.create_task(http.get("/v1/runs/en-it/saves/g00000001-000000000001-a1"))
            await asyncio.to_thread(looking.wait)
            refused = await http.get("/v1/runs")
            assert (await http.get("/health/live")).status_code == 200
            go_on.set()
            assert (await waiting).status_code == 200
            assert (await http.get("/v1/runs")).status_code == 200
            assert isinstance(error_in(refused), Unavailable)

    asyncio.run(scenario())


_JSON = st.recursive(
    st.none() | st.text() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(_JSON)
def test_brackets_in_strings_are_not_depth(value: Any) -> None:
    check_depth(json.dumps([value, "[" * 100, '\\"[{' * 50]).encode())


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'["[",{"\\"":'])
def test_depth_is_bounded(opening: bytes) -> None:
    check_depth(opening * (MAX_DEPTH // 2))
    with pytest.raises(Invalid, match="deeper"):
        check_depth(opening * (MAX_DEPTH + 1))


@pytest.mark.parametrize("content", [b'"\\' * 2**20, b'"' * 2**21, b"\\" * 2**21, b'"' + b'\\"' * 2**20])
def test_no_body_is_slow_to_look_through(content: bytes) -> None:
    check_depth(content)  # quadratic work would run into the test's time limit
