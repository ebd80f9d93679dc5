"""Storage in this process's memory, with the same contract: for tests, models and trying things out."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from ckptd import layout
from ckptd.errors import AlreadyExists, Corrupt, Invalid, NotFound
from ckptd.storage.base import Buffer
from ckptd.storage.keys import check_key
from ckptd.storage.marker import new_marker, no_marker, parse_marker

_registry = threading.RLock()
_by_name: WeakValueDictionary[str, MemoryStorage] = WeakValueDictionary()
_kept: list[MemoryStorage] = []


class MemoryStorage:
    """Objects in a dict. A new one has its marker already and a random name; the one of a `memory://name`
    URL (see `shared`) has none until `initialise`, as any storage."""

    def __init__(self, name: str = "", *, marked: bool = True) -> None:
        self.url = f"memory://{name or secrets.token_hex(8)}"
        self._objects: dict[str, bytes] = {}
        self._names: dict[str, set[str]] = {}  # folder -> names directly inside
        self._lock = threading.Lock()
        with _registry:
            _by_name[self.url.removeprefix("memory://")] = self
        if marked:
            self.initialise()

    def initialise(self) -> str:
        """Write the marker unless it is there; the uuid."""
        with self._lock:
            if layout.ROOT_MARKER not in self._objects:
                self._insert(layout.ROOT_MARKER, new_marker())
        return self.check_root()

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        check_key(key)
        self.check_root()
        parts: list[bytes] = []
        done = 0
        for chunk in chunks:
            parts.append(bytes(chunk))
            done += len(parts[-1])
            if done > size:
                break
        if done != size:
            raise Invalid(
                f"the chunks for {key} do not add up: expected {size} bytes, found {done}",
                do="Pass the size of all chunks together.",
                expected=size,
                found=done,
            )
        data = b"".join(parts)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"{key} exists already in {self.url}", key=key, url=self.url)
            self._insert(key, data)

    def get(self, key: str, max_bytes: int) -> bytes:
        data = self._read(key)
        if len(data) > max_bytes:
            raise Corrupt(
                f"{key} is too long: expected at most {max_bytes} bytes, found {len(data)}",
                key=key,
                expected=max_bytes,
                found=len(data),
            )
        return data

    def reader(self, key: str, *, fresh: bool = False) -> MemoryReader:
        return MemoryReader(key, self._read(key))

    def size(self, key: str) -> int:
        return len(self._read(key))

    def list(self, folder: str) -> list[str]:
        check_key(folder)
        with self._lock:
            names = sorted(self._names.get(folder, ()))
        if not names:
            self.check_root()
        return names

    def sync(self, key: str) -> None:
        self._read(key)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            empty = gone = self._objects.pop(key, None) is not None
            while empty and key:
                key, _, name = key.rpartition("/")
                names = self._names[key]
                names.discard(name)
                empty = not names  # then the folder's own name goes too
        if not gone:
            self.check_root()

    def check_root(self) -> str:
        with self._lock:
            data = self._objects.get(layout.ROOT_MARKER)
        if data is None:
            raise no_marker(self.url)
        return parse_marker(data, self.url)

    def _read(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            self.check_root()
            raise NotFound(f"{key} does not exist in {self.url}", key=key, url=self.url)
        return data

    def _insert(self, key: str, data: bytes) -> None:
        self._objects[key] = data
        while key:
            key, _, name = key.rpartition("/")
            self._names.setdefault(key, set()).add(name)


class MemoryReader:
    def __init__(self, key: str, data: bytes) -> None:
        self._key = key
        self._data: memoryview | None = memoryview(data)
        self.size = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._data is None:
            raise Invalid(f"the reader of {self._key} is closed", do="Open a new one.", field="reader")
        if offset < 0:
            raise Invalid(f"offset {offset} of {self._key} is negative", field="offset")
        wanted = buffer.nbytes
        if wanted and buffer.readonly:
            raise Invalid(f"the buffer to read {self._key} into is read-only", field="buffer")
        data = self._data[offset : offset + wanted]
        if data.nbytes < wanted:
            raise Corrupt(
                f"{self._key} ends too early: expected {wanted} bytes at offset {offset}, found {data.nbytes} "
                f"(its size was {self.size})",
                key=self._key,
                expected=offset + wanted,
                found=self.size,
            )
        if wanted:
            buffer.cast("B")[:] = data

    def paged(self) -> bool:
        return False

    def close(self) -> None:
        self._data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shared(name: str) -> MemoryStorage:
    """The storage of `memory://name` in this process, made on the first call and kept to the end."""
    with _registry:
        found = _by_name.get(name)
        if found is None:
            found = MemoryStorage(name, marked=False)
        if found not in _kept:
            _kept.append(found)
        return found
