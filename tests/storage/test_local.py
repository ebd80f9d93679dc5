"""What a folder on a drive adds to the contract: durability, lost answers, unmounted drives, dying writers."""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd import layout
from ckptd.errors import AlreadyExists, Corrupt, Invalid, NotFound, NotInitialised, Unavailable
from ckptd.storage.local import LOCK_NAME, LocalStorage

RUN = "runs/r"
KEY = f"{RUN}/log/0000000000000001.json"
LIMIT = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(params=["link", "lock"])
def storage(root: Path, request: pytest.FixtureRequest) -> LocalStorage:
    storage = LocalStorage(root, publish=request.param)
    storage.initialise()
    return storage


@pytest.fixture
def by_link(root: Path) -> LocalStorage:
    storage = LocalStorage(root)
    storage.initialise()
    return storage


def put(storage: LocalStorage, key: str = KEY, data: bytes = b"x") -> None:
    storage.put(key, [data], len(data))


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def name_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def os_call(error: int) -> Callable[..., Any]:
    """A system call that always fails with this errno."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


def recorded_fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are fsynced from now on, in order."""
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(name_of(fd))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


class FailOnce:
    """Stands in for a function of `os`: the first call that matches fails, the others go through."""

    def __init__(self, real: Callable[..., Any], error: int, matches: Callable[..., bool] = lambda *a: True):
        self.real, self.error, self.matches, self.fired = real, error, matches, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.fired and self.matches(*args):
            self.fired += 1
            raise OSError(self.error, os.strerror(self.error))
        return self.real(*args, **kwargs)


# Files as others see them


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_are_read_only_as_the_umask_allows(storage: LocalStorage, root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        put(storage)
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / KEY).stat().st_mode) == 0o444 & ~umask


def test_the_temporary_file_is_in_the_run_and_goes_away(storage: LocalStorage, root: Path) -> None:
    seen: list[str] = []

    def chunks() -> Iterator[bytes]:
        seen.extend(name for name in files_below(root) if "/tmp/" in name)
        yield b"x"

    storage.put(KEY, chunks(), 1)
    assert len(seen) == 1
    assert seen[0].startswith(f"{layout.tmp_folder(KEY)}/")
    assert files_below(root) - {LOCK_NAME} == {layout.ROOT_MARKER, KEY}
    assert (root / KEY).stat().st_nlink == 1


def test_losing_leaves_no_temporary_file(storage: LocalStorage, root: Path) -> None:
    put(storage)
    with pytest.raises(AlreadyExists):
        put(storage)
    with pytest.raises(Invalid):
        storage.put(f"{KEY}2", [b"x"], 2)
    assert files_below(root) - {LOCK_NAME} == {layout.ROOT_MARKER, KEY}


def test_short_writes_are_completed(by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    put(by_link, KEY, b"0123456789" * 5)
    monkeypatch.undo()
    assert by_link.get(KEY, LIMIT) == b"0123456789" * 5


def test_short_reads_are_completed(by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(by_link, KEY, b"0123456789" * 5)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:7]], offset))
    assert by_link.get(KEY, LIMIT) == b"0123456789" * 5


def test_a_truncated_file_is_corrupt_with_both_sizes(by_link: LocalStorage, root: Path) -> None:
    put(by_link, KEY, b"0123456789")
    with by_link.reader(KEY) as reader:
        (root / KEY).chmod(0o644)
        os.truncate(root / KEY, 4)
        with pytest.raises(Corrupt, match="size was 10") as caught:
            reader.read_into(0, memoryview(bytearray(10)))
    assert (caught.value.fields["expected"], caught.value.fields["found"]) == (10, 4)


# Durability


def test_T1_order_of_fsync_and_publish(storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    real_fsync, real_link, real_rename = os.fsync, os.link, os.rename

    def fsync(fd: int) -> None:
        steps.append(f"fsync {Path(name_of(fd)).relative_to(root)}")
        real_fsync(fd)

    def link(*args: Any, **kwargs: Any) -> None:
        steps.append("publish")
        real_link(*args, **kwargs)

    def rename(*args: Any, **kwargs: Any) -> None:
        steps.append("publish")
        real_rename(*args, **kwargs)

    put(storage, "runs/older/log/1")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "rename", rename)
    put(storage)
    published = steps.index("publish")
    file = next(i for i, step in enumerate(steps) if step.startswith(f"fsync {RUN}/tmp/"))
    assert file < published
    assert steps[published:] == ["publish", f"fsync {RUN}/log"]
    # The names of the new folders, each in the folder above it.
    assert {"fsync runs", f"fsync {RUN}"} <= set(steps[:published])

    steps.clear()
    put(storage, f"{RUN}/log/0000000000000002.json")
    assert [s.partition("/tmp/")[0] for s in steps] == [f"fsync {RUN}", "publish", f"fsync {RUN}/log"]


