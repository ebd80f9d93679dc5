"""What people and readers ask of the service about checkpoints, and work that is followed line by line."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from uvicorn import Config, Server

from ckptd import layout
from ckptd.collecting import Collected
from ckptd.errors import Conflict, Fenced, Invalid, NotFound, Unauthorized, Unavailable
from ckptd.fsck import FsckAnswer
from ckptd.ledger import Ledger
from ckptd.retaining import RetainAnswer
from ckptd.service import following
from ckptd.service.presence import Presence
from ckptd.service.threads import Threads
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faulty import FaultyStorage
from ckptd.watched import Watch
from ckptd.why import Why
from ckptd.wire import (
    ActOnRun,
    ActRequest,
    BeginRequest,
    CheckpointInfo,
    Heartbeat,
    HoldAnswer,
    OpenRequest,
    VerifyAnswer,
)
from tests.homes import Stored, spoil
from tests.service.calling import call, client, error_in, get, ledger_on, make_app, post
from tests.service.writing import start, train, write_save

RUN = "/v1/runs/en-it"
ANN = ActRequest(who="ann", reason="the loss explodes")
DEADLINE_SECONDS = 30.0


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


@pytest.fixture
def ledger(storage: FaultyStorage) -> Ledger:
    return ledger_on(storage)


@pytest.fixture
def app(ledger: Ledger) -> FastAPI:
    return make_app(ledger)


def act(app: FastAPI, step: int, verb: str, request: ActRequest = ANN) -> CheckpointInfo:
    answer = post(app, f"{RUN}/checkpoints/{step}/{verb}", request)
    assert answer.status_code == 200, answer.text
    return CheckpointInfo.model_validate_json(answer.content)


def last_line(answer: httpx.Response) -> bytes:
    """The answer of work that is followed."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"].startswith("application/x-ndjson")
    return json.dumps(json.loads(answer.text.splitlines()[-1])["answer"]).encode()


# People.


def test_quarantine_and_back(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 3, 6)
    assert act(app, 6, "quarantine").status == "quarantined"
    assert get(app, f"{RUN}/latest").json()["checkpoint"]["step"] == 3
    assert act(app, 6, "reinstate").status == "valid"
    assert get(app, f"{RUN}/latest").json()["checkpoint"]["step"] == 6


def test_a_roll_back_ends_the_running_generation_for_all_who_ask(app: FastAPI, ledger: Ledger) -> None:
    generation = start(ledger, "en-it")
    for step in (3, 6):
        ledger.commit("en-it", write_save(ledger.storage, "en-it", generation.generation, step))
    pending = write_save(ledger.storage, "en-it", 1, 9)

    async def scenario() -> dict[str, Any]:
        """A rank waits for a save of the generation that is ended."""
        async with client(app) as http:
            params = {"wait_seconds": DEADLINE_SECONDS}
            waiting = asyncio.create_task(http.get(f"{RUN}/saves/{pending.save}", params=params))
            while not app.state.service.lookout._asked:
                await asyncio.sleep(0)
            rolled = await http.post(f"{RUN}/checkpoints/3/rollback", json=ANN.model_dump())
            assert rolled.json()["is_resume_point"]
            status: dict[str, Any] = (await waiting).json()
            return status

    assert asyncio.run(scenario())["status"] == "fenced"
    assert isinstance(error_in(post(app, f"{RUN}/saves/{pending.save}/commit", pending)), Fenced)
    beat = post(app, f"{RUN}/heartbeat", Heartbeat(attempt=generation.attempt, job="job", host="h")).json()
    assert beat == {"generation": 1, "attempt": generation.attempt, "ended": "rolled back"}
    assert get(app, RUN).json()["ended"] == "rolled back"
    assert start(ledger, "en-it").checkpoint.step == 3  # type: ignore[union-attr]
    Auditor(ledger.storage, "en-it").assert_clean()


