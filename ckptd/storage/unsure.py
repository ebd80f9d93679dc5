"""Names whose folder could not be fsynced: what this process must not take for durable at a later fsync.

The kernel reports a lost write once, and may then call clean what never reached the medium; so an fsync that follows
a failed one proves nothing. Bytes are written anew under another name. A name cannot be another name: it is made anew
instead (`publish.name_anew`), or, where that cannot be done, stays unsure for as long as this process lives.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading

from ckptd.errors import Unavailable

_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_unsure: dict[tuple[int, int], set[str]] = {}  # by device and inode of the folder, whoever opened it


def sync_folder(folder: int, *names: str) -> None:
    """Make the names in an open folder durable. If that fails, `names` are unsure from now on."""
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:
        with _lock:
            _unsure.setdefault(_identity(folder), set()).update(names)
        raise


def sync_subfolder(parent: int, name: str, *, made: bool) -> None:
    """Make the name of a folder durable, which the caller just `made`, or somebody else at some time.

    If that fails the new folder is removed, so that the next try makes it anew; one that is used already cannot be,
    and stays unsure.
    """
    if not made and name in unsure_names(parent):
        raise still_unsure(os.readlink(f"/proc/self/fd/{parent}"), name)
    try:
        sync_folder(parent)
    except OSError:
        if not (made and _removed(parent, name)):
            with _lock:
                _unsure.setdefault(_identity(parent), set()).add(name)
        raise


def unsure_names(folder: int) -> list[str]:
    """The names in an open folder that an fsync cannot make sure any more."""
    if not _unsure:
        return []
    with _lock:
        return sorted(_unsure.get(_identity(folder), ()))


def made_anew(folder: int, name: str) -> None:
    """A name was made a moment ago: the next fsync of its folder counts for it."""
    if _unsure:
        with _lock:
            _unsure.get(_identity(folder), set()).discard(name)


def exchange(one: int, name: str, other: int, other_name: str) -> None:
    """Two names change places in one step. OSError (EINVAL, ENOSYS) where the drive cannot do it."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(one, os.fsencode(name), other, os.fsencode(other_name), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def still_unsure(folder: str, name: str) -> Unavailable:
    """The error for a name that was to be durable and cannot be made so by this process."""
    return Unavailable(
        f"an fsync of {folder} failed earlier in this process, so it cannot be made sure that {name} is on the drive",
        do="Look what is wrong with the drive (dmesg tells), then start this process anew.",
        path=f"{folder}/{name}",
        operation="sync the folder of",
    )


def _removed(parent: int, name: str) -> bool:
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError:
        return False  # somebody uses it already, or the drive does not answer: it stays unsure
    return True


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino
