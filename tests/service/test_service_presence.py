"""Two live jobs of one run name: the second one is told, and nothing else depends on it."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from ckptd import layout
from ckptd.errors import Fenced, InUse
from ckptd.service.presence import Presence
from ckptd.storage.base import Storage
from ckptd.wire import BeginRequest, Heartbeat, OpenRequest
from tests.service.calling import error_in, ledger_on, make_app, post

RUN = "/v1/runs/en-it"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def app(store: Storage, clock: Clock) -> FastAPI:
    return make_app(ledger_on(store), presence=Presence(window_seconds=30.0, clock=clock))


def open_attempt(app: FastAPI, job: str) -> str:
    attempt = layout.new_attempt()
    assert post(app, f"{RUN}/attempts", OpenRequest(attempt=attempt, job=job, host=f"host-{job}")).status_code == 204
    return attempt


def begin(app: FastAPI, attempt: str, job: str, *, takeover: bool = False) -> httpx.Response:
    return post(app, f"{RUN}/generations", BeginRequest(attempt=attempt, job=job, world=1, takeover=takeover))


def beat(app: FastAPI, attempt: str, job: str) -> None:
    assert post(app, f"{RUN}/heartbeat", Heartbeat(attempt=attempt, job=job, host="node-7")).status_code == 200


def test_another_job_is_refused_while_one_is_alive(app: FastAPI, clock: Clock) -> None:
    begin(app, open_attempt(app, "a"), "a")
    clock.now += 29
    answer = begin(app, open_attempt(app, "b"), "b")
    error = error_in(answer)
    assert (answer.status_code, type(error)) == (409, InUse)
    assert error.fields == {"run": "en-it", "job": "a", "host": "host-a", "seconds_ago": 29.0}
    assert "takeover" in error.do


def test_a_silent_job_is_not_waited_for(app: FastAPI, clock: Clock) -> None:
    begin(app, open_attempt(app, "a"), "a")
    clock.now += 30
    assert begin(app, open_attempt(app, "b"), "b").status_code == 200


def test_heartbeats_keep_the_run(app: FastAPI, clock: Clock) -> None:
    attempt = open_attempt(app, "a")
    begin(app, attempt, "a")
    for _ in range(5):
        clock.now += 20
        beat(app, attempt, "a")
    error = error_in(begin(app, open_attempt(app, "b"), "b"))
    assert (error.fields["host"], error.fields["seconds_ago"]) == ("node-7", 0.0)


def test_the_same_job_started_again_needs_no_flag(app: FastAPI) -> None:
    begin(app, open_attempt(app, "a"), "a")
    assert begin(app, open_attempt(app, "a"), "a").json()["generation"] == 2


def test_takeover_fences_the_other_one(app: FastAPI) -> None:
    first = open_attempt(app, "a")
    begin(app, first, "a")
    assert begin(app, open_attempt(app, "b"), "b", takeover=True).json()["generation"] == 2
    # The fenced one still beats, and that keeps nobody out of the run that is not its own any more.
    beat(app, first, "a")
    assert begin(app, open_attempt(app, "b"), "b").json()["generation"] == 3


def test_a_begin_that_is_asked_again_is_answered_again(app: FastAPI) -> None:
    first = open_attempt(app, "a")
    begun = begin(app, first, "a")
    begin(app, open_attempt(app, "b"), "b", takeover=True)
    assert begin(app, first, "a").content == begun.content
    assert begin(app, open_attempt(app, "b"), "b").status_code == 200  # a's question was no sign of holding the run


def test_an_older_attempt_is_fenced_whatever_it_says(app: FastAPI) -> None:
    older = open_attempt(app, "a")
    begin(app, open_attempt(app, "b"), "b")
    assert isinstance(error_in(begin(app, older, "a", takeover=True)), Fenced)


def test_other_runs_are_not_concerned(clock: Clock) -> None:
    presence = Presence(window_seconds=30.0, clock=clock)
    presence.heard("one", "a")
    presence.refuse_other("two", "b")
    with pytest.raises(InUse, match="unknown host"):
        presence.refuse_other("one", "b")
