"""Which objects hold the tensors that a state tree names, and which of their chunks a load must read.

Shared state may lie in the payload of several writers, and in objects of earlier saves. Objects are opened only as
far as names are looked for: where one writer wrote everything, one header is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptd.manifest import ObjectRef, Part
from ckptd.storage.base import Storage
from ckptd_client.bounded import within
from ckptd_client.chunks import Object, open_object
from ckptd_client.filling import Chunk
from ckptd_client.places import Place


class Sources:
    """The objects of one checkpoint, each opened once. No storage is waited for longer than `give_up_at`."""

    def __init__(self, storage: Storage, give_up_at: float) -> None:
        self._storage = storage
        self._give_up_at = give_up_at
        self._opened: dict[str, Object] = {}

    def open(self, ref: ObjectRef) -> Object:
        """`Corrupt` as of `open_object`, `Unreachable` at the deadline."""
        if ref.key not in self._opened:
            self._opened[ref.key] = within(self._give_up_at, ref.key, lambda: open_object(self._storage, ref))
        return self._opened[ref.key]

    def chunks(self) -> list[Chunk]:
        """What is to be read of all that was asked for so far, in the same order on every rank that asked alike."""
        return [(item, index) for item in self._opened.values() for index in item.needed()]

    def arrange(self) -> None:
        """Called once every place is known."""
        for item in self._opened.values():
            item.arrange()


class Names:
    """Finds tensors in `parts`; a name is looked for in the payload of one after the other."""

    def __init__(self, sources: Sources, parts: Sequence[Part]) -> None:
        self._sources = sources
        self._borrowed = {name: item.object for part in parts for item in part.borrowed for name in item.names}
        self._payloads: Iterator[ObjectRef] = (part.payload for part in parts if part.payload is not None)
        self._found: dict[str, Object] = {}

    def size_of(self, name: str) -> int:
        """How many bytes it has; from now on they will be read. `KeyError` if no object has it."""
        while name not in self._found:
            ref = self._borrowed.get(name) or next(self._payloads, None)
            if ref is None:
                raise KeyError(name)
            item = self._sources.open(ref)
            if name in self._borrowed:
                self._found[name] = item
            else:
                self._found |= {found: item for found in item.spans if found not in self._borrowed}
        item = self._found[name]
        item.wanted.add(name)
        begin, end = item.spans[name]
        return end - begin

    def put(self, places: Mapping[str, Place]) -> None:
        """Say where the bytes go."""
        for name, place in places.items():
            self._found[name].places[name] = place
