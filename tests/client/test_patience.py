"""How long to wait before trying again, where the other side says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from ckptd.errors import Corrupt, Unavailable
from ckptd_client import service as client_service
from ckptd_client.patience import MAX_RETRY_AFTER_SECONDS, again


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waiting passes on a clock of its own; how long it was each time."""
    found: list[float] = []
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        found.append(seconds)

    clock.monotonic, clock.sleep = lambda: clock.now, sleep
    monkeypatch.setattr("tenacity.time", clock)
    monkeypatch.setattr("tenacity.nap.time", clock)
    return found


def refusing(times: int, **fields: Any) -> list[Exception]:
    return [Unavailable("planned", **fields) for _ in range(times)]


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({}, 0.1, 0.2 + 0.1),
        ({"retry_after_seconds": 2}, 2.0, 4.0),
        ({"retry_after_seconds": 86400}, MAX_RETRY_AFTER_SECONDS, 2 * MAX_RETRY_AFTER_SECONDS),
    ],
)
def test_a_pause_is_as_long_as_the_service_asks_for(
    slept: list[float], fields: dict[str, Any], least: float, most: float
) -> None:
    errors = refusing(1, **fields)

    def call() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert again(call, seconds=10**6) == "done"
    assert len(slept) == 1
    assert least <= slept[0] <= most


def test_thousands_do_not_come_again_at_the_same_moment(slept: list[float]) -> None:
    for _ in range(50):
        with pytest.raises(Unavailable):
            again(lambda: _raise(Unavailable("full", retry_after_seconds=2)), seconds=60.0, tries=2)
    assert len(slept) == len(set(slept)) == 50
    assert max(slept) - min(slept) > 0.5


def _raise(error: Exception) -> None:
    raise error


def answer(status: int, retry_after: str | None, code: str = "unavailable") -> httpx.Response:
    headers = {"Content-Type": "application/problem+json"}
    if retry_after is not None:
        headers["Retry-After"] = retry_after
    return httpx.Response(
        status,
        headers=headers,
        json={"code": code, "detail": "full", "do": "Retry.", "fields": {}},
        request=httpx.Request("GET", "http://ckptd"),
    )


@pytest.mark.parametrize(("header", "seconds"), [("2", 2), ("0", 0), (None, None), ("soon", None), ("-1", None)])
def test_a_problem_says_when_to_come_again(header: str | None, seconds: int | None) -> None:
    error = client_service._problem(answer(503, header))
    assert isinstance(error, Unavailable)
    assert error.fields.get("retry_after_seconds") == seconds


def test_only_what_may_pass_is_tried_again() -> None:
    error = client_service._problem(answer(409, "2", "corrupt"))
    assert isinstance(error, Corrupt)
    assert "retry_after_seconds" not in error.fields
