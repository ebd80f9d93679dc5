"""All ranks of a large job at once: equal bytes for everybody, from a number of looks that is not theirs."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from typing import Any

import httpx
import pytest

from ckptd import layout
from ckptd.errors import Unavailable
from ckptd.ledger import Ledger
from ckptd.service.door import parameters
from ckptd.service.pinned import MAX_ANSWERS, PinnedAnswers
from ckptd.service.server import OWN_FILES, allow_files
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from ckptd.testing.histories import write_history
from ckptd.wire import Answer, BeginRequest, Latest, OpenRequest, SaveStatus
from tests.core.by_hand import write_save
from tests.service.calling import call, client, error_in, get, ledger_on, make_app, post

RUN = "en-it"
RANKS = 500
LOOKS = 12  # requests to the storage of one look, or fewer
ATTEMPT = layout.new_attempt()
PATH = f"/v1/runs/{RUN}/attempts/{ATTEMPT}/answer"


@pytest.fixture
def storage() -> FaultyStorage:
    inner = MemoryStorage()
    write_history(inner, RUN, records=60)
    return FaultyStorage(inner)


@pytest.fixture
def ledger(storage: FaultyStorage) -> Ledger:
    return ledger_on(storage)


def begin(ledger: Ledger, attempt: str = ATTEMPT) -> Answer:
    ledger.open(RUN, OpenRequest(attempt=attempt, job="job", host="host"))
    return ledger.begin(RUN, BeginRequest(attempt=attempt, job="job", world=RANKS))


def test_S3_500_ranks_that_join_at_once_get_equal_bytes_from_one_look(storage: FaultyStorage, ledger: Ledger) -> None:
    app, pinned = make_app(ledger), begin(ledger)
    storage.history.clear()

    async def scenario() -> list[httpx.Response]:
        async with client(app) as http:
            return await asyncio.gather(*(http.get(PATH, params={"wait_seconds": 2.0}) for _ in range(RANKS)))

    told = asyncio.run(scenario())
    assert {answer.status_code for answer in told} == {200}
    assert len({answer.content for answer in told}) == 1
    assert Answer.model_validate_json(told[0].content) == pinned
    assert len(storage.history) <= LOOKS
    storage.history.clear()
    assert get(app, PATH).content == told[0].content  # and later nobody looks for it again
    assert storage.history == []


def test_S3_500_ranks_that_wait_get_equal_bytes_when_rank_0_begins(storage: FaultyStorage, ledger: Ledger) -> None:
    app = make_app(ledger, relook_seconds=3600.0)
    lookout = app.state.service.lookout

    async def scenario() -> list[httpx.Response]:
        async with client(app) as http:
            ranks = [asyncio.create_task(http.get(PATH, params={"wait_seconds": 30.0})) for _ in range(RANKS)]
            while sum(len(asked.waiters) for asked in lookout._asked.values()) < RANKS:
                await asyncio.sleep(0)
            first = await http.post(f"/v1/runs/{RUN}/attempts", json=opening(), headers=JSON)
            assert first.status_code == 204
            body = {"attempt": ATTEMPT, "job": "job", "world": RANKS}
            begun = await http.post(f"/v1/runs/{RUN}/generations", json=body, headers=JSON)
            assert begun.status_code == 200
            return [begun, *await asyncio.gather(*ranks)]

    begun, *told = asyncio.run(scenario())
    assert {answer.status_code for answer in told} == {200}
    assert len({answer.content for answer in told}) == 1
    assert begun.json() == told[0].json()
    assert len(storage.history) < RANKS / 2


JSON = {"Content-Type": "application/json"}


def opening() -> dict[str, str]:
    return {"attempt": ATTEMPT, "job": "job", "host": "host"}


def test_all_who_wait_for_a_save_are_told_the_same(storage: FaultyStorage, ledger: Ledger) -> None:
    generation = begin(ledger).generation
    ledger.ready(RUN, ATTEMPT, generation)
    request = write_save(storage, generation, 10**6, run=RUN)
    app = make_app(ledger, relook_seconds=3600.0)
    lookout = app.state.service.lookout
    path = f"/v1/runs/{RUN}/saves/{request.save}"

    async def scenario() -> list[httpx.Response]:
        async with client(app) as http:
            ranks = [asyncio.create_task(http.get(path, params={"wait_seconds": 30.0})) for _ in range(RANKS)]
            while sum(len(asked.waiters) for asked in lookout._asked.values()) < RANKS:
                await asyncio.sleep(0)
            body = request.model_dump(mode="json")
            assert (await http.post(f"{path}/commit", json=body, headers=JSON)).status_code == 200
            return list(await asyncio.gather(*ranks))

    told = asyncio.run(scenario())
    assert {answer.content for answer in told} == {told[0].content}
    assert SaveStatus.model_validate_json(told[0].content).status == "durable"
    assert len(storage.history) < RANKS / 2


def test_500_who_ask_for_the_latest_at_once_share_a_look_that_began_later(
    storage: FaultyStorage, ledger: Ledger
) -> None:
    app = make_app(ledger)
    first = Latest.model_validate_json(get(app, f"/v1/runs/{RUN}/latest").content)
    begin(ledger)
    storage.history.clear()
    pause = storage.pause("list", lambda key: key.startswith(layout.log_folder(RUN)))

    async def scenario() -> list[httpx.Response]:
        async with client(app) as http:
            early = asyncio.create_task(http.get(f"/v1/runs/{RUN}/latest"))
            assert await asyncio.to_thread(pause.arrived.wait, 60.0)
            ranks = [asyncio.create_task(http.get(f"/v1/runs/{RUN}/latest")) for _ in range(RANKS)]
            (asked,) = app.state.service.lookout._asked.values()
            while len(asked.waiters) <= RANKS:
                await asyncio.sleep(0)
            pause.resume.set()
            return [await early, *await asyncio.gather(*ranks)]

    told = [Latest.model_validate_json(answer.content) for answer in asyncio.run(scenario())]
    assert {answer.generation for answer in told} == {first.generation + 1}
    assert storage.calls["list"] > 0
    assert len(storage.history) <= 2 * LOOKS  # one for the early one, and one for all the others


# The door.


@pytest.mark.parametrize(
    ("query", "given"),
    [
        (b"", (0.0, None)),
        (b"wait_seconds=2", (2.0, None)),
        (b"wait_seconds=1.5000000001&fallback_of=3", (1.5000000001, 3)),
        (b"fallback_of=3&wait_seconds=0.0", (0.0, 3)),
        (b"wait_seconds=-1", None),
        (b"wait_seconds=1e3", None),
        (b"wait_seconds=nan", None),
        (b"wait_seconds=2000", None),
        (b"wait_seconds=1&wait_seconds=2", None),
        (b"fallback_of=0", None),
        (b"fallback_of=03", None),
        (b"fallback_of=3&other=1", None),
        (b"wait_seconds=%31", None),
        (b"&", None),
    ],
)
def test_only_plain_parameters_go_through_the_door(query: bytes, given: Any) -> None:
    assert parameters(query) == given


@pytest.mark.parametrize("query", ["?other=1", "?wait_seconds=0e0", "?wait_seconds=%30"])
def test_the_route_says_what_the_door_says(ledger: Ledger, query: str) -> None:
    app = make_app(ledger)
    begin(ledger)
    for path in (PATH, f"/v1/runs/{RUN}/saves/g00000001-000000000003-a1", PATH.replace(RUN, "other")):
        door, route = (call(app, "GET", f"{path}{end}") for end in ("", query))
        assert (door.status_code, door.content) == (route.status_code, route.content)
        assert door.headers == route.headers


@pytest.mark.parametrize("query", ["?wait_seconds=-1", "?fallback_of=0", "?wait_seconds=x"])
def test_what_is_wrong_with_a_request_is_told_as_everywhere(ledger: Ledger, query: str) -> None:
    answer = call(make_app(ledger), "GET", f"{PATH}{query}")
    assert answer.status_code == 422
    assert error_in(answer).fields["field"] == query[1:].partition("=")[0]


def test_an_error_behind_the_door_is_a_problem(storage: FaultyStorage, ledger: Ledger) -> None:
    app = make_app(ledger)
    storage.fail_before("list", times=None)
    assert isinstance(error_in(get(app, PATH)), Unavailable)


def test_the_door_asks_for_the_token(ledger: Ledger) -> None:
    begin(ledger)
    app = make_app(ledger, token="secret")
    assert get(app, PATH).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert call(app, "GET", PATH, headers=headers).status_code == 200


def test_a_fallback_is_another_answer(ledger: Ledger) -> None:
    app = make_app(ledger)
    first = begin(ledger)
    told = get(app, PATH).json()
    assert told["generation"] == first.generation
    body = BeginRequest(attempt=ATTEMPT, job="job", world=RANKS, fallback_of=first.generation)
    second = post(app, f"/v1/runs/{RUN}/generations", body).json()
    assert get(app, PATH, fallback_of=first.generation).json() == second
    assert get(app, PATH).json() == told


def test_only_the_newest_answers_are_kept() -> None:
    kept = PinnedAnswers()
    for number in range(MAX_ANSWERS + 5):
        kept.keep((RUN, f"{number}", None), b"%d" % number)
    assert [kept.get((RUN, f"{number}", None)) for number in (0, 4, 5)] == [None, None, b"5"]
    assert kept.get((RUN, f"{MAX_ANSWERS + 4}", None)) == b"%d" % (MAX_ANSWERS + 4)


# More ranks than there is room for.


def test_who_is_turned_away_is_told_when_to_come_again(ledger: Ledger) -> None:
    app = make_app(ledger, max_requests=1, relook_seconds=3600.0)

    async def scenario() -> httpx.Response:
        async with client(app) as http:
            waiting = asyncio.create_task(http.get(PATH, params={"wait_seconds": 30.0}))
            while not app.state.service.lookout._asked:
                await asyncio.sleep(0)
            refused = await http.get(PATH)
            app.state.service.lookout.close()
            assert (await waiting).status_code == 204
            return refused

    refused = asyncio.run(scenario())
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
    assert json.loads(refused.content)["code"] == "unavailable"


@pytest.mark.parametrize(
    ("limits", "set_to", "fit"),
    [
        ((1024, 1048576), 5000 + OWN_FILES, 5000),
        ((100_000, 100_000), None, 5000),
        ((1024, 4096), 4096, 4096 - OWN_FILES),
        ((1024, resource.RLIM_INFINITY), 5000 + OWN_FILES, 5000),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 5000),
    ],
)
def test_as_many_files_may_be_open_as_requests_need(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limits: tuple[int, int],
    set_to: int | None,
    fit: int,
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: calls.append(values))
    with caplog.at_level(logging.WARNING):
        assert allow_files(5000) == fit
    assert calls == ([(set_to, limits[1])] if set_to is not None else [])
    assert ("ulimit -Hn" in caplog.text) == (fit < 5000)