def test_V22_a_closed_run_fences_its_job_early_and_takes_no_other_until_it_is_reopened(
    app: FastAPI, ledger: Ledger
) -> None:
    generation = start(ledger, "en-it")
    ledger.commit("en-it", write_save(ledger.storage, "en-it", generation.generation, 3))
    for _ in range(2):
        closed = post(app, f"{RUN}/close", ActOnRun(who="ann", reason="trained"))
        assert (closed.status_code, closed.json()["closed"]) == (200, True)
    beat = post(app, f"{RUN}/heartbeat", Heartbeat(attempt=generation.attempt, job="job", host="h")).json()
    assert beat["ended"] == "closed"
    attempt = layout.new_attempt()
    assert post(app, f"{RUN}/attempts", OpenRequest(attempt=attempt, job="other", host="h")).status_code == 204
    begin = BeginRequest(attempt=attempt, job="other", world=1)
    refusal = error_in(post(app, f"{RUN}/generations", begin))
    assert isinstance(refusal, Conflict)
    assert "closed by ann: trained" in refusal.message
    assert "ckptd reopen en-it" in refusal.do
    assert get(app, f"{RUN}/why").json()["closed"] == "closed by ann: trained"
    assert act(app, 3, "pin").pinned_by == ("ann",)
    assert post(app, f"{RUN}/reopen", ActOnRun(who="ann")).json()["closed"] is False
    assert post(app, f"{RUN}/generations", begin).json()["generation"] == 2
    assert post(app, f"{RUN}/explode", ActOnRun(who="ann")).status_code in (404, 405, 422)
    Auditor(ledger.storage, "en-it").assert_clean()


def test_a_job_that_was_rolled_back_keeps_nobody_out(ledger: Ledger) -> None:
    presence = Presence(window_seconds=3600, clock=lambda: 0.0)
    app = make_app(ledger, presence=presence)
    train(ledger, "en-it", 3)
    attempt = ledger.current("en-it").attempt
    assert attempt is not None
    act(app, 3, "rollback")
    post(app, f"{RUN}/heartbeat", Heartbeat(attempt=attempt, job="job", host="h"))
    assert presence.last("en-it") is None
    other = layout.new_attempt()
    assert post(app, f"{RUN}/attempts", {"attempt": other, "job": "other", "host": "h"}).status_code == 204
    begun = post(app, f"{RUN}/generations", BeginRequest(attempt=other, job="other", world=1))
    assert begun.status_code == 200


def test_pins_of_several(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 3)
    act(app, 3, "pin")
    assert act(app, 3, "pin", ActRequest(who="bob")).pinned_by == ("ann", "bob")
    assert act(app, 3, "unpin").pinned_by == ("bob",)


def test_a_step_with_several_checkpoints(app: FastAPI, ledger: Ledger) -> None:
    (first,) = train(ledger, "en-it", 6)
    (second,) = train(ledger, "en-it", 6)
    assert act(app, 6, "pin").save == second.save
    assert act(app, 6, "pin", ActRequest(who="ann", save=first.save)).save == first.save
    unknown = ActRequest(who="ann", save=layout.save_id(9, 6, all_ranks=True, count=1))
    assert isinstance(error_in(post(app, f"{RUN}/checkpoints/6/pin", unknown)), NotFound)


@pytest.mark.parametrize("body", [{}, {"who": ""}, {"who": "x" * 201}, {"who": "a", "save": "../x"}])
def test_a_bad_body_is_refused(app: FastAPI, ledger: Ledger, body: dict[str, Any]) -> None:
    train(ledger, "en-it", 3)
    before = ledger.state("en-it").seq
    error = error_in(post(app, f"{RUN}/checkpoints/3/pin", body))
    assert (type(error), error.fields["field"] in ("who", "save")) == (Invalid, True)
    assert ledger.state("en-it").seq == before


def test_a_step_or_run_that_is_none(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 3)
    for path in (f"{RUN}/checkpoints/4/pin", "/v1/runs/absent/checkpoints/3/pin"):
        assert isinstance(error_in(post(app, path, ANN)), NotFound)


