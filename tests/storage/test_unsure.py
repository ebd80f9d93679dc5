"""A folder whose fsync failed: its names are made anew, or not taken for durable by this process any more."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd import layout
from ckptd.errors import Unavailable
from ckptd.storage import publish
from ckptd.storage.local import LocalStorage

LOG = "runs/r/log"
ONE, TWO = f"{LOG}/0000000000000001.json", f"{LOG}/0000000000000002.json"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "root")
    storage.initialise()
    return storage


Failing = Callable[[str], list[str]]


@pytest.fixture
def failing(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> Failing:
    """`failing(folder)`: the next fsync of that folder fails; the list has those below the root that went well."""
    real = os.fsync
    broken: list[str] = []
    synced: list[str] = []

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path in broken:
            broken.remove(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)
        synced.append(os.path.relpath(path, storage.root))

    def fail(folder: str) -> list[str]:
        broken.append(os.path.normpath(os.path.join(storage.root, folder)))
        return synced

    monkeypatch.setattr(os, "fsync", fsync)
    return fail


def put(storage: LocalStorage, key: str, data: bytes = b"x") -> None:
    storage.put(key, [data], len(data))


def inode(storage: LocalStorage, key: str) -> int:
    return os.stat(os.path.join(storage.root, key)).st_ino


def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive such as NFS, where two names cannot change places."""

    def refuse(*names: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(publish, "exchange", refuse)


def test_T7_a_name_whose_folder_failed_is_made_anew(storage: LocalStorage, failing: Failing) -> None:
    put(storage, f"{LOG}/other")
    synced = failing(LOG)
    with pytest.raises(Unavailable, match="EIO"):
        put(storage, ONE, b"record")
    before = inode(storage, ONE)
    with storage.reader(ONE) as reader:
        storage.sync(ONE)
        data = bytearray(6)
        reader.read_into(0, memoryview(data))
    assert bytes(data) == b"record"  # who had it open still reads it
    assert storage.get(ONE, 10) == b"record"
    assert inode(storage, ONE) != before
    assert synced[-1] == LOG
    after = inode(storage, ONE)
    storage.sync(ONE)
    assert inode(storage, ONE) == after  # it is sure now
    assert storage.list("runs/r/tmp") == []


def test_T7_a_name_that_cannot_be_made_anew_stays_unsure(
    storage: LocalStorage, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_exchange(monkeypatch)
    put(storage, f"{LOG}/other")
    failing(LOG)
    with pytest.raises(Unavailable):
        put(storage, ONE)
    for _ in range(2):
        with pytest.raises(Unavailable, match="failed earlier in this process"):
            storage.sync(ONE)
    assert storage.get(ONE, 10) == b"x"
    assert storage.list("runs/r/tmp") == []
    assert in_new_process(storage, f"sync('{ONE}')")  # it can only ask the drive


def test_T7_no_record_is_put_behind_one_that_is_unsure(
    storage: LocalStorage, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, f"{LOG}/other")
    failing(LOG)
    with pytest.raises(Unavailable):
        put(storage, ONE)
    with monkeypatch.context() as patch:
        no_exchange(patch)
        with pytest.raises(Unavailable, match="failed earlier in this process"):
            put(storage, TWO)
    assert TWO.rpartition("/")[2] not in storage.list(LOG)
    before = inode(storage, ONE)
    put(storage, TWO)
    assert inode(storage, ONE) != before


def test_L8_a_new_folder_of_slots_stands_on_the_one_before(
    storage: LocalStorage, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last slot of a folder that is unsure, or that another process has not fsynced yet, is made durable before
    the first slot of the next folder can be seen: no power cut may leave a gap."""
    last, first = layout.log_key("r", 99), layout.log_key("r", 100)
    folder = layout.segment_folder("r", 0)
    put(storage, layout.log_key("r", 98))
    synced = failing(folder)
    with pytest.raises(Unavailable):
        put(storage, last)
    before = inode(storage, last)
    with monkeypatch.context() as patch:
        no_exchange(patch)
        with pytest.raises(Unavailable, match="failed earlier in this process"):
            put(storage, first)
    assert storage.list(layout.segment_folder("r", 1)) == []
    synced.clear()
    put(storage, first)
    assert inode(storage, last) != before
    assert synced.index(folder) < synced.index(layout.segment_folder("r", 1))
    synced.clear()
    put(storage, layout.log_key("r", 200))
    assert layout.segment_folder("r", 1) in synced  # whoever wrote into it
    synced.clear()
    put(storage, layout.log_key("r", 201))
    assert layout.segment_folder("r", 1) not in synced


def test_a_large_file_is_not_copied_but_stays_unsure(
    storage: LocalStorage, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "MAX_ANEW_BYTES", 4)
    put(storage, f"{LOG}/other")
    failing(LOG)
    with pytest.raises(Unavailable):
        put(storage, ONE, b"payload")
    before = inode(storage, ONE)
    put(storage, TWO)  # the next try, under another name, is its own
    assert inode(storage, ONE) == before
    with pytest.raises(Unavailable, match="failed earlier in this process"):
        storage.sync(ONE)


@pytest.mark.parametrize("folder", [".", "runs", "runs/r"])
def test_T7_a_new_folder_whose_name_is_unsure_is_made_anew(
    storage: LocalStorage, failing: Failing, folder: str
) -> None:
    synced = failing(folder)
    with pytest.raises(Unavailable):
        put(storage, ONE)
    assert not any(path.is_file() for path in Path(storage.root, "runs").rglob("*"))
    put(storage, ONE)
    assert folder in synced


def test_T7_a_used_folder_stays_unsure_in_this_process(storage: LocalStorage, failing: Failing) -> None:
    put(storage, ONE)
    other = LocalStorage(storage.root)  # has not made the way to the log durable
    failing("runs/r")
    with pytest.raises(Unavailable):
        put(other, TWO)
    with pytest.raises(Unavailable, match="failed earlier in this process"):
        put(other, TWO)
    put(storage, TWO)  # this one had
    assert in_new_process(storage, f"put('{LOG}/0000000000000003.json', [b'x'], 1)")


def test_a_failed_sync_makes_a_name_unsure_too(storage: LocalStorage, failing: Failing) -> None:
    put(storage, ONE)
    before = inode(storage, ONE)
    failing(LOG)
    with pytest.raises(Unavailable):
        storage.sync(ONE)
    storage.sync(ONE)
    assert inode(storage, ONE) != before


def test_an_unsure_name_that_is_gone_stands_in_nobodys_way(storage: LocalStorage, failing: Failing) -> None:
    put(storage, f"{LOG}/other")
    failing(LOG)
    with pytest.raises(Unavailable):
        put(storage, ONE)
    storage.delete(ONE)
    put(storage, TWO)
    put(storage, ONE)
    storage.sync(ONE)


def in_new_process(storage: LocalStorage, call: str) -> bool:
    """Whether a process that knows nothing of the failure can do it."""
    program = f"from ckptd.storage.local import LocalStorage; LocalStorage({storage.root!r}).{call}"
    return subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
