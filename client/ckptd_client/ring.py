"""Memory that the ranks of one node share while they load: each reads some of the chunks, all copy all of them out.

It has no name in any file system: one rank makes it, the others open it through that rank's /proc folder, and it is
gone with the last of them, also after kill -9. Chunks go through a ring of slots. Each rank writes its own counters,
which the others poll: how many of its chunks lie in the ring, how many it has taken out, whether it gave up.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable

from ckptd.errors import Unreachable
from ckptd_client.places import address_of

RING_BYTES = 256 * 1024 * 1024
PAUSE_SECONDS, LOOK_SECONDS = 0.0005, 0.1
FILLED, TAKEN, STATE, COUNTERS = 0, 1, 2, 8  # a rank's counters, 8 bytes each, on a cache line of their own
GAVE_UP, DONE = 1, 2


class GaveUp(Exception):
    """Another rank of this node, or another thread of this one, could not go on. It says why itself."""


class Ring:
    """One rank's hold of the memory. `members` are the ranks and their process ids, in the same order on all;
    `mine` is this rank's place among them. `fill` and `take` each belong to one thread."""

    def __init__(self, fd: int, members: list[tuple[int, int]], mine: int, chunk_bytes: int, chunks: int) -> None:
        self.slots = min(max(RING_BYTES // chunk_bytes, 2), max(chunks, 1))
        self._slot_bytes = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        head = -(-len(members) * COUNTERS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        size = head + self.slots * self._slot_bytes
        os.ftruncate(fd, size)  # the same size on all
        self._members, self._mine, self._chunks = members, mine, chunks
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)
        self._counters = self._view[:head].cast("Q")
        self._data = self._view[head:]
        self._address = address_of(self._data)
        self._watched = [os.pidfd_open(pid) for _, pid in members]

    def chunks_to_fill(self) -> range:
        """Which of the chunks this rank reads."""
        return range(self._mine, self._chunks, len(self._members))

    def room(self, index: int, wait: Callable[[], None]) -> memoryview:
        """The slot of a chunk that this rank will fill, once all have taken what was in it."""
        self._until(lambda: self._lowest(TAKEN) > index - self.slots, wait)
        return self._slot(index)

    def filled(self) -> None:
        """The next of this rank's chunks lies in its slot."""
        self._add(FILLED)

    def chunk(self, index: int, wait: Callable[[], None]) -> tuple[memoryview, int]:
        """The slot of a chunk and its address, once it is filled."""
        owner, count = index % len(self._members), index // len(self._members)
        self._until(lambda: self._counter(owner, FILLED) > count, wait)
        slot = self._slot(index)
        return slot, self._address + index % self.slots * self._slot_bytes

    def taken(self) -> None:
        """This rank has copied the next chunk."""
        self._add(TAKEN)

    def end(self, done: bool) -> None:
        """This rank goes on without the others: they need not wait for it, or must stop."""
        self._counters[self._mine * COUNTERS + STATE] = DONE if done else GAVE_UP

    def close(self) -> None:
        """Give it back. The memory itself goes with the last view of it, of which a raised error may hold some."""
        for fd in self._watched:
            os.close(fd)
        self._watched = []
        del self._counters, self._data, self._view, self._map

    def _until(self, ready: Callable[[], bool], wait: Callable[[], None]) -> None:
        """`wait` is called between two looks and raises when there is no use in waiting."""
        look_at = time.monotonic() + LOOK_SECONDS
        while not ready():
            if time.monotonic() >= look_at:
                self._look_for_the_dead(ready)
                look_at = time.monotonic() + LOOK_SECONDS
            for rank, state in zip(self._members, self._states(), strict=True):
                if state == GAVE_UP:
                    raise GaveUp(f"rank {rank[0]} of this node stopped reading")
            wait()
            time.sleep(PAUSE_SECONDS)

    def _look_for_the_dead(self, ready: Callable[[], bool]) -> None:
        for (rank, pid), fd, state in zip(self._members, self._watched, self._states(), strict=True):
            dead = select.select([fd], [], [], 0)[0]
            if dead and state != DONE and not ready():
                raise Unreachable(
                    f"rank {rank} (process {pid}) of this node ended while the ranks read together",
                    do="Look at that rank's log; the job must be started again.",
                )

    def _states(self) -> list[int]:
        return [self._counter(member, STATE) for member in range(len(self._members))]

    def _lowest(self, counter: int) -> int:
        return min(self._counter(member, counter) for member in range(len(self._members)))

    def _counter(self, member: int, counter: int) -> int:
        return self._counters[member * COUNTERS + counter]

    def _add(self, counter: int) -> None:
        # One aligned store of 8 bytes. The interpreter takes and gives locks before and after, so what was written
        # into the slot is seen first; and if it were not, the digest would tell.
        self._counters[self._mine * COUNTERS + counter] += 1

    def _slot(self, index: int) -> memoryview:
        begin = index % self.slots * self._slot_bytes
        return self._data[begin : begin + self._slot_bytes]
