"""Where the end-to-end tests keep their runs: a folder, and a bucket of a real S3 server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.storage import init_root
from ckptd.testing.seaweed import SeaweedProcess


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedProcess]:
    with SeaweedProcess(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new, initialised storage; this process and those it starts have what they need to reach it."""
    url = f"file://{tmp_path}/root"
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        url = server.url(secrets.token_hex(6))
    init_root(url)
    return url
