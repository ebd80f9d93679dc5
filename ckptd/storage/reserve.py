"""A little space that is given up when a storage folder is full and a record must be written all the same.

Retention frees space, and begins with a record. So `ckptd init` puts a few files of random bytes beside the marker; a
record that finds no space takes the place of one, and of the next one if somebody else was faster. Housekeeping makes
them again once there is room. Only folders have it: a bucket has no end that ckptd could see.
"""

from __future__ import annotations

import logging
import os

from ckptd import layout
from ckptd.errors import Unavailable
from ckptd.storage.files import WRITE_FLAGS, make, names_in, walk, write_all

SLOTS = 16
SLOT_BYTES = 64 * 1024  # the longest record
ROOM_FACTOR = 4  # refilled when so many times the whole reserve is free
FULL = frozenset({"ENOSPC", "EDQUOT"})
_log = logging.getLogger("ckptd.storage")


def is_full(error: Unavailable) -> bool:
    """Whether a write failed because there is no space."""
    return error.fields.get("errno") in FULL


def fill(root: int) -> int:
    """Make the missing files of the reserve below the open folder `root`, if there is room; how many there are then.

    Never an error: a storage without a reserve is as good as any until it is full.
    """
    try:
        found = os.fstatvfs(root)
        if found.f_bavail * found.f_frsize < SLOTS * SLOT_BYTES * ROOM_FACTOR:
            return len(_slots(root))
        made = make(root, layout.RESERVE)
        folder = walk(root, (layout.RESERVE,))
        if folder is None:
            return 0
        try:
            if made:
                _log.info("a reserve of %d KiB is kept for records", SLOTS * SLOT_BYTES // 1024)
            for number in range(SLOTS):
                _make_slot(folder, f"{number:02d}")
        finally:
            os.close(folder)
        return len(_slots(root))
    except OSError as error:
        _log.debug("the reserve was not filled: %s", error)
        return 0


def give_up_one(root: int) -> bool:
    """Delete one file of the reserve; False if there is none left, or this process may not."""
    try:
        for name in _slots(root):
            try:
                os.unlink(f"{layout.RESERVE}/{name}", dir_fd=root)
            except FileNotFoundError:
                continue  # another writer took it
            _log.warning("the storage is full: %s/%s is given up for a record", layout.RESERVE, name)
            return True
    except OSError as error:
        _log.warning("the reserve cannot be used: %s", error)
    return False


def _slots(root: int) -> list[str]:
    folder = walk(root, (layout.RESERVE,))
    if folder is None:
        return []
    try:
        return sorted(names_in(folder))
    finally:
        os.close(folder)


def _make_slot(folder: int, name: str) -> None:
    """Random bytes, which no file system makes smaller. One that is half written counts for what it holds."""
    try:
        fd = os.open(name, WRITE_FLAGS, 0o644, dir_fd=folder)
    except FileExistsError:
        return
    try:
        write_all(fd, memoryview(os.urandom(SLOT_BYTES)))
        os.fsync(fd)
    finally:
        os.close(fd)
