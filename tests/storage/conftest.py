"""One S3 server for all tests of this folder that want one; each test has a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptd import layout
from ckptd.testing.seaweed import SeaweedProcess


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedProcess]:
    with SeaweedProcess(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_url(seaweed: SeaweedProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh prefix, not initialised, with the trainer's credentials in the environment."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    return seaweed.url(f"test/{layout.new_nonce()}")
