"""Which tensors have the bytes that an earlier checkpoint of this incarnation holds: they need not be written.

Frozen layers, the base of a LoRA, embeddings that are not trained: after the copy each tensor is digested, and what a
live checkpoint holds already is borrowed from it. A payload object is one run of bytes, so what is borrowed must lie
at the buffer's end: `last` says which tensors to lay out there. Where nothing stays the same digests buy nothing, and
after a few saves they are left out for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ckptd.digests import chunk_digest
from ckptd.manifest import Borrowed, ObjectRef
from ckptd_client.snapshot import PADDING, Captured, Entry

TRIES, PAUSE = 3, 20  # saves that are digested without a gain, and those that are not digested then
WORTHWHILE = 0.02  # of the bytes
FULL_AFTER = 20  # saves that borrow; then all is written once more, so that not all hangs on one object for ever
MAX_PENDING = 4  # saves whose outcome is open
MAX_LENDERS = 8  # a checkpoint hangs on each object that it borrows from
Value = tuple[object, ...]
"""What a tensor was: dtype, shape, and the digest of its bytes."""


@dataclass(frozen=True)
class Home:
    """Where the bytes of a tensor lie."""

    save: str
    object: ObjectRef
    value: Value


@dataclass
class Look:
    """What one save writes: its first `count` tensors; the others are borrowed."""

    save: str
    count: int
    borrowed: tuple[Borrowed, ...] = ()
    homes: Mapping[str, Home] = field(default_factory=dict)  # of what is borrowed
    values: Mapping[str, Value] | None = None  # of all tensors, once they are digested
    digested: bool = True


class Unchanged:
    """`last` is read on the training thread, the rest happens on the save thread, one save after the other."""

    def __init__(self, *, on: bool = True) -> None:
        self._on = on
        self._homes: dict[str, Home] = {}
        self._before: Mapping[str, Value] = {}
        self._pending: list[tuple[dict[str, Home], bool, Callable[[], bool | None]]] = []
        self._last: frozenset[str] = frozenset()
        self._useless = self._paused = self._borrowing = 0

    @property
    def last(self) -> Collection[str]:
        """The names that did not change between the last two saves."""
        return self._last

    def look(self, save: str, captured: Captured) -> Look:
        """What of it must be written. If something may be borrowed, that waits until all bytes are there, and
        digests them; else they are digested when they are written."""
        self._settle()
        entries = captured.entries
        if not self._on or self._paused or not entries:
            self._paused = max(0, self._paused - 1)
            return Look(save, len(entries), digested=False)
        if self._borrowing >= FULL_AFTER:
            self._homes, self._borrowing = {}, 0
        if entries[-1].name not in self._last or entries[-1].name not in self._homes:
            return Look(save, len(entries))
        values = _values(captured)
        count = self._first_known(entries, values)
        homes = {entry.name: self._homes[entry.name] for entry in entries[count:]}
        groups: dict[str, list[str]] = {}
        for name, home in homes.items():
            groups.setdefault(home.object.key, []).append(name)
        if not groups or len(groups) > MAX_LENDERS:
            return Look(save, len(entries), values=values)
        self._borrowing += 1
        first = [(homes[names[0]], names) for names in groups.values()]
        borrowed = tuple(Borrowed(save=h.save, object=h.object, names=tuple(names)) for h, names in first)
        return Look(save, count, borrowed, homes, values)

    def wrote(self, look: Look, ref: ObjectRef, captured: Captured, is_live: Callable[[], bool | None]) -> None:
        """The object is on the storage. `is_live` tells later whether the save became a checkpoint; None while that
        is open."""
        if not look.digested:
            return
        entries = captured.entries
        values = look.values or _values(captured)
        if self._before:
            same = {name for name, value in values.items() if self._before.get(name) == value}
            self._last = frozenset(same)
            if self._weigh(entries, same):
                return
        self._before = values
        names = (entry.name for entry in entries[: look.count] if entry.name != PADDING)
        written = {name: Home(look.save, ref, values[name]) for name in names}
        pending = ({**look.homes, **written}, bool(look.borrowed), is_live)
        self._pending = [*self._pending[1 - MAX_PENDING :], pending]

    def forget(self) -> None:
        """What was borrowed from is no checkpoint any more: the next save is written in full."""
        self._homes.clear()
        self._pending.clear()

    def _settle(self) -> None:
        """Only a checkpoint lends."""
        for pending in list(self._pending):
            homes, borrows, is_live = pending
            live = is_live()
            if live is not None:
                self._pending.remove(pending)
            if live:
                self._homes = homes
            elif live is False and borrows:
                return self.forget()

    def _first_known(self, entries: tuple[Entry, ...], values: Mapping[str, Value]) -> int:
        """From which entry on all have a home with the same bytes. One at least is written: a part has a payload."""
        count = len(entries)
        while count > 1:
            name = entries[count - 1].name
            home = self._homes.get(name)
            if home is None or home.value != values[name]:
                break
            count -= 1
        return count

    def _weigh(self, entries: tuple[Entry, ...], same: Collection[str]) -> bool:
        """Whether digests are left out for a while, because they bring nothing."""
        total = sum(entry.nbytes for entry in entries)
        gain = sum(entry.nbytes for entry in entries if entry.name in same)
        self._useless = 0 if gain > WORTHWHILE * total else self._useless + 1
        if self._useless < TRIES:
            return False
        self._useless, self._paused = 0, PAUSE
        self._before, self._last = {}, frozenset()
        self.forget()  # by then its checkpoints may be gone
        return True


def _values(captured: Captured) -> dict[str, Value]:
    data = captured.data
    return {
        entry.name: (str(entry.dtype), entry.shape, chunk_digest(data[entry.offset : entry.offset + entry.nbytes]))
        for entry in captured.entries
        if entry.name != PADDING
    }
