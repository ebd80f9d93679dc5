"""How a new file gets its name: whole, once, and never over another one.

Not by O_EXCL on the final name, which shows readers an empty or half-written file, and not by a bare rename,
which overwrites. A lost race is a FileExistsError here; `LocalStorage` turns it into `AlreadyExists`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

from filelock import Timeout, UnixFileLock

from ckptd import layout
from ckptd.errors import Invalid, Unavailable
from ckptd.storage.base import Buffer
from ckptd.storage.direct import LARGE_BYTES, LargeFile
from ckptd.storage.files import (
    READ_FLAGS,
    WRITE_FLAGS,
    flat,
    if_there,
    is_regular,
    let_go,
    lookup,
    names_in,
    os_error,
    os_errors,
    walk,
    write_all,
)
from ckptd.storage.unsure import exchange, made_anew, still_unsure, sync_folder, unsure_names

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
MAX_ANEW_BYTES = 1 << 20  # records and manifests; payload whose put failed is named by nobody
_log = logging.getLogger("ckptd.storage")


@dataclass(frozen=True)
class NewFile:
    """A written file `nonce` in the open folder `tmp`, about to become `name` in the open `folder`."""

    tmp: int
    nonce: str
    written: os.stat_result
    folder: int
    name: str
    path: str


def write_aside(tmp: int, nonce: str, path: str, chunks: Iterable[Buffer], size: int) -> os.stat_result:
    """Write, fsync and close the file `nonce` in the open folder `tmp`; its identity.

    It is read-only from birth, as far as the umask allows. Any failure, that of fsync above all, gives the
    file up for good: the kernel reports a lost write once and may then call the same file clean.
    """
    with os_errors("create", path, size):
        fd = os.open(nonce, WRITE_FLAGS, 0o444, dir_fd=tmp)
    try:
        done = _write_large(fd, path, chunks, size) if size >= LARGE_BYTES else _write(fd, path, chunks, size)
        if done != size:
            found = f"at least {done}" if done > size else f"{done}"
            raise Invalid(
                f"the chunks for {path} do not add up: expected {size} bytes, found {found}",
                do="Pass the size of all chunks together.",
                expected=size,
                found=done,
            )
        with os_errors("fsync", path, size):
            os.fsync(fd)
            written = os.fstat(fd)
    except BaseException:
        try:
            os.close(fd)
        except OSError as error:
            _log.warning("closing the abandoned %s failed too: %s", path, error)
        raise
    with os_errors("close", path, size):  # where network drives report a full quota
        os.close(fd)
    return written


def _write(fd: int, path: str, chunks: Iterable[Buffer], size: int) -> int:
    """How many bytes there were, `size` of them at most are written."""
    done = 0
    for chunk in chunks:
        view = flat(chunk)
        done += view.nbytes
        if done > size:
            break
        with os_errors("write", path, size):
            write_all(fd, view)
    return done


def _write_large(fd: int, path: str, chunks: Iterable[Buffer], size: int) -> int:
    """As `_write`. Errors of the chunks' own come through unchanged, so only the writing is translated."""
    done = 0
    with os_errors("allocate", path, size):
        file = LargeFile(fd, size)
    with file:
        for chunk in chunks:
            view = flat(chunk)
            done += view.nbytes
            if done > size:
                break
            with os_errors("write", path, size):
                file.write(view)
        with os_errors("write", path, size):
            file.finish()
    return done


def by_link(new: NewFile, *, lock_url: str) -> None:
    """Publish by link(2). `lock_url` is what the error names for a mount without hard links."""
    try:
        os.link(new.nonce, new.name, src_dir_fd=new.tmp, dst_dir_fd=new.folder, follow_symlinks=False)
    except OSError as error:
        if _is_published(new, error):
            return
        if error.errno in _NO_LINKS:
            name = errno.errorcode[error.errno]
            raise Unavailable(
                f"the drive refused a hard link ({name}), which is how {new.path} gets its name",
                do="Check the permissions. If this mount has no hard links, use the URL "
                f"{lock_url}, with which one host only may write.",
                errno=name,
                path=new.path,
                operation="link",
            ) from error
        raise os_error(error, "link", new.path) from error


