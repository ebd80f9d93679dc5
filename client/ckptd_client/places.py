"""Where the bytes of a tensor go: straight into its memory, or through a buffer into memory that has no such form.

Addresses, and not views, are kept: a hundred thousand tensors cost as many integers.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptd.digests import chunk_digest


@dataclass(frozen=True, slots=True)
class Memory:
    """Contiguous memory of this process. `owner` keeps it alive."""

    address: int
    nbytes: int
    owner: object

    def put(self, offset: int, source: int, count: int) -> None:
        ctypes.memmove(self.address + offset, source, count)

    def view(self, offset: int, count: int) -> memoryview:
        """A part of it, to read into."""
        return memoryview((ctypes.c_ubyte * count).from_address(self.address + offset)).cast("B")


class Scattered:
    """A tensor on another device, or with strides of its own. Its bytes are put together first, which takes memory of
    its size from its first byte to its last."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.nbytes = tensor.nbytes
        self._tensor = tensor
        self._lock = threading.Lock()
        self._missing = tensor.nbytes
        self._whole: torch.Tensor | None = None

    def put(self, offset: int, source: int, count: int) -> None:
        with self._lock:
            if self._whole is None:
                self._whole = torch.empty(self._tensor.shape, dtype=self._tensor.dtype)
                self._missing = self.nbytes
            whole = self._whole
        ctypes.memmove(whole.data_ptr() + offset, source, count)
        with self._lock:
            self._missing -= count
            if self._missing:
                return
            self._whole = None
        with torch.no_grad():
            self._tensor.copy_(whole)


Place = Memory | Scattered


def memory_of(value: torch.Tensor | np.ndarray[Any, Any] | bytearray) -> Memory:
    """The memory of something contiguous on the CPU."""
    if isinstance(value, torch.Tensor):
        return Memory(value.data_ptr(), value.nbytes, value)
    if isinstance(value, np.ndarray):
        return Memory(value.ctypes.data, value.nbytes, value)
    return Memory(address_of(memoryview(value)), len(value), value)


def address_of(view: memoryview) -> int:
    """Where the bytes of a writable, contiguous view lie."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if view.nbytes else 0


class Buffer:
    """Memory of this process that chunks are read into before they go to their places. Any thread, one at a time."""

    def __init__(self, size: int) -> None:
        self._array = np.empty(size, np.uint8)
        self.view = memoryview(self._array.data).cast("B")
        self.address = self._array.ctypes.data

    def digest(self, count: int) -> str:
        return chunk_digest(self.view[:count])
