"""What the protocol needs of a storage: a few methods, and no default for the one that must be atomic.

Keys are relative to the root and come from `ckptd.layout` alone. Every method may raise `Unavailable`
(with the first cause in its message) or `NotInitialised` (the root lost its marker: an unmounted drive).
"Absent" is an answer only under a root whose marker was seen; it is never the reading of an error. A key that
is no plain relative name is `Invalid`.
Idea of the size of this interface: torchtitan's CheckpointStorage; of what not to do: a base class whose
atomic method falls back to check-then-write.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol, Self

Buffer = bytes | bytearray | memoryview


class Reader(Protocol):
    """One open object. Threads may call its methods at the same time."""

    size: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on. `Corrupt` if the object ends before."""

    def paged(self) -> bool:
        """Whether the kernel is known to keep what one process of this host read for all others."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """Callable from any thread."""

    url: str

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        """Create `key` from `chunks`, `size` bytes in all. Atomic: the whole object appears, once, durable at
        return, or nothing does. `AlreadyExists` if the key is taken (on some network drives also by an earlier
        try of one's own whose answer was lost: read it). `Invalid` if the chunks are not `size` bytes. A chunk
        stays as it is until `put` returns: it may be sent from where it lies. What the iterator itself raises
        comes through unchanged, and nothing is left. After `Unavailable` the outcome is open; after `NotInitialised`
        nothing was written.
        """

    def get(self, key: str, max_bytes: int) -> bytes:
        """A small object. `NotFound`; `Corrupt` when it is longer than `max_bytes`."""

    def reader(self, key: str, *, fresh: bool = False) -> Reader:
        """Open an object for ranged reads. `fresh` asks for the bytes on the medium, around caches."""

    def size(self, key: str) -> int:
        """Bytes of an object. `NotFound`."""

    def list(self, folder: str) -> list[str]:
        """Names directly inside `folder`, of objects and folders, sorted; empty for one that does not exist.
        An object is listed from the moment it exists whole; the name of an emptied folder may stay."""

    def sync(self, key: str) -> None:
        """Make what is at `key`, and its name, durable, whoever wrote it. `NotFound`. After `Unavailable` read
        the object again before the next `sync`: what a cache showed may not have reached the medium."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is gone already is no error."""

    def check_root(self) -> str:
        """The storage's uuid from its marker. `NotInitialised` without one."""
