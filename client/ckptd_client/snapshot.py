"""Tensors to one host buffer, by value, in the order they will have in the file.

Taking the copy is the only time a save stops training. The buffer is kept from save to save: memory that was
touched before is several times faster to fill than memory fresh from the kernel.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from pydantic import JsonValue

from ckptd.errors import Conflict, Invalid
from ckptd_client.packing import Source, pack
from ckptd_client.state import Flat, TensorSource

HUGE_PAGE_BYTES = 2 << 20
FILL_SECONDS = 600.0  # a copy that takes longer hangs, and the save that waits for it fails
MADV_WIPEONFORK = 18  # of Linux since 4.14; mmap does not name it

PADDING = "padding"  # names of tensors begin with the word for their state and a slash
_ZEROS = np.zeros(256, np.uint8)

log = logging.getLogger("ckptd")


class Entry(NamedTuple):
    """One tensor in the data region: `nbytes` at `offset`."""

    name: str
    dtype: JsonValue
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Captured:
    """What one save holds: the tensors' bytes, packed without gaps, and where each lies. The bytes stay as they
    are until `release`, which any thread may call, once the save is over, whatever its outcome.

    The training thread calls `fill`, once; the save thread may begin before that ends, and waits for what it needs.
    """

    def __init__(
        self, entries: tuple[Entry, ...], sources: list[Source], region: torch.Tensor, free: threading.Lock
    ) -> None:
        self.entries = entries
        self._sources = sources
        self._target: torch.Tensor | None = region
        self._region: memoryview | None = region.numpy().data.toreadonly()
        self._free = free
        self._once = threading.Lock()
        self._news = threading.Condition()
        self._there = 0
        self._complete = False
        self._failure: BaseException | None = None

    def fill(self) -> None:
        """Copy all tensors. Returns when the copy is complete: the caller may change the originals at once."""
        sources, self._sources = self._sources, []
        target, self._target = self._target, None
        assert target is not None, "a capture is filled once"
        items = ((entry.offset, entry.nbytes, source) for entry, source in zip(self.entries, sources, strict=True))
        try:
            pack(items, target, self._arrived)
        except BaseException as error:
            with self._news:
                self._failure = error
                self._news.notify_all()
            raise
        with self._news:
            self._complete = True
            self._news.notify_all()

    def until(self, end: int) -> None:
        """Wait until all bytes before `end` are there. `Invalid` if they do not come: no other try would help."""
        with self._news:
            known = self._news.wait_for(lambda: self._is_there(end) or self._failure is not None, FILL_SECONDS)
            if not self._is_there(end):
                reason = f"failed: {self._failure}" if known else f"is not complete after {FILL_SECONDS:.0f} s"
                raise Invalid(f"the copy of the state {reason}", do="Look at the error of save().") from self._failure

    @property
    def region(self) -> memoryview:
        """The bytes, as far as they are there: see `until`."""
        if self._region is None:
            raise Conflict("this snapshot was released; its buffer may hold the next save")
        return self._region

    @property
    def data(self) -> memoryview:
        """All bytes, once they are there."""
        region = self.region
        self.until(region.nbytes)
        return region

    def release(self) -> None:
        """Give the buffer back. Calling it again does nothing."""
        with self._once:
            if self._region is not None:
                self._region = None
                self._free.release()

    def _arrived(self, end: int) -> None:
        with self._news:
            self._there = end
            self._news.notify_all()

    def _is_there(self, end: int) -> bool:
        return self._complete or end <= self._there

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class HostSnapshot:
    """One host buffer, for one save at a time. `begin`, `capture` and `reserve` are called on the training thread
    only."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._free = threading.Lock()  # held from begin to release, by the save and not by a thread

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.numel()

    def reserve(self, flats: Iterable[Flat]) -> int:
        """Make room for a save of these ahead of the first, touch it, and say how much. `Conflict` while a save uses
        the buffer."""
        size = sum(source.nbytes for source in _merged(flats).values())
        self._take()
        try:
            if self._grow(size):
                self._buffer[:: mmap.PAGESIZE] = 0
        finally:
            self._free.release()
        return size

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the save that uses the buffer is over; False if it still is not."""
        free = self._free.acquire(timeout=timeout_seconds)
        if free:
            self._free.release()
        return free

    def begin(self, flats: Iterable[Flat], last: Collection[str] = ()) -> Captured:
        """Make room and say where each tensor will lie, those named in `last` at the end; the caller fills it.
        `Conflict` while a save uses the buffer, `Invalid` when two flats share a name."""
        self._take()
        try:
            sources = _merged(flats)
            entries = lay_out(sources, last)
            size = entries[-1].offset + entries[-1].nbytes if entries else 0
            self._grow(size)
            region = self._buffer[:size]
            bytes_of = [sources[e.name].data if e.name != PADDING else _ZEROS[: e.nbytes] for e in entries]
            return Captured(entries, bytes_of, region, self._free)
        except BaseException:
            self._free.release()
            raise

    def capture(self, flats: Iterable[Flat], last: Collection[str] = ()) -> Captured:
        """`begin`, and the copy."""
        captured = self.begin(flats, last)
        try:
            captured.fill()
        except BaseException:
            captured.release()
            raise
        return captured

    def _take(self) -> None:
        if not self._free.acquire(blocking=False):
            raise Conflict(
                "the snapshot buffer still belongs to the save before",
                do="Wait for that save, or use one HostSnapshot per save in flight.",
            )

    def _grow(self, size: int) -> bool:
        """Whether it had to be made anew. Then the old one goes first, or both count."""
        if size <= self._buffer.numel():
            return False
        _pin(self._buffer, False)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._buffer = _new_buffer(size)
        _pin(self._buffer, True)
        return True


def _new_buffer(size: int) -> torch.Tensor:
    """Memory for `size` bytes that begins at a page, so that a drive can take it from where it lies. In large pages
    where the kernel has them: it is touched faster. A forked child, such as a data loader's, gets none of it: it
    would keep the bytes of one save alive, and make the next copy each page before it is written."""
    unit = HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else mmap.PAGESIZE
    memory = mmap.mmap(-1, -(-size // unit) * unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, MADV_WIPEONFORK):
        try:
            memory.madvise(advice)
        except OSError as error:
            log.debug("the kernel does not take advice %d about the snapshot buffer: %s", advice, error)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(buffer: torch.Tensor, on: bool) -> None:
    """With CUDA: lock the buffer's pages, or give them back. Without, and if that fails, copies just take longer."""
    if not (torch.cuda.is_available() and buffer.numel()):
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = (
        runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if on
        else runtime.cudaHostUnregister(buffer.data_ptr())
    )
    if int(code):
        log.debug("the snapshot buffer could not be pinned (%s)", code)


def _merged(flats: Iterable[Flat]) -> dict[str, TensorSource]:
    sources: dict[str, TensorSource] = {}
    for flat in flats:
        twice = sources.keys() & flat.tensors.keys()
        if twice:
            raise Invalid(f"tensor name {min(twice)!r} is in two states of one save", field="prefix")
        sources |= flat.tensors
    return sources


def lay_out(sources: Mapping[str, TensorSource], last: Collection[str] = ()) -> tuple[Entry, ...]:
    """Offsets without gaps. The largest alignment goes first: as each alignment divides its length, all that
    follows stays aligned too. Those in `last` go last, in the same way; a few bytes of padding, with a name that no
    state can have, bring them to their alignment."""
    entries: list[Entry] = []
    offset = 0
    order = sorted(sources.items(), key=lambda item: (item[0] in last, -item[1].alignment))
    for index, (name, source) in enumerate(order):
        gap = -offset % source.alignment if index and name in last else 0
        if gap:
            entries.append(Entry(PADDING, "|u1", (gap,), offset, gap))
            offset += gap
        entries.append(Entry(name, source.dtype, source.shape, offset, source.nbytes))
        offset += source.nbytes
    return tuple(entries)
