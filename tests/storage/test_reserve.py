"""The space that is given up for records on a full drive: on a real one, and what can go wrong with it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd import layout
from ckptd.errors import Unavailable
from ckptd.storage import init_root, publish
from ckptd.storage import reserve as reserve_module
from ckptd.storage.files import write_all
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryStorage
from ckptd.storage.reserve import SLOT_BYTES, SLOTS
from ckptd.storage.root import refill_reserve

ROOT = Path(__file__).parents[2]
RECORD = layout.log_key("r", 1)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    init_root(f"file://{tmp_path}/root")
    return LocalStorage(tmp_path / "root")


def slots(storage: LocalStorage) -> list[str]:
    folder = Path(storage.root) / layout.RESERVE
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.mark.parametrize("which", ["with", "without"])
def test_K1_a_full_drive_is_freed_by_retention(tmp_path: Path, which: str) -> None:
    """On a tmpfs of 8 MiB that its own checkpoints fill: the failed save leaves nothing, records still fit, and the
    next save does. Without the reserve nothing can be recorded, and housekeeping says so and goes on later."""
    command = ["unshare", "-Urm", sys.executable, "-m", "tests.storage.full_disk", str(tmp_path), which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reserve_is_made_once_and_made_whole_again(storage: LocalStorage) -> None:
    assert storage.refill_reserve() == SLOTS
    folder = Path(storage.root) / layout.RESERVE
    assert {path.stat().st_size for path in folder.iterdir()} == {SLOT_BYTES}
    (folder / "03").unlink()
    kept = (folder / "04").stat().st_ino
    refill_reserve(storage)
    assert len(slots(storage)) == SLOTS
    assert (folder / "04").stat().st_ino == kept
    refill_reserve(MemoryStorage())  # has none


def full(monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[str]:
    """So many writes find no space; the paths of all of them."""
    tried: list[str] = []

    def write(fd: int, data: memoryview) -> None:
        tried.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(tried) <= times:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(fd, data)

    monkeypatch.setattr(publish, "write_all", write)
    return tried


def test_a_record_takes_as_much_of_it_as_it_needs(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else was faster twice, and took what was given up."""
    storage.refill_reserve()
    full(monkeypatch, times=3)
    storage.put(RECORD, iter([b"re", b"cord"]), 6)
    assert storage.get(RECORD, 100) == b"record"
    assert slots(storage) == [f"{number:02d}" for number in range(3, SLOTS)]


def test_payload_never_takes_it(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.refill_reserve()
    full(monkeypatch, times=1)
    save = layout.save_id(1, 1, all_ranks=True, count=1)
    for key in (layout.payload_key("r", save, 0, "n"), layout.part_key("r", save, 0, "0" * 16)):
        tried = full(monkeypatch, times=1)
        with pytest.raises(Unavailable, match="the storage is full"):
            storage.put(key, [b"x"], 1)
        assert len(tried) == 1
    assert len(slots(storage)) == SLOTS


def test_when_it_is_used_up_the_error_is_that_of_the_full_drive(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.refill_reserve()
    tried = full(monkeypatch, times=SLOTS + 1)
    with pytest.raises(Unavailable, match="the storage is full"):
        storage.put(RECORD, [b"record"], 6)
    assert (len(tried), slots(storage)) == (SLOTS + 1, [])
    storage.put(RECORD, [b"record"], 6)


def test_any_other_failure_leaves_it_alone(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.refill_reserve()
    monkeypatch.setattr(reserve_module, "FULL", frozenset({"EIO"}))
    full(monkeypatch, times=1)
    with pytest.raises(Unavailable, match="the storage is full"):
        storage.put(RECORD, [b"record"], 6)
    assert len(slots(storage)) == SLOTS


def test_there_is_no_reserve_where_there_is_no_room(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve_module, "ROOM_FACTOR", 2**40)
    assert storage.refill_reserve() == 0
    assert slots(storage) == []
