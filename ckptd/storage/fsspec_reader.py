"""Ranged reads of one object of an fsspec store."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from ckptd.errors import Corrupt, Invalid
from ckptd.storage.files import flat

RANGE_BYTES = 16 << 20  # of one request: what it holds in memory


class FsspecReader:
    """Ranged reads, in requests of at most 16 MiB, from any number of threads. `get_range` gives the bytes from its
    first argument to before its second."""

    def __init__(self, key: str, size: int, get_range: Callable[[int, int], bytes]) -> None:
        self._key = key
        self._get_range: Callable[[int, int], bytes] | None = get_range
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        get_range = self._get_range
        if get_range is None:
            raise Invalid(f"the reader of {self._key} is closed", do="Open a new one.", field="reader")
        if offset < 0:
            raise Invalid(f"offset {offset} of {self._key} is negative", field="offset")
        view = flat(buffer)
        if view.readonly and view.nbytes:
            raise Invalid(f"the buffer to read {self._key} into is read-only", field="buffer")
        if offset + view.nbytes > self.size:
            raise self._too_short(offset + view.nbytes, self.size)
        for start in range(0, view.nbytes, RANGE_BYTES):
            piece = view[start : start + RANGE_BYTES]
            data = get_range(offset + start, offset + start + piece.nbytes)
            if len(data) != piece.nbytes:
                raise self._too_short(offset + start + piece.nbytes, offset + start + len(data))
            piece[:] = data

    def paged(self) -> bool:
        return False

    def close(self) -> None:
        self._get_range = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _too_short(self, expected: int, found: int) -> Corrupt:
        return Corrupt(
            f"{self._key} ends too early: expected {expected} bytes, found {found} (its size was {self.size})",
            key=self._key,
            expected=expected,
            found=found,
        )
