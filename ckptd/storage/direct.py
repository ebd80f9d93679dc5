"""Large new files, written at the speed of the drive: past the page cache where the drive allows it, by two threads.

A write through the cache costs a copy of every byte, fills the cache of the training with what nobody reads, and the
drive may stand still until the fsync. So bytes that lie aligned in memory and in the file go straight to the drive
(O_DIRECT); the few that do not, such as the end of the file, go through the cache. A drive that takes no direct
writes, or takes them differently than it says, gets all of them through the cache, and is told to begin at once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
from types import TracebackType
from typing import Self

LARGE_BYTES = 8 << 20  # smaller files are one or two writes, and are best left to the kernel

_STATX_DIOALIGN, _AT_EMPTY_PATH, _WRITE_BEHIND = 0x2000, 0x1000, 2
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE)
_libc = ctypes.CDLL(None, use_errno=True)
_get_buffer, _release_buffer = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
_get_buffer.argtypes, _release_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int], [ctypes.c_void_p]


class LargeFile:
    """Writes the bytes of one new file, in order, through a descriptor that stays the caller's. One thread calls;
    what it gave stays as it is until the end of the block. Raises OSError.

        with LargeFile(fd, size) as file:
            for view in views:
                file.write(view)
            file.finish()          # all bytes are with the kernel or on the drive; the fsync is the caller's
    """

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._at = fd, 0
        self._alignment = direct_alignment(fd)
        self._direct = self._alone = False
        self._second: _SecondWriter | None = None
        if self._alignment:
            allocate(fd, size)

    def write(self, view: memoryview) -> None:
        while view:
            straight = self._straight_bytes(view)
            if straight and self._past_the_cache(on=True):
                self._hand_out(view[:straight])
                taken = straight
            else:
                taken = self._until_aligned(view)
                self._finish_second()
                self._past_the_cache(on=False)
                self._write_at(view[:taken], self._at)
                write_behind(self._fd, self._at, taken)
            view, self._at = view[taken:], self._at + taken

    def finish(self) -> None:
        self._finish_second()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nobody writes to the descriptor any more, whatever happened."""
        if self._second is not None:
            self._second.close()

    def _straight_bytes(self, view: memoryview) -> int:
        """How many of the next bytes can go past the cache."""
        unit = self._alignment
        if not unit or self._at % unit or address(view) % unit:
            return 0
        return view.nbytes // unit * unit

    def _until_aligned(self, view: memoryview) -> int:
        """How many of the next bytes have to go through the cache."""
        unit = self._alignment
        if not unit or (self._at - address(view)) % unit:
            return view.nbytes
        return min(view.nbytes, -self._at % unit or view.nbytes)

    def _past_the_cache(self, *, on: bool) -> bool:
        """Switch; whether it could be done. Set on the open file, because a drive that does not know the flag would
        refuse to open with it, and would have made the file all the same."""
        if on != self._direct:
            try:
                set_direct(self._fd, on)
            except OSError as error:
                if not on or error.errno != errno.EINVAL:
                    raise
                self._alignment = 0
                return False
            self._direct = on
        return True

    def _hand_out(self, view: memoryview) -> None:
        """To the second writer if that has nothing to do, else written here."""
        if self._second is None and not self._alone:
            try:
                self._second = _SecondWriter(self)
            except RuntimeError:  # this process may have no more threads
                self._alone = True
        if self._second is None or not self._second.take(view, self._at):
            self._write_at(view, self._at)

    def _write_at(self, view: memoryview, at: int) -> None:
        """Both threads. A direct write that the drive refuses after all goes through the cache, as all later ones."""
        while view:
            direct = self._direct
            try:
                taken = os.pwrite(self._fd, view, at)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                set_direct(self._fd, False)
                self._direct, self._alignment = False, 0
                continue
            if not taken:
                raise OSError(errno.EIO, "the file system took no bytes")
            view, at = view[taken:], at + taken

    def _finish_second(self) -> None:
        if self._second is not None:
            self._second.finish()


class _SecondWriter:
    """A thread with one write at a time. No daemon: a save outlives the main thread, and this one is part of it."""

    def __init__(self, file: LargeFile) -> None:
        self._file = file
        self._idle = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ckptd-write")
        self._thread.start()

    def take(self, view: memoryview, at: int) -> bool:
        """Whether it is idle, and now writes this. Raises what an earlier write raised."""
        if not self._idle.acquire(blocking=False):
            return False
        if self._error is not None:
            self._idle.release()
            raise self._error
        self._orders.put((view, at))
        return True

    def finish(self) -> None:
        """Wait for its write, as long as that would take on the caller's own thread; raises what it raised."""
        with self._idle:
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._file._write_at(*order)
            except BaseException as error:  # noqa: BLE001 - handed to the thread that asked
                self._error = error
            del order
            self._idle.release()


def direct_alignment(fd: int) -> int:
    """What file offsets, lengths and addresses of direct writes must be multiples of; 0 where there are none, or
    where the kernel does not say (before 6.1, and of network drives). Never less than a page: bytes of one page do
    not go both ways."""
    call = getattr(_libc, "statx", None)
    found = (ctypes.c_uint32 * 64)()
    if call is None or call(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
        return 0
    memory, offset = found[38], found[39]
    if not found[0] & _STATX_DIOALIGN or not offset:
        return 0
    return max(mmap.PAGESIZE, memory, offset)


def set_direct(fd: int, on: bool) -> None:
    """OSError (EINVAL) where the file cannot be written past the cache."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def allocate(fd: int, size: int) -> None:
    """Take the space of a file at once. OSError (ENOSPC) if there is not as much; nothing where drives do not offer
    it. Not `posix_fallocate`, which would then write every block."""
    while _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size)):
        number = ctypes.get_errno()
        if number in _NOT_OFFERED:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def write_behind(fd: int, at: int, size: int) -> None:
    """Let the drive begin to write what the cache took, instead of waiting for the fsync, which alone counts."""
    call = getattr(_libc, "sync_file_range", None)
    if call is None or not call(fd, ctypes.c_long(at), ctypes.c_long(size), _WRITE_BEHIND):
        return
    number = ctypes.get_errno()
    if number not in _NOT_OFFERED:
        raise OSError(number, os.strerror(number))


def address(view: memoryview) -> int:
    """Where the bytes of a flat view lie in memory."""
    buffer = (ctypes.c_void_p * 16)()  # a Py_buffer, which begins with the address
    _get_buffer(view, buffer, 0)
    try:
        return buffer[0] or 0
    finally:
        _release_buffer(buffer)