@pytest.mark.parametrize(
    "path",
    [*(f"checkpoints/3/{verb}" for verb in ("rollback", "hold", "verify")), "retain", "collect", "fsck"],
)
def test_nothing_of_it_without_the_token(ledger: Ledger, path: str) -> None:
    train(ledger, "en-it", 3)
    guarded = make_app(ledger, token="t")
    assert isinstance(error_in(post(guarded, f"{RUN}/{path}", {})), Unauthorized)
    assert isinstance(error_in(get(guarded, "/v1/housekeeping")), Unauthorized)


# Readers.


def test_a_reader_holds_refreshes_and_lets_go(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 3)
    for _ in range(2):
        answer = post(app, f"{RUN}/checkpoints/3/hold", ActRequest(who="eval-7"))
        held = HoldAnswer.model_validate_json(answer.content)
        assert (held.checkpoint.held_by, held.refresh_seconds) == (("eval-7",), 150.0)
    assert act(app, 3, "release", ActRequest(who="eval-7")).held_by == ()
    assert ledger.state("en-it").void == {}


# Why.


def test_why_tells_when_the_job_was_heard_of(ledger: Ledger) -> None:
    now = [100.0]
    app = make_app(ledger, presence=Presence(window_seconds=30, clock=lambda: now[0]))
    train(ledger, "en-it", 3)
    attempt = ledger.current("en-it").attempt
    assert attempt is not None
    found = Why.model_validate_json(get(app, f"{RUN}/why").content)
    assert found.generation is not None
    assert found.generation.seconds_ago is None
    post(app, f"{RUN}/heartbeat", Heartbeat(attempt=attempt, job="job", host="h"))
    now[0] += 7.0
    found = Why.model_validate_json(get(app, f"{RUN}/why").content)
    assert found.generation is not None
    assert (found.generation.job, found.generation.seconds_ago) == ("job", 7.0)
    assert [told.verdict for told in found.line] == ["resume"]


# Work that takes long.


def test_verify(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 3)
    answer = VerifyAnswer.model_validate_json(last_line(post(app, f"{RUN}/checkpoints/3/verify", {})))
    assert (answer.result, answer.recorded) == ("whole", True)
    assert get(app, f"{RUN}/checkpoints/3").json()["verified"]


def test_verify_finds_damage(app: FastAPI, ledger: Ledger) -> None:
    (commit,) = train(ledger, "en-it", 3)
    spoil(Stored(ledger.storage, ledger.manifest(commit.manifest).objects()[0].key))
    answer = VerifyAnswer.model_validate_json(last_line(post(app, f"{RUN}/checkpoints/3/verify", {})))
    assert (answer.result, answer.recorded) == ("damaged", False)
    assert get(app, f"{RUN}/latest").json()["answer"] == "corrupt"


def test_retain_and_collect(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 1, 2, 3)
    dry = last_line(post(app, f"{RUN}/retain", {"keep_last": 2, "dry_run": True}))
    assert [d.keep for d in RetainAnswer.model_validate_json(dry).decisions] == [False, True, True]
    done = RetainAnswer.model_validate_json(last_line(post(app, f"{RUN}/retain", {"keep_last": 2})))
    assert len(done.retired) == len(done.purged) == 1
    write_save(ledger.storage, "en-it", 1, 9)
    start(ledger, "en-it")
    collected = Collected.model_validate_json(last_line(post(app, f"{RUN}/collect", {})))
    assert (collected.objects, collected.purged) == (3, ())
    error = error_in(post(app, f"{RUN}/retain", {"keep_last": 1}))
    assert (type(error), error.fields["field"]) == (Invalid, "keep_last")


def test_a_retention_that_cannot_be_now_is_a_conflict(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 1, 2, 3)
    act(app, 1, "rollback")
    train(ledger, "en-it", 4)
    attempt = layout.new_attempt()
    ledger.open("en-it", OpenRequest(attempt=attempt, job="j", host="h"))
    ledger.begin("en-it", BeginRequest(attempt=attempt, job="j", world=1))
    error = error_in(post(app, f"{RUN}/retain", {"keep_last": 2}))
    assert (type(error), "no generation is ready" in error.message) == (Conflict, True)


