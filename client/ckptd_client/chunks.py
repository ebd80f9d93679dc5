"""One payload object as a load sees it: its header, the places its tensors go to, and the chunks that are needed.

The header is read before its chunk is verified, because what goes where is known only with it. It takes part in the
digest of that chunk with the very bytes that were parsed. What a wrong one says until then is bounded: places have
the sizes that the verified state tree gives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from ckptd.errors import Corrupt
from ckptd.manifest import ObjectRef
from ckptd.reading import damage_of, damaged, observe, opened, twice
from ckptd.storage.base import Reader, Storage
from ckptd_client.payload import LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from ckptd_client.places import Memory, Place

FIRST_BYTES = 64 * 1024
BLOCK_BYTES = 1024 * 1024
"""What is read or copied at a time, and digested while it lies in the processor's cache."""
IN_PLACE_BYTES = 64 * 1024
FEW = 4
"""More tensors than that, and smaller ones on the average of a chunk, are read together and then copied."""


class Piece(NamedTuple):
    """A tensor's share of one chunk: `nbytes` from `start` on, counted in the chunk, which go to `offset` in
    `place`."""

    start: int
    nbytes: int
    place: Place
    offset: int


@dataclass
class Object:
    """One object. `wanted` are the names that must be verified, `places` those that go somewhere."""

    ref: ObjectRef
    header: bytes
    spans: dict[str, tuple[int, int]]
    wanted: set[str] = field(default_factory=set)
    places: dict[str, Place] = field(default_factory=dict)

    def needed(self) -> list[int]:
        """The chunks that hold the header or something wanted, in order."""
        size, start, end = self.ref.chunk_bytes, len(self.header), self.ref.size
        if len(self.wanted) == len(self.spans):
            return list(range(len(self.ref.chunks)))
        found = set(range(min(-(-start // size), len(self.ref.chunks))))
        for name in self.wanted:
            begin, end = self.spans[name]
            if end > begin:
                found.update(range((start + begin) // size, (start + end - 1) // size + 1))
        return sorted(found)

    def arrange(self) -> None:
        """Called once all places are known."""
        start = len(self.header)
        spans = sorted((self.spans[name], place) for name, place in self.places.items() if place.nbytes)
        self._places = [place for _, place in spans]
        self._begins = [start + begin for (begin, _), _ in spans]

    def extent(self, index: int) -> tuple[int, int]:
        """Where a chunk begins in the object, and before what it ends."""
        begin = index * self.ref.chunk_bytes
        return begin, min(begin + self.ref.chunk_bytes, self.ref.size)

    def pieces(self, index: int) -> Iterator[Piece]:
        """What of a chunk goes somewhere, in order."""
        begin, end = self.extent(index)
        at = max(bisect_right(self._begins, begin) - 1, 0)
        while at < len(self._places) and self._begins[at] < end:
            place, first = self._places[at], self._begins[at]
            low, high = max(first, begin), min(first + place.nbytes, end)
            if low < high:
                yield Piece(low - begin, high - low, place, low - first)
            at += 1

    def head(self, index: int) -> memoryview:
        """What of a chunk is header."""
        begin, end = self.extent(index)
        return memoryview(self.header)[begin:end]


def open_object(storage: Storage, ref: ObjectRef) -> Object:
    """Read the header of one object. Any thread. `Corrupt` with a damage if its bytes are not the committed ones and
    that is why it cannot be read; without one if it was committed unsound."""
    try:
        with opened(storage, ref) as reader:
            header = twice(lambda: _first_bytes(reader, ref.size))
        start, spans = parse_header(memoryview(header), ref.key, size=ref.size)
    except Corrupt as error:
        if damage_of(error) is not None:
            raise
        damage = observe(storage, ref, fresh=False)
        if damage is not None:
            raise damaged(damage) from None
        raise
    return Object(ref, bytes(header[:start]), spans)


def _first_bytes(reader: Reader, size: int) -> bytes:
    header = bytearray(min(FIRST_BYTES, size))
    reader.read_into(0, memoryview(header))
    length = LENGTH_BYTES + int.from_bytes(header[:LENGTH_BYTES], "little")
    if len(header) < length <= min(MAX_HEADER_BYTES + LENGTH_BYTES, size):
        more = bytearray(length - len(header))
        reader.read_into(len(header), memoryview(more))
        header += more
    return bytes(header)


def read_in_place(reader: Reader, item: Object, index: int, pieces: list[Piece]) -> str:
    """Read a chunk straight into its places, which cover it and are all `Memory`; the digest of what lies there."""
    begin, _ = item.extent(index)
    digest = xxhash.xxh3_128(item.head(index))
    for piece in pieces:
        assert isinstance(piece.place, Memory)
        view = piece.place.view(piece.offset, piece.nbytes)
        for start in range(0, piece.nbytes, BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            reader.read_into(begin + piece.start + start, block)
            digest.update(block)
    return digest.hexdigest()


def goes_in_place(item: Object, index: int, pieces: list[Piece]) -> bool:
    """Whether a chunk can be read with `read_in_place`, and is worth it."""
    begin, end = item.extent(index)
    known = len(item.head(index)) + sum(piece.nbytes for piece in pieces)
    few = len(pieces) <= max(known // IN_PLACE_BYTES, FEW)
    return few and known == end - begin and all(isinstance(piece.place, Memory) for piece in pieces)


def deliver(item: Object, index: int, source: memoryview, address: int, pieces: list[Piece]) -> str:
    """Copy a chunk that lies in `source`, at `address`, to its places; the digest of what was copied, with the header
    as it was parsed. Before it is compared nobody may use the places."""
    head = item.head(index)
    digest, done, waiting = xxhash.xxh3_128(head), len(head), iter(pieces)
    piece = next(waiting, None)
    while done < source.nbytes:
        end = min(done + BLOCK_BYTES, source.nbytes)
        digest.update(source[done:end])
        while piece is not None and piece.start < end:
            low, high = max(piece.start, done), min(piece.start + piece.nbytes, end)
            piece.place.put(piece.offset + low - piece.start, address + low, high - low)
            if piece.start + piece.nbytes > end:
                break
            piece = next(waiting, None)
        done = end
    return digest.hexdigest()
