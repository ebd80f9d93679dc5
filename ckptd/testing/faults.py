"""The faults a `FaultyStorage` can carry out, one class each, and how they count calls.

A fault is addressed by operation, key and which matching call it is, counted from when it was planned; so a
single-threaded run with one plan always takes the same course. Nothing here sleeps or rolls dice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from ckptd.errors import AlreadyExists, CkptdError, Unavailable
from ckptd.storage.base import Buffer, Storage

Where = str | Callable[[str], bool]
DEADLINE_SECONDS = 60.0


class Fault:
    """One planned fault. It meets the `nth` matching call and the `times - 1` after it; `times=None` means
    every one until `heal`. `fired` counts how often it had its effect."""

    def __init__(self, operation: str, where: Where, *, nth: int = 1, times: int | None = 1) -> None:
        self.operation, self.where, self.nth, self.times = operation, where, nth, times
        self.fired = 0
        self._seen = 0
        self._healed = False
        self._lock = threading.Lock()

    def heal(self) -> None:
        """From now on it does nothing."""
        self._healed = True

    def meets(self, operation: str, key: str) -> bool:
        """Count this call if it matches; whether the fault happens to it."""
        found = self.where(key) if callable(self.where) else key.endswith(self.where)
        if operation != self.operation or not found or self._healed:
            return False
        with self._lock:
            self._seen += 1
            return self._seen >= self.nth and (self.times is None or self._seen < self.nth + self.times)

    def fire(self) -> None:
        """Count that it had its effect."""
        with self._lock:
            self.fired += 1

    def before(self, key: str) -> None:
        """Called before the inner call."""

    def after(self, key: str) -> None:
        """Called after the inner call succeeded."""

    def __repr__(self) -> str:
        where = self.where if isinstance(self.where, str) else getattr(self.where, "__name__", "a predicate")
        return f"{type(self).__name__}({self.operation!r}, {where!r}, nth={self.nth}, times={self.times})"


class Failure(Fault):
    """Raises, and the inner call is not made (`late=False`) or was (`late=True`: its answer is lost)."""

    def __init__(
        self, operation: str, where: Where, error: CkptdError, late: bool, *, nth: int, times: int | None
    ) -> None:
        super().__init__(operation, where, nth=nth, times=times)
        self.error, self.late = error, late

    def before(self, key: str) -> None:
        if not self.late:
            self.strike()

    def after(self, key: str) -> None:
        if self.late:
            self.strike()

    def strike(self) -> None:
        self.fire()
        raise type(self.error)(self.error.message, do=self.error.do, **self.error.fields)


class Delayed(Fault):
    """A put that is on its way: the caller gets `Unavailable` now, and it lands when `release` is called."""

    def __init__(self, where: Where, *, nth: int) -> None:
        super().__init__("put", where, nth=nth)
        self.held: tuple[str, bytes] | None = None
        self.inner: Storage | None = None

    def hold(self, inner: Storage, key: str, chunks: Iterable[Buffer]) -> None:
        self.fire()
        self.inner, self.held = inner, (key, b"".join(bytes(chunk) for chunk in chunks))
        raise Unavailable(f"planned: the put of {key} is delayed", key=key)

    def release(self) -> bool:
        """Let it land; whether it did (else the key was taken meanwhile). Once only, later calls say False."""
        held, self.held = self.held, None
        if held is None or self.inner is None:
            return False
        key, data = held
        try:
            self.inner.put(key, [data], len(data))
        except AlreadyExists:
            return False
        return True


class Pause(Fault):
    """Stops a call: wait for `arrived`, do what should come between, then `resume.set()`."""

    def __init__(self, operation: str, where: Where, point: str, *, nth: int) -> None:
        super().__init__(operation, where, nth=nth)
        self.point = point
        self.arrived, self.resume = threading.Event(), threading.Event()

    def before(self, key: str) -> None:
        if self.point == "before":
            self.stop()

    def after(self, key: str) -> None:
        if self.point == "after":
            self.stop()

    def during(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        """The chunks of a put, with the stop after the first."""
        left = iter(chunks)
        for first in left:
            yield first
            break
        self.stop()
        yield from left

    def stop(self) -> None:
        self.fire()
        self.arrived.set()
        if not self.resume.wait(DEADLINE_SECONDS):
            raise AssertionError(f"{self!r} was not resumed within {DEADLINE_SECONDS} s")


class StaleListing(Fault):
    """Listings lack the last `last` names, or those `hidden` says, until `heal`."""

    def __init__(self, where: Where, last: int, hidden: Callable[[str], bool]) -> None:
        super().__init__("list", where, times=None)
        self.last, self.hidden = last, hidden

    def show(self, names: list[str]) -> list[str]:
        kept = names[: max(0, len(names) - self.last)]
        shown = [name for name in kept if not self.hidden(name)]
        if len(shown) < len(names):
            self.fire()
        return shown


class Damage(Fault):
    """Reads of an object give other bytes until `heal`: one byte XORed with `mask`, or the end cut off.

    It counts and addresses "damage", not a call: every read of the object shows it. With `cached_only` a
    `fresh` reader sees the true bytes: the damage is in one host's cache and not on the medium.
    """

    def __init__(self, where: Where, *, flip_at: int, mask: int, size: int | None, cached_only: bool) -> None:
        super().__init__("damage", where, times=None)
        self.flip_at, self.mask, self.size, self.cached_only = flip_at, mask, size, cached_only

    def spoil(self, offset: int, view: memoryview) -> None:
        """Damage the bytes of an object that were read from `offset` on."""
        if self.mask and offset <= self.flip_at < offset + view.nbytes:
            self.fire()
            view[self.flip_at - offset] ^= self.mask

    def cut(self, size: int) -> int:
        if self.size is None or size <= self.size:
            return size
        self.fire()
        return self.size
