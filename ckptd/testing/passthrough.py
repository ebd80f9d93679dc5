"""A folder seen through a mount that remembers, and that fails on order: one host's view of a shared drive.

    with Mount(folder, tmp_path / "host-1") as one, Mount(folder, tmp_path / "host-2") as two:
        ...                                          # two hosts that do not see each other's changes for a minute
        two.order(Trouble("read", "safetensors", error="EIO"))

The kernel keeps names, attributes, and that a name does not exist, for `REMEMBERED_SECONDS`, as clients of network
drives do; listing a folder asks anew, as with them. Needs /dev/fuse, fusermount3 (Debian's fuse3) and mfusepy. The
mount is served by a process of its own: `python -m ckptd.testing.passthrough FOLDER MOUNTPOINT ORDERS`.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptd.errors import Unavailable
from ckptd.testing.owned import OwnedProcess

REMEMBERED_SECONDS = 60.0
DEADLINE_SECONDS = 20.0


@dataclass(frozen=True)
class Trouble:
    """What goes wrong with `operation` on paths that end with or contain `where`: it gives `error`, or its bytes are
    XORed with `mask`, or it does not return before the mount goes (`hang`), or (`readdir`) it keeps answering what it
    answered first (`stale`). `times` is how often, None for ever."""

    operation: str
    where: str
    error: str = ""
    mask: int = 0
    hang: bool = False
    stale: bool = False
    times: int | None = None


class Mount(OwnedProcess):
    """One host's mount of `folder` at `path`, which is created. Unmounted at the end of the block."""

    def __init__(self, folder: Path, path: Path) -> None:
        super().__init__()
        self.folder, self.path = folder, path
        self.log, self.orders = path.with_suffix(".log"), path.with_suffix(".json")

    def order(self, *troubles: Trouble) -> None:
        """From now on these happen, and no others."""
        new = self.orders.with_suffix(".new")
        new.write_text(json.dumps([asdict(trouble) for trouble in troubles]))
        new.rename(self.orders)

    def until_hanging(self) -> None:
        """Return once somebody waits for an answer that does not come."""
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while "hangs" not in self.log.read_text(errors="replace"):
            if time.monotonic() > give_up_at:
                raise AssertionError(f"nothing hung at {self.path} within {DEADLINE_SECONDS} s")
            time.sleep(0.01)

    def kill(self) -> None:
        """The host is gone, its mount with it. Whoever waits for an answer of it gets an error."""
        super().kill()
        done = subprocess.run(["fusermount3", "-u", "-z", "-q", str(self.path)], capture_output=True, timeout=10)
        if done.returncode and os.path.ismount(self.path):
            raise Unavailable(f"{self.path} could not be unmounted: {done.stderr.decode(errors='replace')}")

    def _launch(self) -> subprocess.Popen[bytes]:
        self.path.mkdir(exist_ok=True)
        self.order()
        command = [sys.executable, "-m", "ckptd.testing.passthrough"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, str(self.folder), str(self.path), str(self.orders)], stdout=log, stderr=log
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while not os.path.ismount(self.path):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise Unavailable(f"{self.path} was not mounted: {self.log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.01)


class _Orders:
    """The troubles in the file, and how often each has happened."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._read: tuple[int, int] = (0, 0)
        self._troubles: list[Trouble] = []
        self._left: list[int] = []
        self._listed: dict[str, list[str]] = {}

    def about(self, operation: str, path: str) -> Trouble | None:
        """The trouble this call is in; one with an error is raised."""
        with self._lock:
            status = os.stat(self.path)
            if self._read != (status.st_ino, status.st_mtime_ns):
                self._read = (status.st_ino, status.st_mtime_ns)
                self._troubles = [Trouble(**entry) for entry in json.loads(Path(self.path).read_text())]
                self._left = [
                    trouble.times if trouble.times is not None else sys.maxsize for trouble in self._troubles
                ]
            for index, trouble in enumerate(self._troubles):
                if trouble.operation == operation and trouble.where in path and self._left[index]:
                    self._left[index] -= 1
                    break
            else:
                return None
        if trouble.hang:
            os.write(2, f"{operation} of {path} hangs\n".encode())
            threading.Event().wait()  # until this process is killed
        if trouble.error:
            raise OSError(getattr(errno, trouble.error), os.strerror(getattr(errno, trouble.error)))
        return trouble

    def first(self, path: str, names: list[str]) -> list[str]:
        """What was listed here when the order was new."""
        with self._lock:
            return self._listed.setdefault(path, names)


class _Passthrough:
    """Every call as it is, on the folder below; the OSErrors it raises are the answers."""

    use_ns = True  # times in nanoseconds

    def __init__(self, folder: str, orders: _Orders) -> None:
        self._folder, self._orders = folder, orders

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._orders.about("getattr", path)
        status = os.lstat(self._folder + path)
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
        times = {name: getattr(status, f"{name}_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
        return {name: getattr(status, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        trouble = self._orders.about("readdir", path)
        names = [".", "..", *os.listdir(self._folder + path)]
        return self._orders.first(path, names) if trouble is not None and trouble.stale else names

    def open(self, path: str, flags: int) -> int:
        self._orders.about("open", path)
        return os.open(self._folder + path, flags & ~os.O_NOFOLLOW)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        self._orders.about("create", path)
        return os.open(self._folder + path, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        trouble = self._orders.about("read", path)
        data = bytearray(os.pread(fh, size, offset))
        if trouble is not None and data:
            data[len(data) // 2] ^= trouble.mask
        return bytes(data)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._orders.about("write", path)
        return os.pwrite(fh, data, offset)

    def flush(self, path: str, fh: int) -> int:
        self._orders.about("flush", path)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._orders.about("fsync", path)
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._orders.about("fsyncdir", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def link(self, target: str, source: str) -> None:
        self._orders.about("link", target)
        os.link(self._folder + source, self._folder + target)

    def rename(self, old: str, new: str) -> None:
        self._orders.about("rename", new)
        os.rename(self._folder + old, self._folder + new)

    def unlink(self, path: str) -> None:
        self._orders.about("unlink", path)
        os.unlink(self._folder + path)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._folder + path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._folder + path)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._folder + path, mode)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._folder + path, length)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._folder + path)
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}


def serve(folder: str, mountpoint: str, orders_path: str) -> None:
    """Serve the mount until it is unmounted or this process is killed."""
    import mfusepy

    class Served(_Passthrough, mfusepy.Operations):  # type: ignore[misc]
        pass

    remembered = {f"{what}_timeout": REMEMBERED_SECONDS for what in ("entry", "attr", "negative")}
    mfusepy.FUSE(Served(folder, _Orders(orders_path)), mountpoint, foreground=True, nothreads=False, **remembered)


if __name__ == "__main__":
    serve(*sys.argv[1:4])
