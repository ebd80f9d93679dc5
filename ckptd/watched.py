"""Reading that somebody follows: how many bytes were read so far, and a word to slow it down or to end it.

For whoever reads whole checkpoints in this process: progress for people, the rate of scrubbing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from ckptd.errors import Unavailable
from ckptd.manifest import ManifestRef, ObjectRef
from ckptd.second import Reading, SecondReader, read_here
from ckptd.storage.base import Buffer, Reader, Storage

Watch = Callable[[int], None]
"""Called with the number of bytes that were just read. What it raises ends the reading."""


def unwatched(count: int) -> None:
    """Nobody follows."""


def watched_reader(watch: Watch) -> SecondReader:
    """Reads in this process, and tells. Alone it is no second reading of what this process found."""

    def read(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
        # Of payload, which is what takes its time, and what people are told the size of.
        return read_here(WatchedStorage(storage, watch) if isinstance(ref, ObjectRef) else storage, ref)

    return read


class Pace:
    """A watch that lets no more than `bytes_per_second` through, on the average. `wait` sleeps for so many seconds
    and says whether to stop, as `threading.Event.wait` does; then the reading ends with `Unavailable`."""

    def __init__(self, bytes_per_second: float, wait: Callable[[float], bool]) -> None:
        self._bytes_per_second = bytes_per_second
        self._wait = wait

    def __call__(self, count: int) -> None:
        if self._wait(count / self._bytes_per_second):
            raise Unavailable("the reading was ended before it was done", do="The next one begins anew.")


class WatchedStorage:
    """Another storage, with `watch` behind its readers. All else is passed on."""

    def __init__(self, inner: Storage, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch
        self.url = inner.url

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        self._inner.put(key, chunks, size)

    def get(self, key: str, max_bytes: int) -> bytes:
        return self._inner.get(key, max_bytes)

    def reader(self, key: str, *, fresh: bool = False) -> Reader:
        return _WatchedReader(self._inner.reader(key, fresh=fresh), self._watch)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def list(self, folder: str) -> list[str]:
        return self._inner.list(folder)

    def sync(self, key: str) -> None:
        self._inner.sync(key)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def check_root(self) -> str:
        return self._inner.check_root()


class _WatchedReader:
    def __init__(self, inner: Reader, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch
        self.size = inner.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(offset, buffer)
        self._watch(buffer.nbytes)

    def paged(self) -> bool:
        return self._inner.paged()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.close()
