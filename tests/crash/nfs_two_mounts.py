"""Checks on a real NFS server, between two mounts of it; `scripts/nfs_check.py` runs this in a guest kernel."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd import layout
from ckptd.storage import init_root
from ckptd.storage.base import Storage
from ckptd.storage.local import LocalStorage
from ckptd.testing.storage_contract import StorageContract
from tests.crash.test_two_hosts import (  # noqa: F401 - collected by pytest
    Drive,
    test_A6_two_hosts_that_race_get_one_record_per_slot,
    test_S7_incarnations_that_alternate_between_hosts_see_what_the_other_was_told,
)

EXPORT, ONE, TWO = Path("/run/export"), Path("/run/one"), Path("/run/two")


@pytest.fixture
def folder() -> str:
    """A new folder of the export with an initialised storage in it, made by host one."""
    name = layout.new_nonce()
    (EXPORT / name).mkdir()
    init_root(str(ONE / name / "root"))
    return name


@pytest.fixture
def drive(folder: str) -> Drive:
    hosts: list[Any] = [SimpleNamespace(path=mount / folder) for mount in (ONE, TWO)]
    return Drive(EXPORT / folder, *hosts)


class TestOnNfs(StorageContract):
    @pytest.fixture
    def storage(self, folder: str) -> Storage:
        return LocalStorage(ONE / folder / "root")


def test_a_name_remembered_as_absent_is_found_on_the_other_host(folder: str) -> None:
    one, two = LocalStorage(ONE / folder / "root"), LocalStorage(TWO / folder / "root")
    for number in range(1, 51):
        key = layout.log_key("r", number)
        assert not (TWO / folder / "root" / key).exists()
        one.put(key, [b"x"], 1)
        assert two.get(key, 1) == b"x"
        assert layout.log_key("r", number).rpartition("/")[2] in two.list(layout.segment_folder("r", 0))
