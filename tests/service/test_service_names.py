"""Nothing a client sends leads outside its run: every route refuses every bad name, and writes nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from ckptd import layout
from ckptd.errors import Invalid, NotFound
from ckptd.ledger import Ledger
from ckptd.storage import open_storage
from tests.homes import everything
from tests.service.calling import call, error_in, ledger_on, make_app, memory_ledger

ATTEMPT = "1" * 32
SAVE = "g00000001-000000000001-a1"
GOOD = {"run": "en-it", "save": SAVE, "attempt": ATTEMPT, "step": "1", "generation": "1", "act": "pin"}
BAD: dict[str, list[str]] = {
    "run": [
        "A",
        "-x",
        ".",
        "..",
        "...",
        "_x",
        "a b",
        "a\n",
        "a\0",
        "é",
        "x" * 129,
        "a/b",
        "../b",
        "/etc",
        "a\\b",
        "~",
    ],
    "save": ["x", "..", SAVE + "\n", SAVE.upper(), "g1-1-a1", SAVE + "0" * 9],
    "attempt": ["x", "..", "1" * 31, "1" * 33, "G" * 32, ATTEMPT + "\n"],
    "step": ["-1", "x", "1.5", "..", str(10**12), "9" * 5000, "nan"],
    "generation": ["0", "-1", "x", str(10**8)],
    "act": ["x", "..", "hold ", "Pin", "pin\n"],
}
BODIES: dict[str, dict[str, Any]] = {
    "attempts": {"attempt": ATTEMPT, "job": "j", "host": "h"},
    "generations": {"attempt": ATTEMPT, "job": "j", "world": 1},
    "ready": {"attempt": ATTEMPT},
    "parts": {"writer": 0},
    "commit": {
        "generation": 1,
        "save": SAVE,
        "step": 1,
        "writers": 1,
        "manifest": {"key": "k", "size": 1, "sha256": "0" * 64},
    },
    "abort": {"generation": 1, "reason": "r"},
    "damage": {
        "save": SAVE,
        "damage": {"object": "../x", "expected": "a", "observed": "b"},
        "reader": {"host": "h", "process": "p"},
    },
    "heartbeat": {"attempt": ATTEMPT, "job": "j", "host": "h"},
    "hold": {"who": "eval"},
    "{act}": {"who": "ann"},
    "verify": {},
    "retain": {"keep_last": 5},
    "collect": {},
    "fsck": {},
}


def routes() -> list[tuple[str, str, list[str]]]:
    """Method, path and parameters of every route that takes a name."""
    document = make_app(memory_ledger()).openapi()
    found = []
    for path, methods in document["paths"].items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        found += [(method.upper(), path, names) for method in methods if names]
    return found


def ask(app: FastAPI, method: str, path: str, names: dict[str, str]) -> httpx.Response:
    """Straight over ASGI, as a server hands on a path it decoded: HTTP clients would tidy up '..' themselves."""
    body = json.dumps(BODIES[path.rpartition("/")[2]] if method == "POST" else None).encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("ckptd", 80),
        "method": method,
        "path": path.format(**names),
        "query_string": b"writers=1" if method == "GET" and path.endswith("/parts") else b"",
        "headers": [(b"host", b"ckptd"), (b"content-type", b"application/json")],
    }
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=content)


def test_the_table_covers_every_parameter_and_every_body() -> None:
    assert {name for _, _, names in routes() for name in names} == set(BAD)
    assert {path.rpartition("/")[2] for method, path, _ in routes() if method == "POST"} == set(BODIES)


@pytest.mark.parametrize(("method", "path", "names"), routes())
def test_every_route_refuses_every_bad_name(method: str, path: str, names: list[str]) -> None:
    ledger = memory_ledger()
    app = make_app(ledger)
    for name in names:
        for value in BAD[name]:
            answer = ask(app, method, path, {**GOOD, name: value})
            error = error_in(answer)
            if "/" in value:
                assert isinstance(error, Invalid | NotFound), (name, value)  # another path, or none
            else:
                assert (answer.status_code, error.fields["field"]) == (422, name), (name, value)
    assert ledger.storage.list(layout.RUNS) == []


@pytest.mark.parametrize("query", ["wait_seconds=-1", "wait_seconds=nan", "wait_seconds=inf", "wait_seconds=1e9"])
def test_waits_are_bounded(query: str) -> None:
    answer = call(make_app(memory_ledger()), "GET", f"/v1/runs/en-it/saves/{SAVE}?{query}")
    assert error_in(answer).fields["field"] == "wait_seconds"


@pytest.mark.parametrize("query", ["", "writers=0", "writers=-1", "writers=x", f"writers={10**6}"])
def test_writers_are_bounded(query: str) -> None:
    answer = call(make_app(memory_ledger()), "GET", f"/v1/runs/en-it/saves/{SAVE}/parts?{query}")
    assert error_in(answer).fields["field"] == "writers"


@pytest.fixture
def ledger(home: str) -> Ledger:
    return ledger_on(open_storage(home))


@pytest.fixture
def known(ledger: Ledger) -> set[str]:
    return everything(ledger.storage)


# The examples share one storage: what one of them wrote is there for the next.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.one_of(
        st.text(min_size=1, max_size=140),
        st.text(alphabet="ab0._-/%\\", min_size=1, max_size=12),
        st.from_regex(layout.RUN_NAME, fullmatch=True),
    )
)
def test_whatever_a_run_is_called_nothing_is_written_outside_of_it(
    ledger: Ledger, known: set[str], name: str
) -> None:
    app = make_app(ledger)
    try:
        path = f"/v1/runs/{quote(name, safe='')}/attempts"
    except UnicodeEncodeError:
        path = f"/v1/runs/{quote(name.encode(errors='surrogatepass'), safe='')}/attempts"
    answer = call(app, "POST", path, json={"attempt": layout.new_attempt(), "job": "j", "host": "h"})
    new = everything(ledger.storage) - known
    known |= new
    if answer.status_code == 204:
        assert new
        assert all(key.startswith(f"{layout.run_folder(name)}/") for key in new)
    else:
        assert answer.status_code in (404, 405, 422)
        assert not new


def test_routes_are_plain() -> None:
    """No route takes a path parameter that may hold slashes."""
    for route in make_app(memory_ledger()).routes:
        if isinstance(route, APIRoute):
            assert ":path" not in route.path
