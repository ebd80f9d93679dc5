"""Tensors to one host buffer, by value, in the order they will have in the file.

Taking the copy is the only time a save stops training. The buffer is kept from save to save: memory that was
touched before is several times faster to fill than memory fresh from the kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from pydantic import JsonValue

from ckptd.errors import Conflict, Invalid
from ckptd_client.state import Flat, TensorSource

PAGE_BYTES = 4096
# Bits are copied as integers of the same size: exact for every dtype, also those without arithmetic.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in the data region: `nbytes` at `offset`."""

    name: str
    dtype: JsonValue
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Captured:
    """What one save holds: the tensors' bytes, packed without gaps, and where each lies. The bytes stay as they
    are until `release`, which any thread may call, once the save is over, whatever its outcome."""

    def __init__(self, entries: tuple[Entry, ...], data: memoryview, free: threading.Lock) -> None:
        self.entries = entries
        self._data: memoryview | None = data
        self._free = free
        self._once = threading.Lock()

    @property
    def data(self) -> memoryview:
        if self._data is None:
            raise Conflict("this snapshot was released; its buffer may hold the next save")
        return self._data

    def release(self) -> None:
        """Give the buffer back. Calling it again does nothing."""
        with self._once:
            if self._data is not None:
                self._data = None
                self._free.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class HostSnapshot:
    """One host buffer, for one save at a time. `capture` and `reserve` are called on the training thread only."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._free = threading.Lock()  # held from capture to release, by the save and not by a thread

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.numel()

    def reserve(self, size_bytes: int) -> None:
        """Make room ahead of the first capture, and touch it. `Conflict` while a save uses the buffer."""
        self._take()
        try:
            self._grow(size_bytes)
            self._buffer[::PAGE_BYTES] = 0
        finally:
            self._free.release()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the save that uses the buffer is over; False if it still is not."""
        free = self._free.acquire(timeout=timeout_seconds)
        if free:
            self._free.release()
        return free

    def capture(self, flats: Iterable[Flat]) -> Captured:
        """Copy all tensors of `flats` into the buffer. Returns when the copy is complete: the caller may change
        the originals at once. `Conflict` while a save uses the buffer, `Invalid` when two flats share a name.
        """
        self._take()
        try:
            sources = _merged(flats)
            entries = lay_out(sources)
            size = entries[-1].offset + entries[-1].nbytes if entries else 0
            self._grow(size)
            region = self._buffer[:size]
            data = region.numpy().data
            for entry in entries:
                if entry.nbytes:
                    _copy(sources[entry.name].data, region, data, entry)
        except BaseException:
            self._free.release()
            raise
        return Captured(entries, data.toreadonly(), self._free)

    def _take(self) -> None:
        if not self._free.acquire(blocking=False):
            raise Conflict(
                "the snapshot buffer still belongs to the save before",
                do="Wait for that save, or use one HostSnapshot per save in flight.",
            )

    def _grow(self, size: int) -> None:
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first, or both count
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _merged(flats: Iterable[Flat]) -> dict[str, TensorSource]:
    sources: dict[str, TensorSource] = {}
    for flat in flats:
        twice = sources.keys() & flat.tensors.keys()
        if twice:
            raise Invalid(f"tensor name {min(twice)!r} is in two states of one save", field="prefix")
        sources |= flat.tensors
    return sources


def lay_out(sources: Mapping[str, TensorSource]) -> tuple[Entry, ...]:
    """Offsets without gaps. The largest alignment goes first: as each alignment divides its length, all that
    follows stays aligned too."""
    entries: list[Entry] = []
    offset = 0
    for name, source in sorted(sources.items(), key=lambda item: -item[1].alignment):
        entries.append(Entry(name, source.dtype, source.shape, offset, source.nbytes))
        offset += source.nbytes
    return tuple(entries)


def _copy(source: torch.Tensor | np.ndarray[Any, Any], region: torch.Tensor, data: memoryview, entry: Entry) -> None:
    target = region[entry.offset : entry.offset + entry.nbytes]
    if isinstance(source, torch.Tensor):
        _copy_tensor(source.resolve_conj().resolve_neg(), target)
    elif source.flags.c_contiguous:
        target.numpy()[:] = source.reshape(-1).view(np.uint8)
    else:
        if source.dtype.names is not None:
            target.zero_()  # records are copied field by field: the padding between them stays as it was
        np.copyto(np.ndarray(entry.shape, source.dtype, buffer=data, offset=entry.offset), source)


def _copy_tensor(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_contiguous():
        target.copy_(source.reshape(-1).view(torch.uint8))
        return
    bits = _BITS.get(source.itemsize, source.dtype)
    target.view(bits).view(source.shape).copy_(source.view(bits))