def test_a_folder_another_process_made_is_made_durable_too(
    root: Path, by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / RUN / "log").mkdir(parents=True)  # made, and perhaps not fsynced yet
    synced = recorded_fsyncs(monkeypatch)
    put(by_link)
    assert {str(root), str(root / "runs"), str(root / RUN), str(root / RUN / "log")} <= set(synced)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_T7_a_failed_fsync_gives_the_file_up(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    put(storage, f"{RUN}/log/0000000000000000.json")
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(name_of(fd))
        if len(synced) == 1:
            raise OSError(error, os.strerror(error))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(Unavailable) as caught:
        put(storage)
    assert caught.value.fields["errno"] == errno.errorcode[error]
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(NotFound):
        storage.get(KEY, LIMIT)
    put(storage)
    assert storage.get(KEY, LIMIT) == b"x"
    files = [name for name in synced if f"/{RUN}/tmp/" in name]
    assert len(set(files)) == len(files) == 2  # another file, and none is fsynced twice
    assert not [name for name in files_below(root) if "/tmp/" in name]


def test_a_quota_error_at_close_is_seen(storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.close

    def close(fd: int) -> None:
        tmp = "/tmp/" in name_of(fd).removeprefix(str(root))
        real(fd)
        if tmp:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(Unavailable, match=r"EDQUOT.*7 bytes were wanted.*full"):
        put(storage, KEY, b"7 bytes")
    monkeypatch.undo()
    assert files_below(root) - {LOCK_NAME} == {layout.ROOT_MARKER}


def test_a_failed_fsync_of_the_folder_is_no_success(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, f"{RUN}/log/0000000000000000.json")
    fault = FailOnce(os.fsync, errno.EIO, lambda fd: name_of(fd) == str(root / RUN / "log"))
    monkeypatch.setattr(os, "fsync", fault)
    with pytest.raises(Unavailable, match="EIO"):
        put(storage)
    assert fault.fired == 1
    storage.sync(KEY)  # the outcome was open; here the object had landed
    with pytest.raises(AlreadyExists):
        put(storage)


def test_sync_reaches_file_and_folders(root: Path, by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(LocalStorage(root))
    synced = recorded_fsyncs(monkeypatch)
    by_link.sync(KEY)
    assert synced == [str(root / part) for part in (KEY, "", "runs", RUN, f"{RUN}/log")]


def test_T7_a_failed_sync_drops_the_cache(by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(by_link)
    dropped: list[int] = []
    monkeypatch.setattr(os, "fsync", os_call(errno.EIO))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, length, advice: dropped.append(advice))
    with pytest.raises(Unavailable, match=r"sync .*EIO"):
        by_link.sync(KEY)
    assert dropped == [os.POSIX_FADV_DONTNEED]


# Answers that get lost, names that hide


def test_a_lost_answer_of_the_publish_is_a_success(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(real: Callable[..., None], error: int) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            raise OSError(error, os.strerror(error))

        return call

    for number, error in enumerate((errno.EIO, errno.EEXIST, errno.EPERM, errno.ETIMEDOUT)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", losing(os.link, error))
            if error != errno.EEXIST:  # rename has no such answer
                patch.setattr(os, "rename", losing(os.rename, error))
            put(storage, f"{RUN}/log/{number}", b"%d" % number)
        assert storage.get(f"{RUN}/log/{number}", LIMIT) == b"%d" % number


def test_a_failed_publish_that_did_nothing_is_unavailable(
    storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", os_call(errno.EIO))
    monkeypatch.setattr(os, "rename", os_call(errno.EIO))
    with pytest.raises(Unavailable, match=f"{KEY} failed: EIO") as caught:
        put(storage)
    assert caught.value.fields["path"] == str(root / KEY)
    assert files_below(root) - {LOCK_NAME} == {layout.ROOT_MARKER}


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_a_drive_without_hard_links_names_the_way_out(
    by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(os, "link", os_call(error))
    with pytest.raises(Unavailable) as caught:
        put(by_link)
    assert errno.errorcode[error] in caught.value.message
    assert f"{by_link.url}?publish=lock" in caught.value.do
    assert "one host" in caught.value.do


def test_a_taken_name_is_recognised_whatever_the_drive_answers(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage)
    monkeypatch.setattr(os, "link", os_call(errno.EPERM))  # as sshfs does
    with pytest.raises(AlreadyExists):
        put(storage, KEY, b"other")
    assert storage.get(KEY, LIMIT) == b"x"


def test_an_existing_name_that_cannot_be_looked_at_is_no_verdict(
    by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(by_link)
    monkeypatch.setattr(os, "stat", os_call(errno.EIO))
    with pytest.raises(Unavailable, match="EEXIST"):
        put(by_link)


def test_a_name_remembered_as_absent_is_found_by_listing(
    by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(by_link)
    for part in (os.path.basename(KEY), "log", "runs"):
        for call in (lambda: by_link.get(KEY, LIMIT), lambda: by_link.size(KEY), lambda: by_link.sync(KEY)):
            with monkeypatch.context() as patch:
                fault = FailOnce(os.open, errno.ENOENT, lambda name, *_, part=part: name == part)
                patch.setattr(os, "open", fault)
                call()
                assert fault.fired == 1


def test_a_name_listed_and_not_there_is_no_absence(by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(by_link)
    real = os.open
    name = os.path.basename(KEY)

    def blind(path: str, *args: Any, **kwargs: Any) -> int:
        if path == name:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", blind)
    for call in (lambda: by_link.get(KEY, LIMIT), lambda: by_link.size(KEY), lambda: by_link.sync(KEY)):
        with pytest.raises(Unavailable, match="listed"):
            call()


def test_delete_does_not_believe_a_remembered_absence(
    by_link: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(by_link)
    fault = FailOnce(os.unlink, errno.ENOENT)
    monkeypatch.setattr(os, "unlink", fault)
    by_link.delete(KEY)
    assert fault.fired == 1
    assert not (root / KEY).exists()


def test_a_stale_handle_is_opened_once_more(by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(by_link, KEY, b"0123456789")
    for name in ("open", "preadv"):
        with monkeypatch.context() as patch:
            fault = FailOnce(getattr(os, name), errno.ESTALE)
            patch.setattr(os, name, fault)
            assert by_link.get(KEY, LIMIT) == b"0123456789"
            assert fault.fired == 1
    monkeypatch.setattr(os, "preadv", os_call(errno.ESTALE))
    with by_link.reader(KEY) as reader, pytest.raises(Unavailable, match="ESTALE"):
        reader.read_into(0, memoryview(bytearray(10)))


def test_no_descriptor_is_left_open(storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exercise() -> None:
        put(storage, f"{RUN}/log/{layout.new_nonce()}")
        with pytest.raises(AlreadyExists):
            put(storage)
        for absent in (f"{RUN}/log/none", "runs/none/log/none"):
            with pytest.raises(NotFound):
                storage.sync(absent)
            storage.delete(absent)
        storage.list(f"{RUN}/log")
        with pytest.raises(Corrupt):
            storage.get(KEY, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", os_call(errno.EIO))
            with pytest.raises(Unavailable):
                put(storage, f"{RUN}/log/{layout.new_nonce()}")
            with pytest.raises(Unavailable):
                storage.sync(KEY)

    put(storage)
    exercise()
    before = len(os.listdir("/proc/self/fd"))
    exercise()
    assert len(os.listdir("/proc/self/fd")) == before


# The root


@pytest.mark.parametrize("state", ["empty", "missing", "a file", "another storage"])
def test_T3_an_unmounted_root_is_never_read_as_empty_nor_written(
    storage: LocalStorage, root: Path, tmp_path: Path, state: str
) -> None:
    put(storage)
    root.rename(tmp_path / "the drive")
    if state == "empty":
        root.mkdir()
    elif state == "a file":
        root.write_bytes(b"")
    elif state == "another storage":
        LocalStorage(root).initialise()
    before = sorted(tmp_path.glob("root/**/*"))
    calls: list[Callable[[], object]] = [
        lambda: storage.list(f"{RUN}/log"),
        lambda: storage.list("runs"),
        lambda: storage.get(KEY, LIMIT),
        lambda: storage.size(KEY),
        lambda: storage.reader(KEY),
        lambda: storage.sync(KEY),
        lambda: storage.delete(KEY),
        lambda: put(storage),
        lambda: put(storage, "runs/new/log/1"),
        storage.check_root,
    ]
    for call in calls:
        with pytest.raises(NotInitialised) as caught:
            call()
        if state == "another storage":
            assert caught.value.fields["expected"] != caught.value.fields["found"]
        else:
            assert "new storage, or a drive that is not mounted" in caught.value.message
            assert f"ckptd init {storage.url}" in caught.value.do
    assert sorted(tmp_path.glob("root/**/*")) == before

    if state == "another storage":
        root.rename(tmp_path / "the other drive")
    elif state == "empty":
        root.rmdir()
    elif state == "a file":
        root.unlink()
    (tmp_path / "the drive").rename(root)
    assert storage.get(KEY, LIMIT) == b"x"


def test_a_put_stays_on_the_drive_it_began_on(storage: LocalStorage, root: Path, tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"a"
        root.rename(tmp_path / "the drive")  # unmounted in mid-write
        root.mkdir()
        (root / LOCK_NAME).touch()  # the lock is by path; its presence is not the point here
        yield b"b"

    storage.put(KEY, chunks(), 2)
    assert files_below(root) == {LOCK_NAME}
    assert (tmp_path / "the drive" / KEY).read_bytes() == b"ab"


@pytest.mark.parametrize(
    ("error", "says"),
    [(errno.EACCES, "uid"), (errno.ENOTCONN, "ENOTCONN"), (errno.EIO, "EIO"), (errno.ETIMEDOUT, "ETIMEDOUT")],
)
def test_T6_an_error_is_never_read_as_absence(
    by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch, error: int, says: str
) -> None:
    put(by_link)
    monkeypatch.setattr(os, "open", os_call(error))
    calls: list[Callable[[], object]] = [
        lambda: by_link.list("runs"),
        lambda: by_link.get(KEY, LIMIT),
        lambda: by_link.delete(KEY),
        lambda: put(by_link),
        by_link.check_root,
    ]
    for call in calls:
        with pytest.raises(Unavailable, match=says) as caught:
            call()
        assert type(caught.value) is Unavailable
        assert caught.value.fields["errno"] == errno.errorcode[error]


# Links and other strange files


def test_symbolic_links_are_not_followed(by_link: LocalStorage, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_bytes(b"secret")
    (root / RUN / "log").mkdir(parents=True)
    (root / KEY).symlink_to(secret / "file")
    (root / RUN / "data").symlink_to(secret)
    (root / "runs" / "other").symlink_to(secret)
    calls: list[Callable[[], object]] = [
        lambda: by_link.get(KEY, LIMIT),
        lambda: by_link.reader(KEY),
        lambda: by_link.sync(KEY),
        lambda: by_link.get(f"{RUN}/data/file", LIMIT),
        lambda: by_link.list(f"{RUN}/data"),
        lambda: by_link.delete(f"{RUN}/data/file"),
        lambda: put(by_link, f"{RUN}/data/new"),
        lambda: put(by_link, "runs/other/log/1"),
    ]
    for call in calls:
        with pytest.raises(Corrupt, match="symbolic link"):
            call()
    with pytest.raises(AlreadyExists):
        put(by_link)
    by_link.delete(KEY)  # the link goes, what it names stays
    assert files_below(secret) == {"file"}


def test_a_fifo_does_not_block(by_link: LocalStorage, root: Path) -> None:
    (root / RUN / "log").mkdir(parents=True)
    os.mkfifo(root / KEY)
    with pytest.raises(NotFound, match="special file"):
        by_link.get(KEY, LIMIT)


@pytest.mark.parametrize("path", ["relative", "", "./x", "/a/../b", "/a\0b"])
def test_roots_that_are_not_absolute_are_refused(path: str) -> None:
    with pytest.raises(Invalid):
        LocalStorage(path)


# The lock


def test_a_held_lock_is_waited_for_until_the_deadline(root: Path) -> None:
    storage = LocalStorage(root, publish="lock", lock_deadline_seconds=0.0)
    storage.initialise()
    program = (
        "import fcntl, os, sys\n"
        f"fd = os.open({str(root / LOCK_NAME)!r}, os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Unavailable, match=LOCK_NAME):
            put(storage)
        holder.send_signal(signal.SIGKILL)
    put(storage)  # the kernel gives a dead holder's lock back


def test_a_drive_without_locks_is_not_locked_softly(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(root, publish="lock")
    storage.initialise()
    monkeypatch.setattr("fcntl.flock", os_call(errno.ENOSYS))
    with pytest.raises(Unavailable, match="ENOSYS"):
        put(storage)
    assert files_below(root) == {layout.ROOT_MARKER, LOCK_NAME}


# Other processes


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_full_drive_is_unavailable_and_leaves_nothing(storage: LocalStorage, root: Path) -> None:
    # A file size limit stands in for the full drive: it works without mounting anything.
    program = """
import resource, sys
from ckptd.errors import Unavailable
from ckptd.storage import open_storage
storage = open_storage(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    storage.put(sys.argv[2], (b"x" * 50_000 for _ in range(4)), 200_000)
except Unavailable as error:
    print(error.fields["errno"], error.fields["wanted_bytes"], error.message)
"""
    done = run_python(program, storage.url, KEY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EFBIG 200000 "), done.stdout
    assert "200000 bytes were wanted" in done.stdout
    assert files_below(root) - {LOCK_NAME} == {layout.ROOT_MARKER}


def test_T1_a_writer_killed_in_mid_put_leaves_no_object(storage: LocalStorage, root: Path) -> None:
    program = """
import sys
from ckptd.storage import open_storage
def chunks():
    yield b"x" * 100_000
    print("halfway", flush=True)
    sys.stdin.read()
open_storage(sys.argv[1]).put(sys.argv[2], chunks(), 200_000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, storage.url, KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "halfway\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    with pytest.raises(NotFound):
        storage.get(KEY, LIMIT)
    assert storage.list(f"{RUN}/log") == []
    put(storage, KEY, b"next")
    assert storage.get(KEY, LIMIT) == b"next"
    (left,) = storage.list(layout.tmp_folder(KEY))  # what the dead one wrote, for the collector
    storage.delete(f"{layout.tmp_folder(KEY)}/{left}")


def test_T2_two_processes_race_for_one_key(storage: LocalStorage) -> None:
    program = """
import sys
from ckptd.errors import AlreadyExists
from ckptd.storage import open_storage
storage = open_storage(sys.argv[1])
print("ready", flush=True)
won = []
for line in sys.stdin:
    key = line.strip()
    try:
        storage.put(key, [sys.argv[2].encode()], 1)
        print("won", flush=True)
    except AlreadyExists:
        print("lost", flush=True)
"""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", program, storage.url, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for number in range(20):
            key = f"{RUN}/log/{number:016d}.json"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(f"{key}\n")
                racer.stdin.flush()
            ends = {name: r.stdout.readline().strip() for name, r in zip("ab", racers, strict=True) if r.stdout}
            assert sorted(ends.values()) == ["lost", "won"]
            assert ends[storage.get(key, LIMIT).decode()] == "won"
    finally:
        for racer in racers:
            racer.communicate(timeout=60)
    assert [racer.returncode for racer in racers] == [0, 0]


def test_a_temporary_file_that_cannot_be_removed_is_only_reported(
    by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "unlink", os_call(errno.EACCES))
    with caplog.at_level(logging.WARNING, "ckptd.storage"):
        put(by_link)
    assert "stays behind" in caplog.text
    assert by_link.get(KEY, LIMIT) == b"x"


def test_threads_share_one_reader_across_a_stale_handle(
    by_link: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both threads get ESTALE for the same descriptor: one opens again, the other uses what it opened.
    put(by_link, KEY, b"0123456789")
    real, barrier = os.preadv, threading.Barrier(2)
    with by_link.reader(KEY) as reader:
        stale = reader._fds[0]

        def preadv(fd: int, views: list[memoryview], offset: int) -> int:
            if fd == stale:
                barrier.wait(60)
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return real(fd, views, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        buffers = [bytearray(5), bytearray(5)]
        threads = [threading.Thread(target=reader.read_into, args=(i * 5, memoryview(buffers[i]))) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert b"".join(buffers) == b"0123456789"
        assert len(reader._fds) == 2
