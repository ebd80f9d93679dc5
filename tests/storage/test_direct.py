"""Large files: past the cache where the drive allows it, through it where not, and whole or not there in any case."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import Invalid, NotFound, Unavailable
from ckptd.storage import direct, publish
from ckptd.storage.local import LocalStorage

PAGE = mmap.PAGESIZE
LARGE = 4 * PAGE
KEY = "runs/en-it/data/g00000001-s000000000001/object"
DEADLINE_SECONDS = 60.0
DATA = os.urandom(40 * PAGE)


@pytest.fixture(params=["drive", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder where tests lie, and one of tmpfs, which has no direct writes of its own."""
    if request.param == "drive":
        yield tmp_path / "root"
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "root"


@pytest.fixture
def storage(root: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStorage:
    monkeypatch.setattr(publish, "LARGE_BYTES", LARGE)
    storage = LocalStorage(root)
    storage.initialise()
    return storage


@dataclass
class Writes:
    """The writes into new files: where, how many bytes, past the cache or not, and on which thread."""

    seen: list[tuple[int, int, bool, str]] = field(default_factory=list)
    real: Callable[..., int] = os.pwrite

    def __call__(self, fd: int, view: memoryview, at: int) -> int:
        past = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        taken = self.real(fd, view, at)
        self.seen.append((at, taken, past, threading.current_thread().name))
        return taken

    def past_bytes(self) -> int:
        return sum(taken for _, taken, past, _ in self.seen if past)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    found = Writes()
    monkeypatch.setattr(os, "pwrite", found)
    return found


def aligned(data: bytes, shift: int = 0) -> memoryview:
    """The bytes in memory that begins `shift` bytes behind a page."""
    memory = mmap.mmap(-1, len(data) + shift or 1)
    memory[shift : shift + len(data)] = data
    return memoryview(memory)[shift : shift + len(data)]


def pieces(view: memoryview, size: int) -> list[memoryview]:
    return [view[at : at + size] for at in range(0, view.nbytes, size)]


def stored(storage: LocalStorage) -> bytes:
    return storage.get(KEY, 1 << 30)


def nothing_left(storage: LocalStorage) -> None:
    """No object, no temporary file, no thread, no descriptor."""
    with pytest.raises(NotFound):
        storage.size(KEY)
    below = [path.relative_to(storage.root) for path in Path(storage.root).rglob("*") if path.is_file()]
    assert not [path for path in below if "tmp" in path.parts]
    assert "ckptd-write" not in [thread.name for thread in threading.enumerate()]
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    assert not [path for path in open_files if path.startswith(storage.root)]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def has_direct(root: Path) -> bool:
    with tempfile.TemporaryFile(dir=root) as file:
        return direct.direct_alignment(file.fileno()) > 0


SIZES = sorted(
    {0, 1, PAGE - 1, PAGE, PAGE + 1}
    | {LARGE + near for near in (-1, 0, 1)}
    | {blocks * PAGE + near for blocks in (6, 8, 12, 16) for near in (-1, 0, 1, 513)}
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_every_byte_is_there_whatever_the_size_and_wherever_it_lies(
    storage: LocalStorage, writes: Writes, size: int, shift: int
) -> None:
    storage.put(KEY, pieces(aligned(DATA[:size], shift), 8 * PAGE), size)
    assert stored(storage) == DATA[:size]
    straight = size // PAGE * PAGE if size >= LARGE and shift == 0 and has_direct(Path(storage.root)) else 0
    assert writes.past_bytes() == straight


def test_pieces_of_any_size_come_to_their_places(storage: LocalStorage, writes: Writes) -> None:
    view, cuts = aligned(DATA), [0, 100, PAGE, 5 * PAGE, 5 * PAGE + 7, 9 * PAGE + 7, 20 * PAGE, 20 * PAGE, 31 * PAGE]
    storage.put(KEY, [view[a:b] for a, b in zip(cuts, [*cuts[1:], len(DATA)], strict=True)], len(DATA))
    assert stored(storage) == DATA
    # All but the first page, and the pages in which a piece begins or ends.
    assert writes.past_bytes() in (0, (4 + 3 + 10 + 11 + 9) * PAGE)
    assert (writes.past_bytes() > 0) == has_direct(Path(storage.root))


def test_a_header_that_lies_elsewhere_goes_through_the_cache(storage: LocalStorage, writes: Writes) -> None:
    header = bytes(2 * PAGE)
    storage.put(KEY, [header, *pieces(aligned(DATA), 8 * PAGE)], len(header) + len(DATA))
    assert stored(storage) == header + DATA
    assert writes.past_bytes() == (len(DATA) if has_direct(Path(storage.root)) else 0)
    assert [write[:3] for write in writes.seen if write[0] == 0] == [(0, 2 * PAGE, False)]


def test_small_files_are_left_to_the_kernel(storage: LocalStorage, writes: Writes) -> None:
    storage.put(KEY, [aligned(DATA[: LARGE - 1])], LARGE - 1)
    assert writes.seen == []


# Drives that take no direct writes, or not these.


def refuse(error: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return call


@pytest.fixture
def says_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive says it takes direct writes, whatever is true."""
    monkeypatch.setattr(direct, "direct_alignment", lambda fd: PAGE)


def put_in_pieces(storage: LocalStorage) -> None:
    storage.put(KEY, pieces(aligned(DATA[:-9]), 8 * PAGE), len(DATA) - 9)
    assert stored(storage) == DATA[:-9]


def test_a_drive_that_refuses_the_flag_gets_all_through_the_cache(
    storage: LocalStorage, writes: Writes, says_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "set_direct", refuse(errno.EINVAL))
    put_in_pieces(storage)
    assert writes.past_bytes() == 0


def test_a_drive_that_refuses_the_first_direct_write_gets_all_through_the_cache(
    storage: LocalStorage, writes: Writes, says_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def pwrite(fd: int, view: memoryview, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "blocks of 12345 bytes, please")
        return writes(fd, view, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    put_in_pieces(storage)
    assert refused
    assert writes.past_bytes() == 0


def test_a_drive_with_large_blocks_gets_multiples_of_them(
    storage: LocalStorage, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "direct_alignment", lambda fd: 3 * PAGE)
    put_in_pieces(storage)
    assert all(at % (3 * PAGE) == taken % (3 * PAGE) == 0 for at, taken, past, _ in writes.seen if past)


def test_a_kernel_that_does_not_say_gets_all_through_the_cache(
    storage: LocalStorage, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older:
        """A C library without statx and sync_file_range."""

        fallocate = direct._libc.fallocate

    monkeypatch.setattr(direct, "_libc", Older())
    put_in_pieces(storage)
    assert writes.past_bytes() == 0


def test_short_direct_writes_are_completed(
    storage: LocalStorage, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is left of such a write no longer begins at a block, so a real drive refuses it: it goes through the cache.
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: writes(fd, view[: PAGE + 100], at))
    put_in_pieces(storage)


def test_a_drive_that_cannot_allocate_is_written_all_the_same(
    storage: LocalStorage, says_direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without:
        """A file system that does not know fallocate, on a drive that has the rest."""

        sync_file_range = direct._libc.sync_file_range
        asked = 0

        def fallocate(self, *args: Any) -> int:
            Without.asked += 1
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(direct, "_libc", Without())
    put_in_pieces(storage)
    assert Without.asked == 1


# Two writers, and errors.


@pytest.fixture
def in_two(says_direct: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers on any drive: who writes does not depend on how."""
    monkeypatch.setattr(direct, "set_direct", lambda fd, on: None)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_space_to_allocate_is_told_before_a_byte_is_written(
    storage: LocalStorage, writes: Writes, says_direct: None, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(direct, "allocate", refuse(error))
    with pytest.raises(Unavailable, match="is full") as caught:
        put_in_pieces(storage)
    assert (caught.value.fields["errno"], caught.value.fields["wanted_bytes"]) == (
        errno.errorcode[error],
        len(DATA) - 9,
    )
    assert writes.seen == []
    nothing_left(storage)


def test_a_file_size_limit_is_met_by_the_real_call(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.initialise()
    program = """
import mmap, resource, sys
from ckptd.errors import Unavailable
from ckptd.storage import open_storage
storage, size = open_storage(sys.argv[1]), 16 << 20
memory = mmap.mmap(-1, size)
resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, 9 << 20))
try:
    storage.put(sys.argv[2], [memoryview(memory)[at : at + (4 << 20)] for at in range(0, size, 4 << 20)], size)
except Unavailable as error:
    print(error.fields["errno"], error.fields["wanted_bytes"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, storage.url, KEY], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["EFBIG", str(16 << 20)], done.stderr
    nothing_left(storage)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_an_error_in_mid_write_leaves_nothing(
    storage: LocalStorage, writes: Writes, monkeypatch: pytest.MonkeyPatch, error: int, nth: int
) -> None:
    def pwrite(fd: int, view: memoryview, at: int) -> int:
        if at >= nth * 8 * PAGE:
            raise OSError(error, os.strerror(error))
        return writes(fd, view, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(Unavailable) as caught:
        put_in_pieces(storage)
    assert caught.value.fields["errno"] == errno.errorcode[error]
    assert caught.value.fields["wanted_bytes"] == len(DATA) - 9
    nothing_left(storage)


@pytest.mark.parametrize("broken", ["second", "first"])
def test_an_error_of_one_of_two_writers_ends_both(
    storage: LocalStorage, in_two: None, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Both are inside a write at the same time; one fails, and the file is closed only when the other is done."""
    real_write, real_close = os.pwrite, os.close
    both, failed = threading.Barrier(2), threading.Event()
    steps: list[str] = []

    def pwrite(fd: int, view: memoryview, at: int) -> int:
        second = threading.current_thread().name == "ckptd-write"
        both.wait(DEADLINE_SECONDS)
        if second == (broken == "second"):
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert failed.wait(DEADLINE_SECONDS)
        taken = real_write(fd, view, at)
        steps.append("written")
        return taken

    def close(fd: int) -> None:
        if "/tmp/g" in os.readlink(f"/proc/self/fd/{fd}").removeprefix(storage.root):
            steps.append("closed")
        real_close(fd)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(Unavailable, match="EIO"):
        storage.put(KEY, pieces(aligned(DATA[: 16 * PAGE]), 8 * PAGE), 16 * PAGE)
    monkeypatch.undo()
    assert steps[0] == "written"
    nothing_left(storage)


def test_two_writers_are_at_work_at_the_same_time(
    storage: LocalStorage, in_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, both = os.pwrite, threading.Barrier(2)

    def pwrite(fd: int, view: memoryview, at: int) -> int:
        both.wait(DEADLINE_SECONDS)
        return real(fd, view, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    storage.put(KEY, pieces(aligned(DATA[: 16 * PAGE]), 8 * PAGE), 16 * PAGE)
    monkeypatch.undo()
    assert stored(storage) == DATA[: 16 * PAGE]


def test_one_writer_does_it_alone_where_there_are_no_more_threads(
    storage: LocalStorage, in_two: None, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    put_in_pieces(storage)
    assert {thread for *_, thread in writes.seen} == {threading.current_thread().name}


def test_what_the_chunks_raise_comes_through_unchanged(storage: LocalStorage) -> None:
    class Own(Exception):
        pass

    def chunks() -> Iterator[memoryview]:
        yield from pieces(aligned(DATA[: 16 * PAGE]), 8 * PAGE)
        raise Own

    with pytest.raises(Own):
        storage.put(KEY, chunks(), 17 * PAGE)
    nothing_left(storage)


@pytest.mark.parametrize("claimed", [len(DATA) - 1, len(DATA) + 1])
def test_chunks_that_do_not_add_up_are_refused(storage: LocalStorage, claimed: int) -> None:
    with pytest.raises(Invalid, match="do not add up"):
        storage.put(KEY, pieces(aligned(DATA), 8 * PAGE), claimed)
    nothing_left(storage)


def test_a_drive_that_fails_to_write_behind_fails_the_put(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "write_behind", refuse(errno.EIO))
    with pytest.raises(Unavailable, match="EIO"):
        put_in_pieces(storage)
    nothing_left(storage)


def test_T1_the_fsync_comes_after_the_last_write_of_both(
    storage: LocalStorage, in_two: None, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, before = os.fsync, list[int]()

    def fsync(fd: int) -> None:
        if os.fstat(fd).st_size == len(DATA) - 9:
            before.append(sum(taken for _, taken, _, _ in writes.seen))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    put_in_pieces(storage)
    assert before == [len(DATA) - 9]


def test_a_thread_that_outlives_the_main_thread_still_writes_with_two(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.initialise()
    program = """
import mmap, sys, threading
from ckptd.storage import open_storage
memory = mmap.mmap(-1, 16 << 20)
memory[:] = b"x" * len(memory)
def chunks():
    threading.main_thread().join(60.0)
    for at in range(0, len(memory), 4 << 20):
        yield memoryview(memory)[at : at + (4 << 20)]
threading.Thread(target=lambda: open_storage(sys.argv[1]).put(sys.argv[2], chunks(), len(memory))).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, storage.url, KEY], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert stored(storage) == b"x" * (16 << 20)
