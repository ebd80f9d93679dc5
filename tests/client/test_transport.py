"""The way to the ledger: over HTTP, around a service that does not answer, and which error an answer stands for."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ckptd.errors import (
    CkptdError,
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    NotFound,
    NotInitialised,
    OutcomeUnknown,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from ckptd.storage import init_root
from ckptd.wire import BeginRequest, Heartbeat, OpenRequest
from ckptd_client.transport import Transport
from tests.client.ranks import DEADLINE_SECONDS, RUN, Drive, Job, Trained, serving, train

ATTEMPT = "0123456789abcdef" * 2
OPENING = OpenRequest(attempt=ATTEMPT, job="job", host="host")
BEAT = Heartbeat(attempt=ATTEMPT, job="job", host="host")
SAVE = "g00000001-000000000001-r1"
Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[httpx.Request]]:
    """Whoever asks over HTTP from now on gets these answers. The list of what was asked grows. Patience with what
    fails passes on a clock of its own, so how often is asked does not hang on this machine."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr("tenacity.time", clock)
    monkeypatch.setattr("tenacity.nap.time", clock)
    client_class = httpx.Client

    def answer_with(answer: Answer) -> list[httpx.Request]:
        asked: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return answer(request)

        def client(**options: Any) -> httpx.Client:
            return client_class(transport=httpx.MockTransport(handle), **options)

        monkeypatch.setattr(httpx, "Client", client)
        return asked

    return answer_with


def to_service(drive: Drive | None = None, **options: Any) -> Transport:
    storage = drive.url_for("here") if drive is not None else None
    told = {"storage_url": storage, "patience_seconds": 0.3, "direct": drive is not None, **options}
    return Transport("http://ckptd:8440", RUN, **told)


def problem(error: CkptdError, status: int = 409) -> httpx.Response:
    told = error.to_dict()
    body = {"type": "about:blank", "status": status, "detail": told["message"], **told}
    del body["message"]
    return httpx.Response(status, headers={"Content-Type": "application/problem+json"}, content=json.dumps(body))


# Answers.


@pytest.mark.parametrize("kind", [Fenced, Conflict, Corrupt, Invalid, NotFound, Unauthorized])
def test_a_problem_is_the_error_it_describes(answering: Any, kind: type[CkptdError]) -> None:
    answering(lambda request: problem(kind("what failed", do="what to do", field="x", seq=3)))
    with pytest.raises(CkptdError) as caught:
        to_service().open(OPENING)
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.do) == ("what failed", "what to do")
    assert caught.value.fields == {"field": "x", "seq": 3}


@pytest.mark.parametrize("kind", [Unavailable, OutcomeUnknown])
def test_a_problem_that_may_pass_is_tried_again(answering: Any, kind: type[CkptdError]) -> None:
    answers = [problem(kind("not now"), 503), httpx.Response(204)]
    asked = answering(lambda request: answers.pop(0))
    to_service().open(OPENING)
    assert [request.content for request in asked] == [asked[0].content] * 2  # the same call


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (httpx.Response(502, text="<html>Bad Gateway</html>"), Unavailable),
        (httpx.Response(404, text="<html>nginx</html>"), Invalid),
        (httpx.Response(301, headers={"Location": "https://elsewhere"}), Invalid),
        (httpx.Response(200, text="<html>Log in to the hotel</html>"), Invalid),
        (httpx.Response(409, headers={"Content-Type": "application/problem+json"}, text="{"), Invalid),
        (httpx.Response(503, headers={"Content-Type": "application/problem+json"}, text="[]"), Unavailable),
        (httpx.Response(422, headers={"Content-Type": "application/problem+json"}, text='{"title": "x"}'), Invalid),
    ],
)
def test_an_answer_that_is_not_ckptds_says_so(answering: Any, answer: httpx.Response, kind: type[CkptdError]) -> None:
    answering(lambda request: answer)
    for ask in (
        lambda: to_service().open(OPENING),
        lambda: to_service().begin(BeginRequest(attempt=ATTEMPT, job="j", world=1)),
    ):
        with pytest.raises(CkptdError, match=f"HTTP {answer.status_code}, and no answer of ckptd") as caught:
            ask()
        assert type(caught.value) is kind


def test_the_token_goes_with_every_request(answering: Any) -> None:
    asked = answering(lambda request: httpx.Response(204))
    to_service(token="secret").open(OPENING)
    to_service().open(OPENING)
    assert [request.headers.get("Authorization") for request in asked] == ["Bearer secret", None]
    assert str(asked[0].url) == f"http://ckptd:8440/v1/runs/{RUN}/attempts"
    assert json.loads(asked[0].content) == {"attempt": ATTEMPT, "job": "job", "host": "host"}