def by_rename(new: NewFile, lock_path: str, deadline_seconds: float) -> None:
    """Publish by rename under a lock file, for mounts without hard links.

    flock(2) excludes the processes of one host for certain, those of several only on some drives. The lock
    is the native one and never its soft replacement, which would outlive a killed process.
    """
    lock = UnixFileLock(lock_path, timeout=deadline_seconds, poll_interval=0.01, fallback_to_soft=False)
    try:
        with lock:
            if new.name in names_in(new.folder):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new.path)
            os.rename(new.nonce, new.name, src_dir_fd=new.tmp, dst_dir_fd=new.folder)
    except FileExistsError:
        raise
    except Timeout as error:
        raise Unavailable(
            f"the lock {lock_path} was not free within {deadline_seconds} s, so {new.path} was not published",
            do="Retry; if it stays, look for a writer that hangs on this drive.",
            path=new.path,
            operation="lock",
        ) from error
    except OSError as error:
        if not _is_published(new, error):
            raise os_error(error, "rename", new.path) from error


def name_anew(tmp: int, folder: int, name: str, path: str) -> None:
    """Make `name`, whose folder could not be fsynced, durable after all: a copy of its file takes its place.

    They change places in one step, so that readers find the same bytes under the name at every moment, and whoever
    has the file open keeps it. A large file is left unsure. `Unavailable` if this drive cannot exchange names.
    """
    with os_errors("read", path):
        fd = lookup(folder, name, READ_FLAGS)
        if fd is None:
            return made_anew(folder, name)  # gone: there is nothing to be sure of
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_ANEW_BYTES + 1) if is_regular(fd) else b""
    if not data or len(data) > MAX_ANEW_BYTES:
        return None
    nonce = layout.new_nonce()
    aside_path = f"{path} (its copy {nonce})"
    try:
        write_aside(tmp, nonce, aside_path, [data], len(data))
        try:
            exchange(tmp, nonce, folder, name)
        except OSError as error:
            raise still_unsure(os.path.dirname(path), name) from error
        made_anew(folder, name)
        with os_errors("sync the folder of", path):
            sync_folder(folder, name)
    finally:
        discard(tmp, nonce, aside_path)


def seal(root: int, tmp: int, before: str, path: str) -> None:
    """Make the names in the folder `before` durable, which no fsync of the next folder of records does: whoever wrote
    the last of them may not have come to its fsync yet."""
    with os_errors("open", path):
        folder = walk(root, before.split("/"))
    if folder is None:
        return
    try:
        for name in unsure_names(folder):
            name_anew(tmp, folder, name, os.path.join(path, name))
        with os_errors("sync the folder", path):
            sync_folder(folder)
    finally:
        let_go(folder)


def discard(tmp: int, nonce: str, path: str) -> None:
    """Remove the temporary name. If that fails it costs space and nothing else, so it must not hide how the
    put itself ended."""
    try:
        os.unlink(nonce, dir_fd=tmp)
    except FileNotFoundError:
        return  # renamed, or never created
    except OSError as error:
        _log.warning("%s stays behind: %s", path, error)


def _is_published(new: NewFile, error: OSError) -> bool:
    """After a failed publish: True if the name is our file (it was made, only the answer got lost), False if
    nobody has the name or it cannot be told; FileExistsError if another file has it.

    The error alone says little: sftp answers a taken name as it answers any failure, which arrives as EPERM.
    Some FUSE drives give the same file another inode number under its new name; there one's own lost answer
    is a FileExistsError too, and the caller has to read what is there.
    """
    try:
        holder = if_there(new.folder, new.name, lambda: os.stat(new.name, dir_fd=new.folder, follow_symlinks=False))
    except OSError as second:
        _log.debug("cannot tell who has %s: %s", new.path, second)
        return False
    if holder is None:
        return False
    if os.path.samestat(holder, new.written):
        return True
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new.path) from error
