"""POSIX calls as shared drives need them, below `LocalStorage`.

Everything is addressed from an open folder (`dir_fd`), never by a path from the top: what was verified about
the root when it was opened stays true for the whole call, even if the drive is unmounted meanwhile. Folders
and files are opened with O_NOFOLLOW, so a symbolic link below the root leads nowhere.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self, TypeVar

from ckptd.errors import CkptdError, Corrupt, Invalid, Unavailable
from ckptd.storage.unsure import sync_subfolder

T = TypeVar("T")

# O_PATH costs no round trip on network drives; O_NONBLOCK keeps a planted FIFO from blocking the open.
FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

_log = logging.getLogger("ckptd.storage")
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def os_error(error: OSError, operation: str, path: str, wanted_bytes: int | None = None) -> CkptdError:
    """Our error for a failed system call; the caller raises it `from error`."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    fields = {"errno": name, "operation": operation, "path": path}
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return Corrupt(
            f"{operation} {path} failed: {name}: it, or a folder above it, is a symbolic link or a file in a "
            "folder's place",
            do="Put the real folder or file back; ckptd follows no link below the root.",
            **fields,
        )
    message, do = f"{operation} {path} failed: {name} ({error.strerror or error})", ""
    if error.errno in _REFUSED:
        message += f"; this process runs as uid {os.geteuid()}, gid {os.getegid()}"
        do = "Check the permissions of the folder and how the drive is mounted."
    elif error.errno in _FULL:
        if wanted_bytes is not None:
            message += f"; {wanted_bytes} bytes were wanted"
        message += ": the storage is full, or a quota or file size limit is reached"
        do = "Make room or raise the limit; nothing was half written."
    elif error.errno == errno.ENOENT:
        message += "; the name is listed in its folder, or its folder is being removed"
    if wanted_bytes is not None:
        return Unavailable(message, do=do, wanted_bytes=wanted_bytes, **fields)
    return Unavailable(message, do=do, **fields)


@contextmanager
def os_errors(operation: str, path: str, wanted_bytes: int | None = None) -> Iterator[None]:
    """Turns an OSError of the block into `Unavailable`, or `Corrupt` for a symbolic link in the way."""
    try:
        yield
    except OSError as error:
        raise os_error(error, operation, path, wanted_bytes) from error


def let_go(fd: int) -> None:
    """Close what was only looked at or read. What a drive says then, such as one whose mount just died, tells nothing
    about what was read."""
    try:
        os.close(fd)
    except OSError as error:
        _log.debug("closing a descriptor failed: %s", error)


def names_in(folder: int) -> list[str]:
    """The names in an open folder, in no order."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        return os.listdir(fd)
    finally:
        let_go(fd)


def if_there(folder: int, name: str, call: Callable[[], T]) -> T | None:
    """The result of `call`, which uses `name` in an open folder; None if the name is not there.

    A client of a network drive may remember for 30 to 90 s that a name did not exist, or which file had it
    (ESTALE, once that is deleted). Listing the folder makes it ask the server again, so either is believed
    only for a name that is not listed.
    """
    try:
        return call()
    except FileNotFoundError:
        listed = name in names_in(folder)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        listed = name in names_in(folder)
    if not listed:
        return None
    with suppress(OSError):
        # On FUSE a listing is not enough, but who wants to create a name asks anew. Nothing comes of it: the kernel
        # never links a folder. What the answer was is seen by the call after it.
        os.link(".", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    return call()


def lookup(folder: int, name: str, flags: int) -> int | None:
    """Open `name` in an open folder; None if it is not there."""

    def call() -> int:
        fd = os.open(name, flags, dir_fd=folder)
        try:
            os.fstat(fd)  # NFS opens what it remembers without a word to the server: a deleted file shows here
        except BaseException:
            let_go(fd)
            raise
        return fd

    return if_there(folder, name, call)


def walk(root: int, parts: Sequence[str], *, create: bool = False, sync: bool = False) -> int | None:
    """Open the folder `parts` below an open folder; None if it is not there.

    `create` makes the missing ones. The folder that holds a new one is fsynced, and with `sync` every folder
    on the way: somebody else may have made it a moment ago and not have come to its fsync yet.
    """
    fd = os.dup(root)
    try:
        for part in parts:
            made = create and make(fd, part)
            child = lookup(fd, part, FOLDER_FLAGS)
            if child is None:
                let_go(fd)
                return None
            parent, fd = fd, child
            try:
                if made or sync:
                    sync_subfolder(parent, part, made=made)
            finally:
                let_go(parent)
    except BaseException:
        let_go(fd)
        raise
    return fd


def make(folder: int, name: str) -> bool:
    """Make a folder; False if it is there already, made earlier or by a racing process."""
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return False
    return True


def write_all(fd: int, data: memoryview) -> None:
    """Write all of `data`, whatever the kernel takes at a time."""
    while data:
        taken = os.write(fd, data)
        if not taken:
            raise OSError(errno.EIO, "the file system took no bytes")
        data = data[taken:]


def flat(buffer: bytes | bytearray | memoryview) -> memoryview:
    """Any contiguous buffer as plain bytes."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


class FileReader:
    """Ranged reads of one file, from any number of threads. `open_file` returns a new descriptor.

    A server that restarted may answer ESTALE for an open file: the file is opened once more, then it counts
    as an error. Descriptors stay open until `close`, as another thread may be reading through the older one.
    """

    def __init__(self, key: str, path: str, open_file: Callable[[], int], *, fresh: bool) -> None:
        self._key, self._path, self._open_file, self._fresh = key, path, open_file, fresh
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._closed = False
        try:
            self._open_next()
            with os_errors("look at", path):
                self.size = os.fstat(self._fds[0]).st_size
        except BaseException:
            self.close()
            raise

    def _open_next(self) -> None:
        fd = self._open_file()
        self._fds.append(fd)
        if self._fresh:
            with os_errors("drop the cache of", self._path):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0:
            raise Invalid(f"offset {offset} of {self._key} is negative", field="offset")
        view, done = flat(buffer), 0
        if view.readonly and view.nbytes:
            raise Invalid(f"the buffer to read {self._key} into is read-only", field="buffer")
        while done < view.nbytes:
            got = self._read_some(view[done:], offset + done)
            if not got:
                raise Corrupt(
                    f"{self._key} ends too early: expected {view.nbytes} bytes at offset {offset}, found {done} "
                    f"(its size was {self.size})",
                    key=self._key,
                    expected=offset + view.nbytes,
                    found=offset + done,
                )
            done += got

    def paged(self) -> bool:
        try:
            os.preadv(self._current(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:  # it is not in the page cache yet
            return True
        except OSError:  # network drives and FUSE cannot say what is
            return False
        return True

    def _read_some(self, view: memoryview, offset: int) -> int:
        fd = self._current()
        try:
            return os.preadv(fd, [view], offset)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise os_error(error, "read", self._path) from error
            with self._lock:
                if self._closed or (len(self._fds) > 1 and fd == self._fds[-1]):
                    raise os_error(error, "read", self._path) from error
                if fd == self._fds[-1]:
                    self._open_next()
        with os_errors("read", self._path):
            return os.preadv(self._current(), [view], offset)

    def _current(self) -> int:
        if self._closed:
            raise Invalid(f"the reader of {self._key} is closed", do="Open a new one.", field="reader")
        return self._fds[-1]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._fds:
                let_go(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)
