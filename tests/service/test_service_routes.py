"""A run from its first attempt to a quarantined checkpoint, over HTTP, and what each route answers."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
from fastapi import FastAPI

from ckptd import __version__, layout
from ckptd.errors import Conflict, Corrupt, Fenced, Invalid, NotFound, NotInitialised, Unavailable
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest, ManifestRef, ObjectRef
from ckptd.records import Damage, Observer
from ckptd.second import Reading, read_here
from ckptd.service.routes import health
from ckptd.storage.base import Storage
from ckptd.wire import (
    AbortRequest,
    Answer,
    BeginRequest,
    CheckpointInfo,
    DamageReport,
    Heartbeat,
    Latest,
    OpenRequest,
    ReadyRequest,
)
from tests.service.calling import client, error_in, get, ledger_on, make_app, post
from tests.service.writing import start, train, write_part, write_save

ATTEMPT = "1" * 32
RUN = "/v1/runs/en-it"
RANK = Observer(host="node-1", process="rank 0")


@pytest.fixture
def ledger(store: Storage) -> Ledger:
    return ledger_on(store)


@pytest.fixture
def app(ledger: Ledger) -> FastAPI:
    return make_app(ledger)


def test_a_run_from_its_first_attempt_to_its_second_generation(app: FastAPI, ledger: Ledger) -> None:
    opened = post(app, f"{RUN}/attempts", OpenRequest(attempt=ATTEMPT, job="j", host="h"))
    assert (opened.status_code, opened.content) == (204, b"")
    assert get(app, f"{RUN}/attempts/{ATTEMPT}/answer").status_code == 204

    begun = post(app, f"{RUN}/generations", BeginRequest(attempt=ATTEMPT, job="j", world=2))
    answer = Answer.model_validate_json(begun.content)
    assert (answer.answer, answer.generation, answer.world) == ("none", 1, 2)
    assert get(app, f"{RUN}/attempts/{ATTEMPT}/answer").content == begun.content
    assert post(app, f"{RUN}/generations/1/ready", ReadyRequest(attempt=ATTEMPT)).status_code == 204

    commit = write_save(ledger.storage, "en-it", 1, 7, writers=2, loss=math.nan)
    saves = f"{RUN}/saves/{commit.save}"
    assert get(app, saves).json() == {"save": commit.save, "status": "pending", "detail": ""}
    assert post(app, f"{saves}/parts", {"writer": 0}).status_code == 204
    assert set(get(app, f"{saves}/parts", writers=2).json()["parts"]) == {"0", "1"}
    assert post(app, f"{saves}/commit", commit).json()["status"] == "durable"
    assert get(app, saves).json()["status"] == "durable"

    (listed,) = get(app, f"{RUN}/checkpoints").json()
    assert (listed["step"], listed["is_resume_point"], listed["metrics"]) == (7, True, {"loss": "NaN"})
    assert get(app, f"{RUN}/checkpoints/7").json() == listed
    assert math.isnan(CheckpointInfo.model_validate_json(get(app, f"{RUN}/checkpoints/7").content).metrics["loss"])
    assert get(app, RUN).json()["resume_step"] == 7
    assert [run["run"] for run in get(app, "/v1/runs").json()] == ["en-it"]
    latest = Latest.model_validate_json(get(app, f"{RUN}/latest").content)
    assert latest.checkpoint is not None
    assert latest.checkpoint.save == commit.save

    second = "2" * 32
    post(app, f"{RUN}/attempts", OpenRequest(attempt=second, job="j", host="h"))
    resumed = Answer.model_validate_json(
        post(app, f"{RUN}/generations", BeginRequest(attempt=second, job="j", world=2)).content
    )
    assert resumed.checkpoint is not None
    assert (resumed.generation, resumed.checkpoint.save) == (2, commit.save)
    assert get(app, f"{RUN}/generation").json() == {"generation": 2, "attempt": second, "ended": ""}
    assert get(app, f"{RUN}/attempts/{ATTEMPT}/answer").content == begun.content


def test_storage_says_where_it_is(app: FastAPI, ledger: Ledger) -> None:
    expected = {"url": ledger.storage.url, "uuid": ledger.uuid, "version": __version__}
    assert get(app, "/v1/storage").json() == expected


def test_a_manifest_comes_as_the_stored_bytes(app: FastAPI, ledger: Ledger) -> None:
    (commit,) = train(ledger, "en-it", 3)
    content = get(app, f"{RUN}/checkpoints/3/manifest").content
    assert ManifestRef.of(Manifest.model_validate_json(content), content) == commit.manifest


def test_a_folder_without_records_is_not_a_run(app: FastAPI, ledger: Ledger) -> None:
    ledger.storage.put("runs/leftover/tmp/x", [b"x"], 1)
    assert get(app, "/v1/runs").json() == []
    assert isinstance(error_in(get(app, "/v1/runs/leftover")), NotFound)


@pytest.mark.parametrize("path", ["", "/checkpoints", "/checkpoints/3", "/checkpoints/3/manifest"])
def test_a_run_that_is_none_is_not_found(app: FastAPI, path: str) -> None:
    assert isinstance(error_in(get(app, RUN + path)), NotFound)


def test_parts_at_the_end_of_the_wait_are_those_that_are_there(app: FastAPI, ledger: Ledger) -> None:
    start(ledger, "en-it")
    save = layout.save_id(1, 5, all_ranks=True, count=1)
    write_part(ledger.storage, "en-it", save, 1, 5)
    write_part(ledger.storage, "en-it", save, 9, 5)  # of no writer that was asked for
    assert set(get(app, f"{RUN}/saves/{save}/parts", writers=2).json()["parts"]) == {"1", "9"}


def test_an_aborted_save_tells_why(app: FastAPI, ledger: Ledger) -> None:
    start(ledger, "en-it")
    save = layout.save_id(1, 5, all_ranks=True, count=1)
    request = AbortRequest(generation=1, reason="rank 1: disk full")
    assert post(app, f"{RUN}/saves/{save}/abort", request).status_code == 204
    assert get(app, f"{RUN}/saves/{save}").json() == {
        "save": save,
        "status": "aborted",
        "detail": "rank 1: disk full",
    }


def test_a_commit_of_an_old_generation_is_fenced(app: FastAPI, ledger: Ledger) -> None:
    start(ledger, "en-it")
    commit = write_save(ledger.storage, "en-it", 1, 4)
    start(ledger, "en-it")
    assert isinstance(error_in(post(app, f"{RUN}/saves/{commit.save}/commit", commit)), Fenced)
    assert get(app, f"{RUN}/saves/{commit.save}").json()["status"] == "fenced"


def test_begin_without_open_is_a_conflict_and_writes_nothing(app: FastAPI, ledger: Ledger) -> None:
    error = error_in(post(app, f"{RUN}/generations", BeginRequest(attempt=ATTEMPT, job="j", world=1)))
    assert type(error) is Conflict
    assert ledger.runs() == []


def test_a_body_about_another_save_or_generation_is_refused(app: FastAPI, ledger: Ledger) -> None:
    start(ledger, "en-it")
    commit = write_save(ledger.storage, "en-it", 1, 4)
    other = layout.save_id(1, 5, all_ranks=True, count=1)
    error = error_in(post(app, f"{RUN}/saves/{other}/commit", commit))
    assert (type(error), error.fields["field"]) == (Invalid, "save")
    error = error_in(post(app, f"{RUN}/saves/{other}/abort", AbortRequest(generation=2, reason="r")))
    assert (type(error), error.fields["field"]) == (Invalid, "generation")


def test_a_heartbeat_tells_a_fenced_job(app: FastAPI, ledger: Ledger) -> None:
    first = start(ledger, "en-it")
    second = start(ledger, "en-it")
    told = post(app, f"{RUN}/heartbeat", Heartbeat(attempt=first.attempt, job="j", host="h"))
    assert told.json() == {"generation": 2, "attempt": second.attempt, "ended": ""}


def _damaged(ledger: Ledger) -> DamageReport:
    """A run with two checkpoints, the newer one damaged, and the report of it."""
    _, commit = train(ledger, "en-it", 3, 6)
    key = ledger.manifest(commit.manifest).objects()[0].key
    ledger.storage.delete(key)
    return DamageReport(save=commit.save, damage=Damage(object=key, expected="x", observed="y"), reader=RANK)


def test_confirmed_damage_is_quarantined(app: FastAPI, ledger: Ledger) -> None:
    report = _damaged(ledger)
    assert post(app, f"{RUN}/damage", report).json()["confirmed"] is True
    latest = Latest.model_validate_json(get(app, f"{RUN}/latest").content)
    assert latest.checkpoint is not None
    assert [(c.step, c.valid) for c in latest.candidates] == [(6, False), (3, True)]
    assert isinstance(
        error_in(post(app, f"{RUN}/damage", report.model_copy(update={"save": "g00000001-000000000009-a1"}))),
        NotFound,
    )


def test_many_reports_of_one_damage_are_one_second_reading(store: Storage) -> None:
    reading, go_on = threading.Event(), threading.Event()
    readings: list[str] = []

    def second(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
        readings.append(ref.key)
        reading.set()
        go_on.wait()
        return Reading(reader=Observer(host="service", process="another"), damage=read_here(storage, ref).damage)

    ledger = Ledger(store, second_reader=second)
    report = _damaged(ledger)
    app = make_app(ledger)

    async def scenario() -> list[bytes]:
        async with client(app) as http:
            asked = [asyncio.create_task(http.post(f"{RUN}/damage", json=report.model_dump())) for _ in range(4)]
            await asyncio.to_thread(reading.wait)
            live = await http.get("/health/live")  # the second reading holds up nobody else
            go_on.set()
            return [live.content, *[answer.content for answer in await asyncio.gather(*asked)]]

    live, *confirmed = asyncio.run(scenario())
    assert live == b'{"status":"live"}'
    assert len(set(confirmed)) == 1
    assert len(readings) == 1


def test_a_damaged_log_is_told_with_what_can_be_read(app: FastAPI, ledger: Ledger) -> None:
    train(ledger, "en-it", 3)
    last = get(app, RUN).json()["records"]
    ledger.storage.put(layout.log_key("en-it", last + 1), [b"torn"], 4)
    for path in ("/checkpoints", "/checkpoints/3", "/latest"):
        error = error_in(get(app, RUN + path))
        assert isinstance(error, Corrupt)
        assert layout.log_key("en-it", last + 1) in error.message
        assert [info["step"] for info in error.fields["readable"]] == [3]
    assert layout.log_key("en-it", last + 1) in get(app, RUN).json()["problem"]
    refused = post(app, f"{RUN}/attempts", OpenRequest(attempt=ATTEMPT, job="j", host="h"))
    assert isinstance(error_in(refused), Corrupt)


def test_health_of_a_root_that_lost_its_marker(app: FastAPI, ledger: Ledger) -> None:
    assert get(app, "/health/ready").json() == {"status": "ready"}
    ledger.storage.delete(layout.ROOT_MARKER)
    assert isinstance(error_in(get(app, "/health/ready")), NotInitialised)
    assert isinstance(error_in(get(app, "/v1/runs/new/latest")), NotInitialised)  # and not "there is none"
    assert get(app, "/health/live").status_code == 200


def test_readiness_of_a_storage_that_hangs(app: FastAPI, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(health, "READY_SECONDS", 0.01)
    monkeypatch.setattr(ledger.storage, "check_root", hang.wait)

    async def scenario() -> list[int]:
        async with client(app) as http:
            answers = [await http.get("/health/ready") for _ in range(3)]
            assert all(isinstance(error_in(answer), Unavailable) for answer in answers)
            hang.set()
            return [(await http.get("/health/live")).status_code]

    assert asyncio.run(scenario()) == [200]


def test_the_documentation_names_every_route_and_its_problems(app: FastAPI) -> None:
    document = get(app, "/openapi.json").json()
    assert document["components"]["schemas"]["Problem"]["required"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            problems = [
                a for a in operation["responses"].values() if "application/problem+json" in a.get("content", {})
            ]
            assert problems, f"{method} {path}"
            if path.startswith("/v1"):
                assert {"401", "409", "413", "422", "500", "503"} <= set(operation["responses"])
                assert operation["security"]
            assert operation["summary"]
            assert operation["description"]
