"""Object stores that fsspec reaches and that create only where nothing is: Google's and Azure's (`fsspec_places`).

Small objects are one request with the store's own condition. Payload is one stream of blocks, which is simple and
slower than the parallel parts of `s3_payload`. Nothing is remembered between calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from fsspec.asyn import sync as run_on_loop

from ckptd import layout
from ckptd.errors import AlreadyExists, CkptdError, Corrupt, Invalid, NotFound, NotInitialised, Unavailable
from ckptd.storage.base import Buffer
from ckptd.storage.files import flat
from ckptd.storage.fsspec_calls import Call, as_ckptd, within
from ckptd.storage.fsspec_reader import FsspecReader
from ckptd.storage.keys import check_key
from ckptd.storage.marker import MAX_MARKER_BYTES, new_marker, no_marker, other_storage, parse_marker

T = TypeVar("T")
MIB = 1 << 20
BLOCK_BYTES = 16 * MIB  # of a stream; a multiple of 256 KiB, as Google wants it
DEADLINE_SECONDS = 60.0  # the libraries below repeat what failed, and wait in between
_inherited: list[Any] = []  # the parent's file systems: closing one here would silence the parent's event loop
_log = logging.getLogger("ckptd.storage")


class FsspecStorage:
    """Objects below `root`, "bucket" or "bucket/prefix", of an asynchronous fsspec file system. Callable from any
    thread, and after a fork. See `Storage`.

    `connect` makes a file system of this process that keeps no listings (`use_listings_cache=False`) and is shared
    with nobody (`skip_instance_cache=True`). The bucket must exist. Whether the store's condition is real is not
    known here: the probe tries it.
    """

    def __init__(
        self,
        url: str,
        root: str,
        connect: Callable[[], Any],
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.url = url
        self._root, self._connect = root, connect
        self._deadline_seconds, self._block_bytes = deadline_seconds, block_bytes
        self._uuid: str | None = None
        self._lock = threading.Lock()
        self._connected: tuple[int, Any] | None = None

    # The contract

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        """One conditional request, or a stream of blocks for an object of more than one. An earlier try whose answer
        was lost may be repeated by the library, which then finds its own object: `AlreadyExists`."""
        path = self._path(key)
        self.check_root()
        if size > self._block_bytes:
            if self._find(key) is not None:
                raise AlreadyExists(f"{key} exists already in {self.url}", key=key, url=self.url)
            return self._stream(key, path, chunks, size)
        data = bytearray()
        total = 0
        for chunk in chunks:
            view = flat(chunk)
            total += view.nbytes
            if total > size:
                break
            data += view
        if total != size:
            raise _wrong_sum(size, total)
        self._create(key, bytes(data))

    def get(self, key: str, max_bytes: int) -> bytes:
        data = self._got(lambda: self._get(key, max_bytes))
        if len(data) > max_bytes:
            found = self.size(key)
            raise Corrupt(
                f"{key} is too long: expected at most {max_bytes} bytes, found {found}",
                key=key,
                expected=max_bytes,
                found=found,
            )
        return data

    def reader(self, key: str, *, fresh: bool = False) -> FsspecReader:
        """`fresh` changes nothing: there is no cache between us and the store."""
        return FsspecReader(key, self.size(key), lambda start, end: self._got(lambda: self._range(key, start, end)))

    def size(self, key: str) -> int:
        found = self._find(key)
        if found is None:
            self.check_root()
            raise NotFound(f"{key} does not exist in {self.url}", key=key, url=self.url)
        return found

    def list(self, folder: str) -> list[str]:
        path = self._path(folder)
        try:
            entries = self._ask("list", folder, lambda fs: fs._ls(path, detail=True))
        except NotFound:
            entries = []
        names = {str(entry["name"]).strip("/").removeprefix(f"{path}/") for entry in entries}
        # Some libraries also give what only begins like the folder, the folder itself, or an object of its name.
        found = sorted(name for name in names if name and "/" not in name)
        if not found:
            self.check_root()
        return found

    def sync(self, key: str) -> None:
        """A store answers a put when it keeps the object: what is there is durable."""
        self.size(key)

    def delete(self, key: str) -> None:
        path = self._path(key)
        self.check_root()
        try:
            self._ask("delete", key, lambda fs: fs._rm_file(path))
        except NotFound:
            _log.debug("%s was gone already from %s", key, self.url)

    def check_root(self) -> str:
        try:
            found = parse_marker(self._get(layout.ROOT_MARKER, MAX_MARKER_BYTES), self.url)
        except NotFound as error:
            raise no_marker(self.url) from error
        if self._uuid is None:
            self._uuid = found
        if found != self._uuid:
            raise other_storage(self.url, self._uuid, found)
        return found

    def initialise(self) -> str:
        """Write the marker unless it is there; the uuid. `NotInitialised` if there is no such bucket: none is made.
        `ckptd init` calls it. Racing callers all get the uuid of the one marker."""
        try:
            return self.check_root()
        except NotInitialised:
            try:
                self._create(layout.ROOT_MARKER, new_marker())
            except AlreadyExists:
                _log.debug("another process initialised %s at the same time", self.url)
        return self.check_root()

    def facts(self) -> dict[str, str]:
        """What the probe shows: which condition it is about to try."""
        return {"kind": self.url.partition("://")[0], "publish": "conditional put"}

    # Requests

    def _got(self, get: Callable[[], bytes]) -> bytes:
        """What `get` gives; that it is not there counts only under a root whose marker is."""
        try:
            return get()
        except NotFound:
            self.check_root()
            raise

    def _create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._ask("put", key, lambda fs: fs._pipe_file(path, data, mode="create"))

    def _get(self, key: str, max_bytes: int) -> bytes:
        """At most one byte more than `max_bytes`."""
        try:
            return self._range(key, 0, max_bytes + 1)
        except Unavailable as error:
            if error.fields.get("status") == 416 and self._find(key) == 0:  # no range of an object without bytes
                return b""
            raise

    def _range(self, key: str, start: int, end: int) -> bytes:
        """Bytes of an object from `start` to before `end`, fewer where it ends."""
        path = self._path(key)
        data: bytes = self._ask(
            "get", key, lambda fs: fs._cat_file(path, start=start, end=end), self._seconds(end - start)
        )
        if len(data) > end - start:
            raise Unavailable(
                f"get {key} in {self.url} failed: expected {end - start} bytes, was answered {len(data)}",
                do="The store, or a proxy before it, does not answer ranged reads: use one that doctor finds fit.",
                key=key,
            )
        return data

    def _find(self, key: str) -> int | None:
        """Bytes of an object; None if there is none, or only a folder."""
        path = self._path(key)
        try:
            found = self._ask("look at", key, lambda fs: fs._info(path))
        except NotFound:
            return None
        return int(found["size"]) if found.get("type") == "file" else None

    def _stream(self, key: str, path: str, chunks: Iterable[Buffer], size: int) -> None:
        """Create an object of many blocks; the caller has seen that its key is free. The condition on the last
        request is a second line only, as not every library hands it on. That is enough because such keys hold a
        nonce, which no two writers share. On any failure the upload is given up."""
        call, seconds = Call("put", key, self.url, self._root), self._seconds(self._block_bytes)
        fs = self._fs(call)
        writer = within(seconds, call, lambda: fs.open(path, "xb", block_size=self._block_bytes))
        try:
            total = 0
            for chunk in chunks:
                view = flat(chunk)
                total += view.nbytes
                if total > size:
                    break
                while view.nbytes:
                    block, view = view[: self._block_bytes], view[self._block_bytes :]
                    within(seconds, call, lambda block=block: writer.write(block))  # type: ignore[misc]
            if total != size:
                raise _wrong_sum(size, total)
            within(seconds, call, writer.close)
        except BaseException as error:
            if not isinstance(error, Unavailable):
                self._give_up(writer, call)
            writer.closed = True  # else its finaliser would still make the object
            raise

    def _give_up(self, writer: Any, call: Call) -> None:
        try:
            within(self._deadline_seconds, call, writer.discard)
        except CkptdError as error:
            _log.warning("blocks of %s stay behind until the store removes them: %s", call.key, error.message)

    def _ask(
        self, operation: str, key: str, request: Callable[[Any], Awaitable[T]], seconds: float | None = None
    ) -> T:
        """The answer to one request within the deadline; our error if there is none."""
        call, limit = Call(operation, key, self.url, self._root), seconds or self._deadline_seconds
        fs = self._fs(call)

        async def bounded() -> T:
            # Cancels the request, so nothing of it goes on after the deadline.
            return await asyncio.wait_for(request(fs), limit)

        try:
            answer: T = run_on_loop(fs.loop, bounded)
            return answer
        except Exception as error:  # each library has its own, often without a common base
            raise as_ckptd(error, call, limit) from error

    def _fs(self, call: Call) -> Any:
        """The file system of this process: one does not survive a fork."""
        found = self._connected
        if found is not None and found[0] == os.getpid():
            return found[1]
        if found is not None:
            self._lock = threading.Lock()  # after a fork the old one may be held for ever
            _inherited.append(found[1])
        with self._lock:
            if self._connected is None or self._connected[0] != os.getpid():
                # Credentials are looked for here, some of them on the network.
                self._connected = (os.getpid(), within(self._deadline_seconds, call, self._connect))
            return self._connected[1]

    def _seconds(self, size: int) -> float:
        return self._deadline_seconds + size // MIB

    def _path(self, key: str) -> str:
        check_key(key)
        return f"{self._root}/{key}"


def _wrong_sum(expected: int, found: int) -> Invalid:
    return Invalid(
        f"the chunks do not add up: expected {expected} bytes, found {found}",
        do="Pass the size of all chunks together.",
        expected=expected,
        found=found,
    )
