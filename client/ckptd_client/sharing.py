"""Reading once for all ranks of a node: who takes part, and what each does.

Every rank that is about to read offers what the others need to read together with it. Ranks on one machine that are
about to read the same chunks, enough of them, form a group, unless the kernel keeps what one of them reads for the
others (local drives), from where each copies faster alone. Where not all of a group can open the memory, each reads
apart.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptd.digests import sha256_hex
from ckptd.errors import CkptdError, Unreachable, describe
from ckptd.reading import check_chunk, damaged, opened
from ckptd.storage.base import Storage
from ckptd_client.bounded import Work, within
from ckptd_client.chunks import Object, deliver
from ckptd_client.filling import Chunk, fill
from ckptd_client.patience import patiently
from ckptd_client.ring import GaveUp, Ring

log = logging.getLogger("ckptd")
SHARE_BYTES = 64 * 1024 * 1024
"""Less than this is read by every rank for itself."""


def node() -> str:
    """Where this process runs, as far as /proc/<pid> means the same: host, boot, and space of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


class Sharing:
    """One rank's part in one load. Training thread. `close` it."""

    def __init__(self, rank: int, storage: Storage, shared: Sequence[Chunk], own: Sequence[Chunk]) -> None:
        self._rank, self._storage, self._shared, self._own = rank, storage, shared, own
        self._name = f"ckptd-{secrets.token_hex(8)}"
        self._fd = -1
        self._ring: Ring | None = None
        self._hung = False

    def offer(self, give_up_at: float) -> dict[str, Any] | None:
        """What the other ranks must know. None: this rank will read by itself."""
        chunk_bytes = _largest(self._shared)
        if sum(_length(item, index) for item, index in self._shared) < SHARE_BYTES or not hasattr(os, "memfd_create"):
            return None
        try:
            self._fd = os.memfd_create(self._name)
            where = node()
        except OSError as error:  # a kernel or a container without it
            log.info("this rank reads by itself: %s", error)
            return None
        told = "".join(f"{item.ref.key} {index}\n" for item, index in self._shared)
        return {
            "node": where,
            "pid": os.getpid(),
            "fd": self._fd,
            "memory": self._name,
            "chunks": sha256_hex(told.encode()),
            "chunk_bytes": chunk_bytes,
            "paged": within(
                give_up_at, self._shared[0][0].ref.key, lambda: _kept_for_all(self._storage, self._shared)
            ),
        }

    def join(self, offers: Sequence[dict[str, Any] | None]) -> bool | None:
        """Given every rank's offer: whether this rank could open the memory of its group, None if it is in none."""
        members = group_of(self._rank, offers)
        if len(members) < 2:
            return None
        first = offers[members[0]]
        assert first is not None
        try:
            fd = self._fd if members[0] == self._rank else _open(first)
        except OSError as error:
            log.info("rank %d cannot open the memory of rank %d: %s", self._rank, members[0], error)
            return False
        try:
            pids = [(rank, int(offer["pid"])) for rank in members if (offer := offers[rank]) is not None]
            self._ring = Ring(fd, pids, members.index(self._rank), int(first["chunk_bytes"]), len(self._shared))
        except OSError as error:
            log.info("rank %d cannot use the memory of rank %d: %s", self._rank, members[0], error)
            return False
        finally:
            if fd != self._fd:
                os.close(fd)
        return True

    def read(self, together: bool, give_up_at: float) -> None:
        """Read everything to its places; `together` if all of the group could join. Errors as of `fill`, and
        `GaveUp` when another rank of the group has the reason."""
        if not together or self._ring is None:
            fill(self._storage, [*self._shared, *self._own], give_up_at)
            return
        work, ring = Work(), self._ring
        done = False
        try:
            work.run(
                [lambda: self._fill(ring, work, give_up_at), lambda: self._take(ring, work)],
                give_up_at,
            )
            fill(self._storage, self._own, give_up_at)
            done = True
        except Unreachable:
            self._hung = True
            raise
        finally:
            ring.end(done)

    def close(self) -> None:
        """Let go of the memory, unless a thread that hangs may still use it."""
        if self._ring is not None and not self._hung:
            self._ring.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._ring, self._fd = None, -1

    def _fill(self, ring: Ring, work: Work, give_up_at: float) -> None:
        for index in ring.chunks_to_fill():
            item, number = self._shared[index]
            slot = ring.room(index, lambda: _check(work))[: _length(item, number)]
            work.doing(item.ref.key)
            patiently(
                lambda item=item, number=number, slot=slot: self._read(item, number, slot),  # type: ignore[misc]
                give_up_at - time.monotonic(),
            )
            ring.filled()

    def _read(self, item: Object, index: int, slot: memoryview) -> None:
        """Into the ring; all that take it out compare digests, this rank among them."""

        def read() -> str:
            reader.read_into(item.extent(index)[0], slot)
            return item.ref.chunks[index]

        with opened(self._storage, item.ref) as reader:
            damage = check_chunk(item.ref, index, read)
        if damage is not None:
            raise damaged(damage)

    def _take(self, ring: Ring, work: Work) -> None:
        for index, (item, number) in enumerate(self._shared):
            slot, address = ring.chunk(index, lambda: _check(work))
            digest = deliver(item, number, slot[: _length(item, number)], address, list(item.pieces(number)))
            damage = check_chunk(item.ref, number, lambda digest=digest: digest)  # type: ignore[misc]
            if damage is not None:
                raise damaged(damage)
            ring.taken()


def group_of(rank: int, offers: Sequence[dict[str, Any] | None]) -> list[int]:
    """The ranks that read together with `rank`, itself among them. The same on all of them."""
    mine = offers[rank]
    if mine is None:
        return []
    alike = ("node", "chunks", "chunk_bytes")
    found = [
        other
        for other, offer in enumerate(offers)
        if offer is not None and all(offer[name] == mine[name] for name in alike)
    ]
    return [] if all(offer["paged"] for other in found if (offer := offers[other]) is not None) else found


def _open(offer: dict[str, Any]) -> int:
    path = f"/proc/{offer['pid']}/fd/{offer['fd']}"
    found = os.readlink(path)
    if offer["memory"] not in found:
        raise OSError(f"{path} is {found}, expected {offer['memory']}")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _check(work: Work) -> None:
    if work.stop.is_set():
        raise GaveUp("this rank stopped reading")


def _length(item: Object, index: int) -> int:
    begin, end = item.extent(index)
    return end - begin


def _largest(chunks: Sequence[Chunk]) -> int:
    return max((_length(item, index) for item, index in chunks), default=0)


def _kept_for_all(storage: Storage, chunks: Sequence[Chunk]) -> bool:
    """Whether the page cache of this host does the sharing."""
    try:
        for ref in {item.ref.key: item.ref for item, _ in chunks}.values():
            with opened(storage, ref) as reader:
                if not reader.paged():
                    return False
    except CkptdError as error:  # reading will tell
        log.debug("cannot see whether it is kept: %s", describe(error))
        return False
    return True
