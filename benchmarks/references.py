"""The machine's own limits: copying in memory, writing and reading plain files. Nobody saves less than these do."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CHUNK_BYTES = 32 * 1024 * 1024
BLOCK_BYTES = 4096
VECTORS = 512


def warm_buffer(size: int) -> torch.Tensor:
    """Flat uint8 on page boundaries, whole pages, every one touched."""
    pages = mmap.mmap(-1, -(-max(size, 1) // BLOCK_BYTES) * BLOCK_BYTES)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    buffer.fill_(1)
    return buffer


def bytes_of(buffer: torch.Tensor) -> memoryview:
    return buffer.numpy().data


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def write(path: Path, data: memoryview) -> None:
    """A fresh file, by plain calls, fsynced."""
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        write_all(fd, data)
        os.fsync(fd)


def write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(fd, data[done : done + CHUNK_BYTES])


def write_direct(path: Path, data: memoryview) -> None:
    """A fresh file around the page cache: O_DIRECT into space asked for before, then fsync. `data` is whole pages."""
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT) as fd:
        os.posix_fallocate(fd, 0, data.nbytes)
        write_all(fd, data)
        os.fsync(fd)


def read_into(paths: Iterable[Path], targets: list[memoryview]) -> None:
    """All bytes of the files by plain preadv, in their order, into the targets; what is left over goes nowhere."""
    left = [view for view in reversed(targets) if view.nbytes]
    scratch = memoryview(bytearray(1 << 20))
    for path in paths:
        with opened(path, os.O_RDONLY) as fd:
            offset, size = 0, os.fstat(fd).st_size
            while offset < size:
                views = _some(left) if left else [scratch]
                got = os.preadv(fd, views, offset)
                if not got:
                    raise OSError(f"{path} ends at {offset}, expected {size}")
                offset += got
                if left:
                    _advance(left, got)


def _some(views: list[memoryview]) -> list[memoryview]:
    """As many as one call takes, from the end, where they are taken away cheaply."""
    taken, total = [], 0
    for view in reversed(views[-VECTORS:]):
        taken.append(view[: CHUNK_BYTES - total])
        total += taken[-1].nbytes
        if total >= CHUNK_BYTES:
            break
    return taken


def _advance(views: list[memoryview], count: int) -> None:
    while count:
        view = views.pop()
        if view.nbytes > count:
            views.append(view[count:])
            return
        count -= view.nbytes


def files_in(folder: Path) -> list[Path]:
    """All files below a folder, or the file itself."""
    return [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())


def sync_files(place: Path) -> None:
    for path in files_in(place):
        with opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)


def cool(place: Path) -> None:
    """Out of the page cache, after everything is on the disk. Caches below this machine are not ours to empty."""
    for path in files_in(place):
        with opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def remove(place: Path) -> None:
    """Delete a file or a folder, and let the file system finish with that before the next contender's turn."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    last = place.parent / f".settle-{os.getpid()}"
    with opened(last, os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"x")
        os.fsync(fd)
    last.unlink()
