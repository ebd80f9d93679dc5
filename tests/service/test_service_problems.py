"""Every error becomes a problem that the other side can raise again."""

from __future__ import annotations

import logging

import pytest
from fastapi import FastAPI

from ckptd.errors import (
    AlreadyExists,
    CkptdError,
    Conflict,
    Corrupt,
    Fenced,
    InUse,
    Invalid,
    NotFound,
    NotInitialised,
    OutcomeUnknown,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from ckptd.ledger import Ledger
from tests.service.calling import call, error_in, get, make_app, memory_ledger

ATTEMPT = "1" * 32


@pytest.fixture
def ledger() -> Ledger:
    return memory_ledger()


@pytest.fixture
def app(ledger: Ledger) -> FastAPI:
    return make_app(ledger)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (Fenced, 409),
        (Conflict, 409),
        (InUse, 409),
        (AlreadyExists, 409),
        (Corrupt, 409),
        (Unavailable, 503),
        (Unreachable, 503),
        (OutcomeUnknown, 503),
        (NotInitialised, 503),
        (Invalid, 422),
        (NotFound, 404),
        (Unauthorized, 401),
        (CkptdError, 500),
    ],
)
def test_an_error_arrives_as_it_was(
    app: FastAPI, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, kind: type[CkptdError], status: int
) -> None:
    thrown = kind("what failed", do="what to do", run="en-it", candidates=[{"step": 1}])

    def fail(run: str) -> None:
        raise thrown

    monkeypatch.setattr(ledger, "run_info", fail)
    answer = get(app, "/v1/runs/en-it")
    assert answer.status_code == status
    error = error_in(answer)
    assert (type(error), error.to_dict()) == (kind, thrown.to_dict())


def test_the_unexpected_gets_a_reference_that_is_in_the_log(
    app: FastAPI, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: str) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(ledger, "run_info", fail)
    with caplog.at_level(logging.ERROR, "ckptd.service"):
        answer = get(app, "/v1/runs/en-it")
    error = error_in(answer)
    assert (answer.status_code, error.code) == (500, "error")
    assert "secret detail" not in answer.text
    (record,) = caplog.records
    assert error.fields["reference"] in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_the_unexpected_in_a_waiting_request(app: FastAPI, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: str, save: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ledger, "save_status", fail)
    answer = get(app, "/v1/runs/en-it/saves/g00000001-000000000001-a1", wait_seconds=30)
    assert (answer.status_code, error_in(answer).code) == (500, "error")


def test_no_such_path_and_no_such_method(app: FastAPI) -> None:
    assert isinstance(error_in(get(app, "/v2/runs")), NotFound)
    answer = call(app, "DELETE", "/v1/runs/en-it")
    assert (answer.status_code, error_in(answer).code) == (405, "invalid")
    assert answer.headers["Allow"] == "GET"


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b"{}", "attempt"),
        (b'{"attempt": 1, "job": "j", "host": "h"}', "attempt"),
        (b'{"attempt": "%s", "job": "j"}' % ATTEMPT.encode(), "host"),
        (b'{"attempt": "%s\\n", "job": "j", "host": "h"}' % ATTEMPT.encode(), "attempt"),
        (b'{"attempt": "%s", "job": "%s", "host": "h"}' % (ATTEMPT.encode(), b"x" * 201), "job"),
        (b'{"attempt": "%s", "job": "\\ud800", "host": "h"}' % ATTEMPT.encode(), "job"),
        (b"9" * 10_000, "body"),
        (b"[" * 10_000, "body"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    app: FastAPI, ledger: Ledger, content: bytes, field: str
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = call(app, "POST", "/v1/runs/en-it/attempts", content=content, headers=headers)
    error = error_in(answer)
    assert (answer.status_code, type(error), error.fields["field"]) == (422, Invalid, field)
    assert ledger.runs() == []


def test_numbers_are_not_rounded_into_shape(app: FastAPI, ledger: Ledger) -> None:
    for world in (1.0, "1", True, 0, 10**6, 10**400):
        answer = call(
            app, "POST", "/v1/runs/en-it/generations", json={"attempt": ATTEMPT, "job": "j", "world": world}
        )
        assert error_in(answer).fields["field"] == "world"
    assert ledger.runs() == []
