"""A drive whose power can be cut: what was not flushed is gone, and exactly that.

    with CuttableDrive(folder, "ext4") as drive:
        ...                                    # write below drive.path
        image = drive.cut_copy()   # the medium as a power cut at this moment would leave it
        with mounted(image, "ext4", folder / "after") as path:
            ...                                # the journal was replayed: look
        drive.cut()                            # and in earnest: the process that holds what was not flushed dies

nbdkit keeps all writes in its memory until the file system asks for a flush; nbdfuse shows it as a file, and the
kernel mounts that file. Needs root, and Debian's nbdkit, nbdfuse and xfsprogs. Run it under `alone`, so that no mount
and no process outlives the program, however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from ckptd.errors import Unavailable

FileSystem = Literal["ext4", "xfs"]
SIZES: dict[FileSystem, int] = {"ext4": 64 << 20, "xfs": 320 << 20}  # xfs refuses smaller ones
MAKE: dict[FileSystem, tuple[str, ...]] = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
}
OPTIONS: dict[FileSystem, str] = {"ext4": "loop", "xfs": "loop,nouuid"}  # a copy has the uuid of its original
DEADLINE_SECONDS = 30.0


def alone(module: str, *arguments: str) -> list[str]:
    """The command that runs a Python module in namespaces of its own: its mounts and processes end with it."""
    return [
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *(sys.executable, "-m", module, *arguments),
    ]


def need(*programs: str) -> None:
    """`Unavailable` unless this process is root and all programs are installed."""
    if os.geteuid() != 0:
        raise Unavailable("only root may mount a drive", do="Run as root.")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise Unavailable(
            f"not installed: {', '.join(missing)}",
            do="Install: apt-get install nbdkit nbdfuse xfsprogs fuse3 e2fsprogs.",
        )


def run(*command: str) -> None:
    """`Unavailable` with what it said, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def mounted(image: Path, kind: FileSystem, path: Path) -> Iterator[Path]:
    """An image as a file system, unmounted at the end."""
    path.mkdir(exist_ok=True)
    run("mount", "-t", kind, "-o", OPTIONS[kind], str(image), str(path))
    try:
        yield path
    finally:
        run("umount", str(path))


class CuttableDrive:
    """A new, empty file system at `path`, in the folder `folder`."""

    def __init__(self, folder: Path, kind: FileSystem) -> None:
        self.folder, self.kind = folder, kind
        self.image, self.path = folder / "medium.img", folder / "drive"
        self._copies = 0
        self._nbdkit: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        need("nbdkit", "nbdfuse", MAKE[self.kind][0])
        with ExitStack() as stack:
            with self.image.open("wb") as file:
                file.truncate(SIZES[self.kind])
            self._nbdkit = self._start(stack)
            run(*MAKE[self.kind], str(self._device))
            self.path.mkdir()
            run("mount", "-t", self.kind, "-o", "loop", str(self._device), str(self.path))
            stack.callback(subprocess.run, ["umount", "--lazy", str(self.path)], check=False, capture_output=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def _device(self) -> Path:
        return self.folder / "nbd" / "device"

    def cut_copy(self) -> Path:
        """A copy of the medium as it is now. Nothing may be writing to the drive meanwhile."""
        self._copies += 1
        copy = self.folder / f"cut-{self._copies}.img"
        run("cp", "--sparse=always", str(self.image), str(copy))
        return copy

    def cut(self) -> Path:
        """The power goes. The medium, as it is from now on."""
        assert self._nbdkit is not None
        self._nbdkit.kill()
        self._nbdkit.wait()
        self._stack.close()
        return self.image

    def _start(self, stack: ExitStack) -> subprocess.Popen[bytes]:
        socket = self.folder / "nbd.sock"
        nbdkit = self._process(
            stack,
            "nbdkit.log",
            *("nbdkit", "--foreground", "--exit-with-parent", "--unix", str(socket), "--filter=cache"),
            *("file", str(self.image), "cache=writeback", "cache-on-read=false", "cache-max-size=1G"),
        )
        self._until(socket, nbdkit)
        (self.folder / "nbd").mkdir()
        stack.callback(
            subprocess.run, ["umount", "--lazy", str(self.folder / "nbd")], check=False, capture_output=True
        )
        self._until(
            self._device,
            self._process(stack, "nbdfuse.log", "nbdfuse", str(self._device), f"nbd+unix:///?socket={socket}"),
        )
        return nbdkit

    def _process(self, stack: ExitStack, log: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        stack.callback(_end, process)
        return process

    def _until(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while not path.exists():
            if process.poll() is not None or time.monotonic() > give_up_at:
                logs = [file.read_text(errors="replace")[-500:] for file in self.folder.glob("*.log")]
                raise Unavailable(f"{path.name} did not come: {' '.join(logs)}")
            time.sleep(0.01)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
