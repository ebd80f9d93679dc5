"""A folder on a local or shared drive (ext4, xfs, NFS, sshfs, ...) as storage.

An object is written under a temporary name, fsynced and closed, and then gets its name by link(2): the one
exclusive publish that local and network file systems have in common. So no reader ever sees half an object.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ckptd import layout
from ckptd.errors import AlreadyExists, Corrupt, Invalid, NotFound, NotInitialised, Unavailable
from ckptd.storage import reserve
from ckptd.storage.base import Buffer
from ckptd.storage.files import (
    READ_FLAGS,
    FileReader,
    if_there,
    is_regular,
    let_go,
    lookup,
    make,
    names_in,
    os_error,
    os_errors,
    walk,
)
from ckptd.storage.keys import check_key
from ckptd.storage.marker import MAX_MARKER_BYTES, new_marker, no_marker, other_storage, parse_marker
from ckptd.storage.publish import NewFile, by_link, by_rename, discard, name_anew, seal, write_aside
from ckptd.storage.unsure import made_anew, still_unsure, sync_folder, sync_subfolder, unsure_names

Publish = Literal["link", "lock"]
LOCK_NAME = "ckptd.lock"
_log = logging.getLogger("ckptd.storage")


class LocalStorage:
    """Objects as files below `root`. Callable from any thread; nothing is shared but what is on the drive.

    `publish="lock"` is for mounts without hard links (some CIFS mounts): rename under a lock file. Such a
    lock holds among the processes of one host, so only one host may write. See `Storage` for the contract.
    """

    def __init__(self, root: str | Path, *, publish: Publish = "link", lock_deadline_seconds: float = 30.0) -> None:
        text = os.fspath(root)
        if not text.startswith("/") or ".." in text.split("/") or "\0" in text:
            raise Invalid(
                f"storage folder {text!r} is not allowed: expected an absolute path without '..'", field="url"
            )
        if publish not in ("link", "lock"):
            raise Invalid(f"publish {publish!r} is not known: expected 'link' or 'lock'", field="publish")
        self.root = "/" + os.path.normpath(text).lstrip("/")
        self.url = f"file://{self.root}{'?publish=lock' if publish == 'lock' else ''}"
        self._publish_by = publish
        self._lock_deadline_seconds = lock_deadline_seconds
        self._uuid: str | None = None
        # Folders whose way down from the root this process has fsynced.
        self._durable: set[tuple[str, ...]] = set()

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        """A record that finds no space takes it from the reserve, see `ckptd.storage.reserve`."""
        if not layout.is_record(key):
            return self._create(key, chunks, size)
        left: Iterator[Buffer] = iter(chunks)
        while True:
            taken, left = itertools.tee(left)  # of a record all bytes are at hand for another try
            try:
                return self._create(key, taken, size)
            except Unavailable as error:
                if not reserve.is_full(error):
                    raise
                with self._root() as root:
                    if not reserve.give_up_one(root):
                        raise

    def get(self, key: str, max_bytes: int) -> bytes:
        with self.reader(key) as reader:
            if reader.size > max_bytes:
                raise Corrupt(
                    f"{key} is too long: expected at most {max_bytes} bytes, found {reader.size}",
                    key=key,
                    expected=max_bytes,
                    found=reader.size,
                )
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
            return bytes(data)

    def reader(self, key: str, *, fresh: bool = False) -> FileReader:
        return FileReader(key, self._path(key), lambda: self._open(key), fresh=fresh)

    def size(self, key: str) -> int:
        with self.reader(key) as reader:
            return reader.size

    def list(self, folder: str) -> list[str]:
        parts = check_key(folder)
        with self._root() as root, os_errors("list", self._path(folder)):
            fd = walk(root, parts)
            if fd is None:
                self._check(root)
                return []
            try:
                return sorted(names_in(fd))
            finally:
                let_go(fd)

    def sync(self, key: str) -> None:
        """Also fsyncs the folders above. The kernel reports a lost write once only: after a failure the cached
        bytes are dropped, so read the object again before you trust it; and a name whose folder failed is made
        anew."""
        *parent, name = check_key(key)
        path = self._path(key)
        fd = self._open(key)
        with os_errors("sync", path):
            try:
                os.fsync(fd)
            except OSError:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                raise
            finally:
                let_go(fd)
        with (
            self._root() as root,
            self._folder(root, parent, create=False) as folder,
        ):
            if name in unsure_names(folder):
                with self._folder(root, layout.tmp_folder(key).split("/"), create=True) as tmp:
                    name_anew(tmp, folder, name, path)
                if name in unsure_names(folder):
                    raise still_unsure(os.path.dirname(path), name)
            with os_errors("sync the folder of", path):
                sync_folder(folder, name)

    def delete(self, key: str) -> None:
        *parent, name = check_key(key)
        path = self._path(key)
        with self._root() as root, os_errors("delete", path):
            folder = walk(root, parent)
            if folder is None:
                self._check(root)
                return
            try:
                if if_there(folder, name, lambda: _unlink(name, folder)) is None:
                    self._check(root)
                else:
                    sync_folder(folder)
            finally:
                let_go(folder)

    def check_root(self) -> str:
        with self._root() as root:
            return self._check(root)

    def refill_reserve(self) -> int:
        """Space that is given up for records when the folder is full: how many files of it there are now."""
        with self._root() as root:
            self._check(root)
            return reserve.fill(root)

    def initialise(self) -> str:
        """Create the root folder (its parent must exist) and its marker, unless they are there; the uuid.
        `ckptd init` calls it. Racing callers all get the uuid of the one marker."""
        parent, name = os.path.split(self.root)
        with os_errors("create", self.root):
            try:
                above = os.open(os.path.join(parent, "."), os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError as error:
                raise Invalid(
                    f"the folder {parent} above the new storage {self.root} does not exist",
                    do="Create it, or mount the drive it belongs to, then run init again.",
                    field="url",
                ) from error
            try:
                if name:
                    sync_subfolder(above, name, made=make(above, name))
            finally:
                let_go(above)
        try:
            self.check_root()
        except NotInitialised:
            data = new_marker()
            try:
                self._create(layout.ROOT_MARKER, [data], len(data), marked=False)
            except AlreadyExists:
                _log.debug("another process initialised %s at the same time", self.url)
        self.sync(layout.ROOT_MARKER)
        return self.check_root()

    # How an object comes to be

    def _create(self, key: str, chunks: Iterable[Buffer], size: int, *, marked: bool = True) -> None:
        *parent, name = check_key(key)
        aside = layout.tmp_folder(key)
        path, nonce = self._path(key), layout.new_nonce()
        aside_path = self._path(f"{aside}/{nonce}")
        with self._root() as root:
            if marked:
                self._check(root)
            with self._folder(root, aside.split("/"), create=True) as tmp:
                try:
                    before = layout.segment_before(key)
                    if before is not None:
                        seal(root, tmp, before, self._path(before))
                    written = write_aside(tmp, nonce, aside_path, chunks, size)
                    with self._folder(root, parent, create=True) as folder:
                        for earlier in unsure_names(folder):  # a record stands on the ones before it
                            name_anew(tmp, folder, earlier, os.path.join(os.path.dirname(path), earlier))
                        self._publish(key, NewFile(tmp, nonce, written, folder, name, path))
                        made_anew(folder, name)
                        with os_errors("sync the folder of", path):
                            sync_folder(folder, name)
                finally:
                    discard(tmp, nonce, aside_path)

    def _publish(self, key: str, new: NewFile) -> None:
        try:
            if self._publish_by == "link":
                by_link(new, lock_url=f"file://{self.root}?publish=lock")
            else:
                by_rename(new, os.path.join(self.root, LOCK_NAME), self._lock_deadline_seconds)
        except FileExistsError as error:
            raise AlreadyExists(f"{key} exists already in {self.url}", key=key, url=self.url) from error

    # The root and its folders

    @contextmanager
    def _root(self) -> Iterator[int]:
        try:
            # "/." makes an automounter mount the drive, which O_PATH alone would not.
            fd = os.open(os.path.join(self.root, "."), os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError as error:
            raise no_marker(self.url, "the folder does not exist") from error
        except NotADirectoryError as error:
            raise no_marker(self.url, "it is not a folder") from error
        except OSError as error:
            raise os_error(error, "open", self.root) from error
        try:
            yield fd
        finally:
            let_go(fd)

    def _check(self, root: int) -> str:
        path = self._path(layout.ROOT_MARKER)
        with os_errors("read", path):
            fd = lookup(root, layout.ROOT_MARKER, READ_FLAGS)
            if fd is None:
                raise no_marker(self.url)
            with os.fdopen(fd, "rb") as file:
                data = file.read(MAX_MARKER_BYTES)
        found = parse_marker(data, self.url)
        if self._uuid is None:
            self._uuid = found
        if found != self._uuid:
            raise other_storage(self.url, self._uuid, found)
        return found

    @contextmanager
    def _folder(self, root: int, parts: Sequence[str], *, create: bool) -> Iterator[int]:
        """An open folder whose way down is durable. `NotFound` without `create`."""
        way, path = tuple(parts), self._path("/".join(parts))
        with os_errors("create" if create else "open", path):
            fd = walk(root, way, create=create, sync=way not in self._durable)
        if fd is None:
            self._check(root)
            raise NotFound(f"the folder {path} does not exist", path=path, url=self.url)
        try:
            self._durable.add(way)
            yield fd
        finally:
            let_go(fd)

    def _open(self, key: str) -> int:
        *parent, name = check_key(key)
        try:
            return self._open_once(key, parent, name)
        except Unavailable as error:
            if error.fields.get("errno") != "ESTALE":
                raise
        return self._open_once(key, parent, name)

    def _open_once(self, key: str, parent: Sequence[str], name: str) -> int:
        with self._root() as root, os_errors("open", self._path(key)):
            folder = walk(root, parent)
            try:
                fd = None if folder is None else lookup(folder, name, READ_FLAGS)
            finally:
                if folder is not None:
                    let_go(folder)
            if fd is None:
                self._check(root)
                raise self._not_found(key)
            if is_regular(fd):
                return fd
            let_go(fd)
            raise self._not_found(key, " (a folder or special file has its name)")

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key)

    def _not_found(self, key: str, note: str = "") -> NotFound:
        return NotFound(f"{key} does not exist in {self.url}{note}", key=key, url=self.url)


def _unlink(name: str, folder: int) -> bool:
    os.unlink(name, dir_fd=folder)
    return True
