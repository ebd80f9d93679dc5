"""With a token set, nobody gets anywhere without it."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from ckptd.errors import Unauthorized
from ckptd.service.auth import OPEN_PATHS
from tests.service.calling import call, error_in, make_app, memory_ledger

TOKEN = "a-token.of~ours="


@pytest.fixture
def app() -> FastAPI:
    return make_app(memory_ledger(), token=TOKEN)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        TOKEN,
    ],
)
@pytest.mark.parametrize("path", ["/v1/runs", "/v1/storage", "/nothing", "/health/live/", "/health/../v1/runs"])
def test_without_the_token(app: FastAPI, header: str | None, path: str) -> None:
    answer = call(app, "GET", path, headers={} if header is None else {"Authorization": header})
    assert isinstance(error_in(answer), Unauthorized)
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert TOKEN not in answer.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_token(app: FastAPI, scheme: str) -> None:
    assert call(app, "GET", "/v1/runs", headers={"Authorization": f"{scheme} {TOKEN}"}).status_code == 200


def test_two_tokens_are_none(app: FastAPI) -> None:
    headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer other")]
    assert call(app, "GET", "/v1/runs", headers=headers).status_code == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_health_and_the_documentation_are_open(app: FastAPI, path: str) -> None:
    assert call(app, "GET", path).status_code == 200


def test_the_token_is_in_no_description_of_the_settings(app: FastAPI) -> None:
    assert TOKEN not in repr(app.state.service.settings)