@pytest.mark.parametrize("deep", [False, True])
def test_fsck(app: FastAPI, ledger: Ledger, deep: bool) -> None:
    (commit,) = train(ledger, "en-it", 3)
    spoil(Stored(ledger.storage, ledger.manifest(commit.manifest).objects()[0].key))
    answer = call(app, "POST", f"{RUN}/fsck", params={"deep": deep})
    found = FsckAnswer.model_validate_json(last_line(answer))
    assert (found.deep, found.damaged) == (deep, deep)
    assert isinstance(error_in(call(app, "POST", "/v1/runs/absent/fsck")), NotFound)


def followed_lines(app: FastAPI, storage: FaultyStorage, key: str) -> list[dict[str, Any]]:
    """The lines of a verification that hangs at `key` until one line was sent."""
    hang = storage.pause("read", key)

    async def scenario() -> list[dict[str, Any]]:
        server = Server(Config(app, port=0, log_config=None, lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]
        lines = []
        async with (
            httpx.AsyncClient(timeout=DEADLINE_SECONDS) as http,
            http.stream("POST", f"http://127.0.0.1:{port}{RUN}/checkpoints/3/verify", json={}) as answer,
        ):
            async for line in answer.aiter_lines():
                lines.append(json.loads(line))
                hang.resume.set()
        server.should_exit = True
        await serving
        return lines

    return asyncio.run(scenario())


def test_long_work_tells_how_far_it_is_and_ends_with_the_answer(
    app: FastAPI, ledger: Ledger, storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MOMENT_SECONDS", 0.0)
    train(ledger, "en-it", 3)
    *progress, last = followed_lines(app, storage, ".safetensors")
    assert progress
    assert all(line["read_bytes"] <= 2048 for line in progress)
    assert VerifyAnswer.model_validate_json(json.dumps(last["answer"])).result == "whole"


def test_an_error_in_the_middle_of_it_is_its_last_line(
    app: FastAPI, ledger: Ledger, storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MOMENT_SECONDS", 0.0)
    train(ledger, "en-it", 3)
    storage.fail_after("read", ".safetensors", error=Unavailable("the drive went away"))
    last = followed_lines(app, storage, ".safetensors")[-1]
    assert (last["problem"]["code"], last["problem"]["detail"]) == ("unavailable", "the drive went away")


def test_a_caller_who_goes_away_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MOMENT_SECONDS", 0.0)
    left, ended = threading.Event(), threading.Event()

    def work(watch: Watch) -> Collected:
        assert left.wait(DEADLINE_SECONDS)
        try:
            watch(1)
        except Unavailable:
            ended.set()
            raise
        raise AssertionError("nobody was there, and it went on")

    async def scenario() -> None:
        threads = Threads("test", 1)
        answer = await following.followed(threads, work)
        lines = answer.body_iterator  # type: ignore[attr-defined]
        assert json.loads(await anext(lines)) == {"read_bytes": 0}
        await lines.aclose()
        left.set()
        await asyncio.to_thread(ended.wait, DEADLINE_SECONDS)
        threads.close()

    asyncio.run(scenario())
    assert ended.is_set()


# The documentation.


def test_no_answer_names_a_script_from_elsewhere(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 3)
    paths = ["/", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", "/v1/storage", "/v1/runs", "/nothing"]
    paths += [RUN, f"{RUN}/why", f"{RUN}/latest", f"{RUN}/checkpoints", "/v1/housekeeping", "/health/ready"]
    for path in paths:
        answer = get(app, path)
        assert "json" in answer.headers["Content-Type"], path
        assert not re.search(r"<script|https?://", answer.text), path
    assert get(app, "/docs").status_code == get(app, "/redoc").status_code == 404
