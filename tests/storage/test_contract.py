"""The storage contract, run by every backend this version ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.storage import Storage, init_root, open_storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from ckptd.testing.storage_contract import StorageContract


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()


class TestLocalByLink(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        url = f"file://{tmp_path}/root"
        init_root(url)
        return open_storage(url)


class TestLocalByLock(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        url = f"file://{tmp_path}/root?publish=lock"
        init_root(url)
        return open_storage(url)


class TestFaultyWithoutFaults(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return FaultyStorage(MemoryStorage())
