"""For all tests: where runs are kept, one S3 server for all who want one, and no dependence on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from ckptd import layout
from ckptd.storage import init_root
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.storage.s3 import S3Storage
from ckptd.testing.seaweed import SeaweedProcess

settings.register_profile("ckptd", deadline=None, print_blob=True)
settings.load_profile("ckptd")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedProcess]:
    """A real S3 server for all tests of this process that want one and do not stop it."""
    with SeaweedProcess(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def s3_url(seaweed: SeaweedProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh prefix, not initialised; this process and those it starts have the trainer's credentials."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    return seaweed.url(f"test-{layout.new_nonce()}/root")


@pytest.fixture(params=["folder", "s3"])
def bare_home(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a storage that is not initialised: an empty folder, as an unmounted drive leaves it, or a prefix
    where nothing is."""
    if request.param == "s3":
        url: str = request.getfixturevalue("s3_url")
        return url
    (tmp_path / "root").mkdir()
    return f"file://{tmp_path}/root"


@pytest.fixture
def home(bare_home: str) -> str:
    """The URL of a new, initialised storage."""
    init_root(bare_home)
    return bare_home


@pytest.fixture(params=["memory", "s3"])
def bare_store(request: pytest.FixtureRequest) -> MemoryStorage | S3Storage:
    """For tests that need no other process: a storage in memory or on a real S3 server, not initialised."""
    if request.param == "s3":
        return S3Storage(request.getfixturevalue("s3_url"))
    return MemoryStorage(marked=False)


@pytest.fixture
def store(bare_store: MemoryStorage | S3Storage) -> Storage:
    """A new, initialised storage in memory or on a real S3 server."""
    bare_store.initialise()
    return bare_store
