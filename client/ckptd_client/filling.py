"""Chunks from the storage to where they belong, on a few threads, each one verified.

Errors that pass are waited out chunk by chunk, so what was read already is not read again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ckptd.errors import Corrupt
from ckptd.reading import check_chunk, damage_of, damaged, opened
from ckptd.records import Damage
from ckptd.storage.base import Reader, Storage
from ckptd_client.bounded import Work
from ckptd_client.chunks import Object, deliver, goes_in_place, read_in_place
from ckptd_client.patience import patiently
from ckptd_client.places import Buffer

READ_THREADS = 2
IN_PLACE_SCHEMES = ("file://", "memory://")
"""Where many small reads cost little. Elsewhere each is a request, and a chunk is read with one."""

Chunk = tuple[Object, int]
ReadChunk = Callable[[Reader, Object, int], str]
"""Brings a chunk to where it belongs; the digest of what lies there now."""


class Queue:
    """Chunks that are still to be read, in order. Any thread."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = deque(chunks)
        self._lock = threading.Lock()

    def next_object(self) -> Object | None:
        with self._lock:
            return self._chunks[0][0] if self._chunks else None

    def take(self, item: Object) -> int | None:
        """The next chunk if it is one of this object."""
        with self._lock:
            return self._chunks.popleft()[1] if self._chunks and self._chunks[0][0] is item else None

    def give_back(self, item: Object, index: int) -> None:
        with self._lock:
            self._chunks.appendleft((item, index))


class Damages:
    """What was found, of which the first in the order of chunks is told."""

    def __init__(self) -> None:
        self._found: list[tuple[int, Damage]] = []

    def add(self, damage: Damage) -> None:
        self._found.append((damage.chunk if damage.chunk is not None else -1, damage))

    def first(self) -> Corrupt:
        return damaged(min(self._found, key=lambda found: found[0])[1])

    def __bool__(self) -> bool:
        return bool(self._found)


def fill(storage: Storage, chunks: Sequence[Chunk], give_up_at: float) -> None:
    """Read chunks to their places. Any thread, which waits; nothing writes to the places any more when it returns or
    raises, but for `Unreachable` at `give_up_at`. `Corrupt` with the first damage.
    """
    if not chunks:
        return
    work, damages, queue = Work(), Damages(), Queue(chunks)
    largest = max(min(item.ref.chunk_bytes, item.ref.size) for item, _ in chunks)
    straight = storage.url.startswith(IN_PLACE_SCHEMES)

    def run() -> None:
        into_places = IntoPlaces(largest, straight)
        patiently(lambda: read_through(storage, queue, into_places, work, damages), give_up_at - time.monotonic())

    try:
        work.run([run] * min(READ_THREADS, len(chunks)), give_up_at)
    except Corrupt as error:
        raise (damages.first() if damages else error) from None


def read_through(storage: Storage, queue: Queue, read: ReadChunk, work: Work, damages: Damages) -> None:
    """Take chunks and read them until there are none, or somebody stops. One of several threads."""
    while (item := queue.next_object()) is not None and not work.stop.is_set():
        work.doing(item.ref.key)
        try:
            with opened(storage, item.ref) as reader:
                while not work.stop.is_set() and (index := queue.take(item)) is not None:
                    try:
                        damage = check_chunk(item.ref, index, lambda: read(reader, item, index))
                    except BaseException:
                        queue.give_back(item, index)
                        raise
                    if damage is not None:
                        raise damaged(damage)
        except Corrupt as error:
            damage = damage_of(error)
            if damage is not None:
                damages.add(damage)
            raise


class IntoPlaces:
    """Reads a chunk to its places: straight into them, or by a buffer that is made when the first one needs it."""

    def __init__(self, largest: int, straight: bool) -> None:
        self._largest, self._straight = largest, straight
        self._buffer: Buffer | None = None

    def __call__(self, reader: Reader, item: Object, index: int) -> str:
        pieces = list(item.pieces(index))
        if self._straight and goes_in_place(item, index, pieces):
            return read_in_place(reader, item, index, pieces)
        if self._buffer is None:
            self._buffer = Buffer(self._largest)
        begin, end = item.extent(index)
        view = self._buffer.view[: end - begin]
        reader.read_into(begin, view)
        return deliver(item, index, view, self._buffer.address, pieces)
