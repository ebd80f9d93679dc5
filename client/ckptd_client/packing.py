"""Bytes of tensors and arrays to their places in a region of host memory, in one pass, with little Python for each.

What lies in host memory in one piece is moved by memmove, which needs neither views nor dispatch. What lies on a GPU
is queued on a stream of its own, so that the copies run beside each other and one wait at the end is enough.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Source = torch.Tensor | np.ndarray[Any, Any]
MOVE_BYTES = 32 << 20  # at once, before it is said how far it came
SMALL_BYTES = 64 << 10
# Bits are copied as integers of the same size: exact for every dtype, also those without arithmetic.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_move = ctypes.CDLL(None).memmove
# Keeps the GIL: to give it away a hundred thousand times costs a turn of every other busy thread each time.
_move_small = ctypes.PyDLL(None).memmove
for _function in (_move, _move_small):
    _function.argtypes, _function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


def pack(items: Iterable[tuple[int, int, Source]], region: torch.Tensor, arrived: Callable[[int], None]) -> None:
    """Copy (offset, nbytes, source) into `region`, flat uint8, by rising offset. Training thread. `arrived` is told
    up to where all bytes are there, now and then and at the end; returns when all are."""
    devices = _Devices()
    try:
        end = _pack(items, region, devices, arrived)
    finally:
        devices.wait()  # whatever happened: nothing may still come into the region later
    arrived(end)


def _pack(
    items: Iterable[tuple[int, int, Source]], region: torch.Tensor, devices: _Devices, arrived: Callable[[int], None]
) -> int:
    base, told, end = region.data_ptr(), 0, 0
    for offset, nbytes, source in items:
        if not nbytes:
            continue
        end = offset + nbytes
        if not isinstance(source, torch.Tensor):
            _copy_array(source, region[offset:end])
        elif not source.is_cpu:
            devices.copy(source, region[offset:end])
        elif not source.is_contiguous() or source.is_conj() or source.is_neg():
            _copy_tensor(source.resolve_conj().resolve_neg(), region[offset:end])
        elif nbytes <= SMALL_BYTES:
            _move_small(base + offset, source.data_ptr(), nbytes)
        else:
            start = source.data_ptr()
            for at in range(0, nbytes, MOVE_BYTES):
                _move(base + offset + at, start + at, min(MOVE_BYTES, nbytes - at))
                if not devices.busy:
                    arrived(min(offset + at + MOVE_BYTES, end))
        if end - told >= MOVE_BYTES and not devices.busy:
            told = end
            arrived(end)
    return end


class _Devices:
    """Copies that are not in host memory. Those from CUDA go on while the next is queued, if the region is pinned."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if not source.is_cuda:
            _copy_tensor(source.resolve_conj().resolve_neg(), target)
            return
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(source.device))  # the values are being computed on that one
        with torch.cuda.stream(stream):
            _copy_tensor(source.resolve_conj().resolve_neg(), target)

    def wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def _copy_tensor(source: torch.Tensor, target: torch.Tensor) -> None:
    later = source.is_cuda
    if source.is_contiguous():
        target.copy_(source.reshape(-1).view(torch.uint8), non_blocking=later)
        return
    bits = _BITS.get(source.itemsize, source.dtype)
    target.view(bits).view(source.shape).copy_(source.view(bits), non_blocking=later)


def _copy_array(source: np.ndarray[Any, Any], target: torch.Tensor) -> None:
    if source.flags.c_contiguous:
        _move(target.data_ptr(), source.ctypes.data, source.nbytes)
        return
    if source.dtype.names is not None:
        target.zero_()  # records are copied field by field: the padding between them stays as it was
    np.copyto(np.ndarray(source.shape, source.dtype, buffer=target.numpy().data), source)
