"""Which slots of a log are filled, by listing. The folders of slots are listed from the last one on, so the cost of
finding the end does not grow with the log.

A listing may be old: it shows an earlier end, never a later one. A folder of slots may be empty, as a write that
failed leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptd import layout
from ckptd.storage.base import Storage


def last_slot(storage: Storage, run: str) -> int:
    """The last filled slot that is listed; 0 for none. Two listings, one more for each empty folder at the end."""
    for segment in _segments(storage, run):
        last = next(_slots(storage, run, segment), 0)
        if last:
            return last
    return 0


def last_slot_after(storage: Storage, run: str, seq: int) -> int:
    """As `last_slot`, for whoever has read as far as slot `seq`: one listing, and one more for each folder that is
    full since. It looks at no folder behind one that is not full: before an append look with `last_slot`."""
    segment, last = seq // layout.SEGMENT_SLOTS, 0
    while found := next(_slots(storage, run, segment), 0):
        segment, last = segment + 1, found
        if (last + 1) % layout.SEGMENT_SLOTS:
            break
    return last


def all_slots(storage: Storage, run: str) -> Iterator[int]:
    """All filled slots that are listed, in order."""
    for segment in reversed(list(_segments(storage, run))):
        yield from reversed(list(_slots(storage, run, segment)))


def _segments(storage: Storage, run: str) -> Iterator[int]:
    """The folders of slots by number, the last one first. Names are listed in order, and all are equally long."""
    found = map(layout.segment_of, reversed(storage.list(layout.log_folder(run))))
    return (segment for segment in found if segment is not None)


def _slots(storage: Storage, run: str, segment: int) -> Iterator[int]:
    """The slots that are filled in one folder, the last one first. One that lies elsewhere than it should is none."""
    found = map(layout.seq_of, reversed(storage.list(layout.segment_folder(run, segment))))
    return (seq for seq in found if seq is not None and seq // layout.SEGMENT_SLOTS == segment)