def test_a_token_that_fits_no_header_is_refused() -> None:
    with pytest.raises(Invalid, match="token"):
        to_service(token="señal")


def test_a_wrong_token_is_unauthorized(drive: Drive) -> None:
    with serving(drive, token="right") as url, pytest.raises(Unauthorized, match="token") as caught:
        Job(drive, url=url).client(token="wrong")
    assert "CKPTD_TOKEN" in caught.value.do


# A service that does not answer.


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def test_around_a_service_that_does_not_answer_with_one_warning(
    drive: Drive, answering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asked = answering(refuse)
    around = to_service(drive)
    around.open(OPENING)
    before = len(asked)
    assert before > 2  # one that was up a moment ago is given time
    around.begin(BeginRequest(attempt=ATTEMPT, job="job", world=1))
    around.ready(ATTEMPT, 1)
    assert len(asked) == before + 2  # one that is known to be down is asked once
    assert drive.kinds() == ["run-created", "attempt-opened", "generation-started", "generation-ready"]
    warnings = [record.getMessage() for record in caplog.records if record.name == "ckptd"]
    assert len(warnings) == 1
    assert "going to the storage directly" in warnings[0]


@pytest.mark.parametrize("kind", [Unavailable, NotInitialised])
def test_around_a_service_that_is_cut_from_its_storage(drive: Drive, answering: Any, kind: type[CkptdError]) -> None:
    answering(lambda request: problem(kind("no storage here"), 503))
    to_service(drive).open(OPENING)
    assert drive.kinds() == ["run-created", "attempt-opened"]


def test_going_around_can_be_forbidden(drive: Drive, answering: Any) -> None:
    answering(refuse)
    with pytest.raises(Unavailable, match="connection refused"):
        to_service(drive, direct=False).open(OPENING)
    assert drive.storage.list("runs") == []


def test_a_service_that_comes_back_is_asked_again(drive: Drive, answering: Any) -> None:
    down = [True]
    asked = answering(lambda request: refuse(request) if down[0] else httpx.Response(204))
    around = to_service(drive)
    around.open(OPENING)
    down.clear()
    down.append(False)
    around.ready(ATTEMPT, 1)  # which the storage would have refused
    before = len(asked)
    down[0] = True
    around.open(OPENING)
    assert len(asked) > before + 1  # and it is given time again


def test_when_both_fail_the_error_tells_both(drive: Drive, answering: Any) -> None:
    answering(refuse)
    drive.seen_by("here").fail_before("list", times=None, error=Unavailable("planned: no storage"))
    around = to_service(drive)
    around.ledger.deadline_seconds = 0.0
    with pytest.raises(Unavailable, match="no storage") as caught:
        around.open(OPENING)
    assert "connection refused" in caught.value.__notes__[0]


def test_without_a_known_storage_a_silent_service_is_unreachable(drive: Drive, answering: Any) -> None:
    answering(refuse)
    with pytest.raises(Unreachable, match="where its storage lies is not known") as caught:
        to_service(direct=True).open(OPENING)
    assert "CKPTD_STORAGE" in caught.value.do


def test_no_answer_in_time_is_unavailable(answering: Any) -> None:
    def late(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out", request=request)

    answering(late)
    with pytest.raises(Unavailable, match="ReadTimeout"):
        to_service().heartbeat(BEAT)


# The storage as this machine sees it.


def test_the_services_storage_is_used_if_none_is_named(drive: Drive) -> None:
    with serving(drive) as url:
        assert Transport(url, RUN).storage.url == drive.url


def test_another_storage_than_the_services_is_refused(drive: Drive) -> None:
    other = drive.beside("other")
    init_root(other)
    with serving(drive) as url, pytest.raises(NotInitialised, match="the service's is") as caught:
        _ = Transport(url, RUN, storage_url=other).storage
    assert "CKPTD_STORAGE" in caught.value.do


def test_a_storage_that_is_not_mounted_here_is_refused(drive: Drive) -> None:
    with serving(drive) as url, pytest.raises(NotInitialised, match="not mounted"):
        _ = Transport(url, RUN, storage_url=drive.beside("empty")).storage


# Waiting.


def test_a_long_poll_is_answered_when_it_happens(drive: Drive) -> None:
    with serving(drive, relook_seconds=30.0) as url:
        rank_0, rank_1 = Transport(url, RUN), Transport(url, RUN)
        rank_0.open(OPENING)
        found: list[object] = []
        waiting = threading.Thread(
            target=lambda: found.append(rank_1.join(ATTEMPT, None, deadline_seconds=DEADLINE_SECONDS))
        )
        waiting.start()
        answer = rank_0.begin(BeginRequest(attempt=ATTEMPT, job="job", world=2))
        waiting.join(DEADLINE_SECONDS)
        assert found == [answer]


@pytest.mark.parametrize("over_http", [True, False])
def test_waiting_in_vain_ends_at_the_deadline(drive: Drive, over_http: bool) -> None:
    with serving(drive) as url:
        asking = Transport(url if over_http else drive.url, RUN)
        asking.open(OPENING)
        with pytest.raises(Unreachable, match="rank 0 did not begin within 0 s"):
            asking.join(ATTEMPT, None, deadline_seconds=0.2)
        assert asking.parts(SAVE, 2, deadline_seconds=0.2).parts == {}
        assert asking.save_status(SAVE, deadline_seconds=0.2).status == "pending"


def test_nobody_waits_for_what_nobody_wants(drive: Drive) -> None:
    direct = Transport(drive.url, RUN)
    direct.open(OPENING)
    status = direct.save_status(SAVE, deadline_seconds=DEADLINE_SECONDS * 10, wanted=lambda: False)
    assert status.status == "pending"


def test_an_outage_is_waited_out_but_not_a_drive_that_is_not_mounted(drive: Drive) -> None:
    direct = Transport(drive.url_for("here"), RUN)
    direct.open(OPENING)
    fault = drive.seen_by("here").fail_before("list", times=3)
    status = direct.save_status(SAVE, deadline_seconds=DEADLINE_SECONDS * 10, wanted=lambda: fault.fired < 3)
    assert (status.status, fault.fired) == ("pending", 3)
    drive.seen_by("here").fail_before("list", error=NotInitialised("planned"))
    with pytest.raises(NotInitialised, match="planned"):
        direct.save_status(SAVE, deadline_seconds=DEADLINE_SECONDS * 10)


def test_parts_are_complete_when_the_named_writers_are_there(drive: Drive) -> None:
    direct = Transport(drive.url, RUN)
    folder = f"runs/{RUN}/manifests/{SAVE}"
    for writer in (0, 7):
        drive.storage.put(f"{folder}/part-{writer}-{'0' * 16}.json", [b"{}"], 2)
    assert set(direct.parts(SAVE, 2, deadline_seconds=0.1).parts) == {"0", "7"}
    drive.storage.put(f"{folder}/part-1-{'0' * 16}.json", [b"{}"], 2)
    assert "1" in direct.parts(SAVE, 2, deadline_seconds=DEADLINE_SECONDS).parts


def test_a_part_that_cannot_be_announced_is_found_by_listing(
    answering: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptd")
    answering(refuse)
    to_service().report_part(SAVE, 0)
    assert "was not announced" in caplog.text
    Transport("file:///nowhere", RUN).report_part(SAVE, 0)  # there is nobody to tell


# The whole way.


def test_a_job_over_the_service(drive: Drive) -> None:
    with serving(drive) as url:
        job = Job(drive, 3, url=url)

        def life(client: Any) -> list[object]:
            trained = Trained()
            steps: list[object] = [client.restore(trained.app)]
            steps.append(client.save(trained.app, step=1, per_rank={"rank": client.rank}, wait=True).status)
            return steps

        assert job.run(life) == [[0, "durable"]] * 3
    assert drive.steps() == [1]
    # The ranks wrote payload themselves, and no record of the log.
    seen = [call for rank in range(3) for call in drive.seen_by(rank).history]
    puts = [key for operation, key in seen if operation == "put" and key.startswith("runs/")]
    assert len(puts) == 7
    assert not any("/log/" in key for key in puts)


def records_written(drive: Drive) -> int:
    """How many records of the log rank 0 wrote itself."""
    return sum(operation == "put" and "/log/" in key for operation, key in drive.seen_by(0).history)


def test_a_job_outlives_its_service_and_finds_it_again(drive: Drive) -> None:
    with serving(drive) as url:
        client = Job(drive, url=url).client()
        client._transport._patience_seconds = 0.2
        client.restore(Trained().app)
        client.save(Trained().app, step=1, wait=True)
    client.save(Trained().app, step=2, wait=True)
    client.save(Trained().app, step=3, wait=True)
    written_around = records_written(drive)
    assert written_around > 0
    with serving(drive, port=int(url.rpartition(":")[2])):
        client.save(Trained().app, step=4, wait=True)
        assert records_written(drive) == written_around  # the service wrote this one
        client.close()
    assert drive.steps() == [1, 2, 3, 4]
    train(drive, [5])
    assert drive.steps() == [1, 2, 3, 4, 5]
