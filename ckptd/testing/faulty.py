"""A storage with a plan of faults around any other one.

    storage = FaultyStorage(MemoryStorage())
    lost = storage.fail_after("put", "/0000000000000003.json")   # it lands, the answer is lost
    ...
    storage.assert_all_fired()

See `ckptd.testing.faults` for what each fault does and how it counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar

from ckptd.errors import CkptdError, Corrupt, Unavailable
from ckptd.storage.base import Buffer, Reader, Storage
from ckptd.testing.faults import Damage, Delayed, Failure, Fault, Pause, StaleListing, Where

T = TypeVar("T")
F = TypeVar("F", bound=Fault)
Operation = Literal["put", "get", "reader", "read", "size", "list", "sync", "delete", "check_root"]


class FaultyStorage:
    """Passes every call on to `inner` and carries out the plan. `calls` counts by operation, `history` lists
    (operation, key) in order. A key is named by its ending or by a predicate; `""` means any."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.calls: Counter[str] = Counter()
        self.history: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()

    # The plan

    def fail_before(
        self, operation: Operation, where: Where = "", *, nth: int = 1, times: int | None = 1,
        error: CkptdError | None = None,
    ) -> Failure:  # fmt: skip
        """The call raises and nothing happened."""
        error = error or Unavailable(f"planned: {operation} failed before anything happened")
        return self._plan(Failure(operation, where, error, late=False, nth=nth, times=times))

    def fail_after(
        self, operation: Operation, where: Where = "", *, nth: int = 1, times: int | None = 1,
        error: CkptdError | None = None,
    ) -> Failure:  # fmt: skip
        """The call happens and its answer is lost. A call that fails by itself does not count as fired."""
        error = error or Unavailable(f"planned: the answer of {operation} was lost")
        return self._plan(Failure(operation, where, error, late=True, nth=nth, times=times))

    def delay_put(self, where: Where = "", *, nth: int = 1) -> Delayed:
        """The put is held until its `release()`; the caller gets `Unavailable` at once."""
        return self._plan(Delayed(where, nth=nth))

    def pause(
        self, operation: Operation, where: Where = "", *, nth: int = 1,
        point: Literal["before", "during", "after"] = "before",
    ) -> Pause:  # fmt: skip
        """The calling thread stops before or after the inner call, or (put) after the first chunk."""
        if point == "during" and operation != "put":
            raise ValueError(f"only a put can be paused during the call, not a {operation}")
        return self._plan(Pause(operation, where, point, nth=nth))

    def hide(
        self, folder: Where = "", *, last: int = 0, names: Callable[[str], bool] = lambda name: False
    ) -> StaleListing:
        """Listings of `folder` are stale until healed."""
        return self._plan(StaleListing(folder, last, names))

    def flip(self, where: Where, *, at: int, mask: int = 1, cached_only: bool = False) -> Damage:
        """The byte at offset `at` reads wrong until healed."""
        return self._plan(Damage(where, flip_at=at, mask=mask, size=None, cached_only=cached_only))

    def truncate(self, where: Where, *, size: int, cached_only: bool = False) -> Damage:
        """The object ends after `size` bytes until healed."""
        return self._plan(Damage(where, flip_at=0, mask=0, size=size, cached_only=cached_only))

    def heal(self) -> None:
        """End every fault, those that have not fired too. Held puts stay held."""
        for fault in self.faults:
            fault.heal()

    def assert_all_fired(self) -> None:
        idle = [fault for fault in self.faults if not fault.fired]
        assert not idle, f"planned faults never fired: {idle}; calls were {dict(self.calls)}"

    def _plan(self, fault: F) -> F:
        with self._lock:
            self.faults.append(fault)
        return fault

    # The storage

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        met = self._met("put", key)
        for fault in met:
            if isinstance(fault, Delayed):
                fault.hold(self.inner, key, chunks)
            if isinstance(fault, Pause) and fault.point == "during":
                chunks = fault.during(chunks)
        self._around(met, key, lambda: self.inner.put(key, chunks, size))

    def get(self, key: str, max_bytes: int) -> bytes:
        data = bytearray(self._around(self._met("get", key), key, lambda: self.inner.get(key, max_bytes)))
        for damage in self._damages(key, fresh=False):
            del data[damage.cut(len(data)) :]
            damage.spoil(0, memoryview(data))
        return bytes(data)

    def reader(self, key: str, *, fresh: bool = False) -> Reader:
        opened: list[Reader] = []
        try:
            self._around(self._met("reader", key), key, lambda: opened.append(self.inner.reader(key, fresh=fresh)))
        except BaseException:
            for reader in opened:
                reader.close()
            raise
        return FaultyReader(self, key, opened[0], fresh)

    def size(self, key: str) -> int:
        size = self._around(self._met("size", key), key, lambda: self.inner.size(key))
        for damage in self._damages(key, fresh=False):
            size = damage.cut(size)
        return size

    def list(self, folder: str) -> list[str]:
        met = self._met("list", folder)
        names = self._around(met, folder, lambda: self.inner.list(folder))
        for fault in met:
            if isinstance(fault, StaleListing):
                names = fault.show(names)
        return names

    def sync(self, key: str) -> None:
        self._around(self._met("sync", key), key, lambda: self.inner.sync(key))

    def delete(self, key: str) -> None:
        self._around(self._met("delete", key), key, lambda: self.inner.delete(key))

    def check_root(self) -> str:
        return self._around(self._met("check_root", ""), "", self.inner.check_root)

    def _met(self, operation: str, key: str) -> Sequence[Fault]:
        with self._lock:
            self.calls[operation] += 1
            self.history.append((operation, key))
            faults = list(self.faults)
        return [fault for fault in faults if fault.meets(operation, key)]

    def _around(self, met: Sequence[Fault], key: str, call: Callable[[], T]) -> T:
        for fault in met:
            fault.before(key)
        result = call()
        for fault in met:
            fault.after(key)
        return result

    def _damages(self, key: str, *, fresh: bool) -> Sequence[Damage]:
        with self._lock:
            damages = [fault for fault in self.faults if isinstance(fault, Damage)]
        return [d for d in damages if not (fresh and d.cached_only) and d.meets("damage", key)]


class FaultyReader:
    def __init__(self, storage: FaultyStorage, key: str, inner: Reader, fresh: bool) -> None:
        self._storage, self._key, self._inner, self._fresh = storage, key, inner, fresh
        self.size = inner.size
        for damage in storage._damages(key, fresh=fresh):
            self.size = damage.cut(self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        storage, key = self._storage, self._key
        if offset + buffer.nbytes > self.size < self._inner.size:
            raise Corrupt(
                f"{key} ends too early (planned): expected {offset + buffer.nbytes} bytes, found {self.size}",
                key=key,
                expected=offset + buffer.nbytes,
                found=self.size,
            )
        met = storage._met("read", key)
        storage._around(met, key, lambda: self._inner.read_into(offset, buffer))
        if buffer.nbytes:
            for damage in storage._damages(key, fresh=self._fresh):
                damage.spoil(offset, buffer.cast("B"))

    def paged(self) -> bool:
        return self._inner.paged()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
