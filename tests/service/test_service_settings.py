"""Settings: where they come from, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.errors import Invalid
from ckptd.service.settings import ServiceSettings, is_loopback, load


def test_defaults_listen_on_this_machine_only() -> None:
    chosen = load(storage="memory://x")
    assert (chosen.host, chosen.port, chosen.token) == ("127.0.0.1", 8440, None)


def test_the_environment_counts_and_what_is_given_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_STORAGE", "memory://env")
    monkeypatch.setenv("CKPTD_PORT", "9000")
    monkeypatch.setenv("CKPTD_MAX_BODY_BYTES", "4096")
    chosen = load(port=9001, storage=None)
    assert (chosen.storage, chosen.port, chosen.max_body_bytes) == ("memory://env", 9001, 4096)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-1", ""])
def test_beyond_this_machine_only_with_a_token(host: str) -> None:
    with pytest.raises(Invalid, match=r"token|host"):
        load(storage="memory://x", host=host)
    if host:
        assert load(storage="memory://x", host=host, token="t").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "storage"),
        ({"storage": ""}, "storage"),
        ({"storage": "memory://x", "port": 70000}, "port"),
        ({"storage": "memory://x", "max_body_bytes": 1}, "max_body_bytes"),
        ({"storage": "memory://x", "max_wait_seconds": float("inf")}, "max_wait_seconds"),
        ({"storage": "memory://x", "relook_seconds": 0}, "relook_seconds"),
        ({"storage": "memory://x", "token": ""}, "token"),
        ({"storage": "memory://x", "token": "two words"}, "token"),
        ({"storage": "memory://x", "token": "tökén"}, "token"),
    ],
)
def test_a_bad_setting_is_named(given: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTD_STORAGE", raising=False)
    with pytest.raises(Invalid) as caught:
        load(**given)
    assert caught.value.fields["field"] == field
    assert f"CKPTD_{field.upper()}" in caught.value.do
    assert "tökén" not in str(caught.value)


def test_every_setting_says_what_it_is() -> None:
    """The text under each field, read from the source."""
    import ast
    import inspect
    import textwrap

    (body,) = ast.parse(textwrap.dedent(inspect.getsource(ServiceSettings))).body
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(field)
