"""Kill a process at a chosen system call, or let that call fail: strace does it, on a child of one's own.

    outcome = traced(prepare)                             # what it calls, in order
    outcome = traced(prepare, Kill("linkat", 1))          # dies when it comes to its first linkat
    outcome = traced(prepare, Fail("fsync", 2, "EIO"))    # its second fsync does nothing and says EIO

`prepare` runs in the child before strace looks, and returns the work that strace sees. The child is forked, so call
this from a process without other threads. A call is addressed by its name and how many of that name the same thread
made before, counted from 1.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.errors import Unavailable

CHANGING = (
    *(
        "openat",
        "write",
        "pwrite64",
        "fallocate",
        "fsync",
        "fdatasync",
        "linkat",
        "unlink",
        "unlinkat",
        "rename",
        "renameat",
    ),
    *("renameat2", "mkdir", "mkdirat", "rmdir", "ftruncate", "close"),
)
DEADLINE_SECONDS = 60.0
_PR_SET_PTRACER, _ANY = 0x59616D61, -1
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (.*)|(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (.*)")

Work = Callable[[], object]


@dataclass(frozen=True)
class Kill:
    """SIGKILL on entry of the `nth` call of this name: it is not carried out any more."""

    name: str
    nth: int

    @property
    def order(self) -> str:
        return f"inject={self.name}:signal=SIGKILL:when={self.nth}"


@dataclass(frozen=True)
class Fail:
    """The `nth` call of this name is not carried out and gives `error`; `nth=0` lets every one fail."""

    name: str
    nth: int
    error: str

    @property
    def order(self) -> str:
        return f"inject={self.name}:error={self.error}" + (f":when={self.nth}" if self.nth else "")


@dataclass(frozen=True)
class Call:
    """One system call of the child. `result` is what strace printed behind the equals sign, empty if it never
    returned."""

    thread: int
    name: str
    nth: int
    args: str
    result: str

    @property
    def ok(self) -> bool:
        return bool(self.result) and not self.result.startswith(("-1", "?"))

    @property
    def injected(self) -> bool:
        return "INJECTED" in self.result

    @property
    def creates(self) -> bool:
        return self.name == "openat" and "O_CREAT" in self.args

    def paths(self) -> list[str]:
        """The names it works on: a descriptor's path, or the name given below one."""
        found = []
        for folder, below, name in re.findall(r'\d+<([^>]*)>(, "((?:[^"\\]|\\.)*)")?', self.args):
            found.append(f"{folder}/{name}" if below and self.name != "write" else folder)
        return found


@dataclass(frozen=True)
class Outcome:
    """`answers` is what the work returned, None if the child died before it could say so."""

    answer: Any
    killed: bool
    calls: list[Call]

    @property
    def injected(self) -> list[Call]:
        return [call for call in self.calls if call.injected]


def traced(prepare: Callable[[], Work], order: Kill | Fail | None = None) -> Outcome:
    """Run the work in a child under strace. Its answer must be JSON; an exception of it is raised here as
    AssertionError with its text. `Unavailable` without strace."""
    ready, go, told = os.pipe(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _child(prepare, ready[1], go[0], told[1])
    for fd in (ready[1], go[0], told[1]):
        os.close(fd)
    status: int | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="ckptd-strace-") as folder:
            log = Path(folder) / "calls"
            if _line(ready[0]) == b"ready\n":
                with _strace(child, log, order) as strace:
                    os.write(go[1], b"g")
                    raw = _line(told[0])
                    status = os.waitpid(child, 0)[1]
                    strace.wait(DEADLINE_SECONDS)
            else:
                raw, status = _line(told[0]), os.waitpid(child, 0)[1]
            calls = list(_parse(log.read_text(errors="replace").splitlines() if log.exists() else []))
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for fd in (ready[0], go[1], told[0]):
            os.close(fd)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    found = json.loads(raw) if raw.endswith(b"\n") else {}
    if "failed" in found or (not found and not killed):
        raise AssertionError(f"the traced work failed: {found.get('failed', 'no answer')}")
    return Outcome(found.get("answer"), killed, calls)


def _child(prepare: Callable[[], Work], ready: int, go: int, told: int) -> None:
    """Never returns. Says `ready`, waits, works, tells."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # where only a parent may trace
        work = prepare()
        os.write(ready, b"ready\n")
        os.read(go, 1)
        answer: dict[str, Any] = {"answer": work()}
    except BaseException as error:  # noqa: BLE001 - handed to the parent
        answer = {"failed": f"{type(error).__name__}: {error}"}
    os.write(told, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _strace(child: int, log: Path, order: Kill | Fail | None) -> subprocess.Popen[bytes]:
    """strace, already attached to all threads of `child`."""
    options = ["-f", "-y", "-s", "300", "-o", str(log), "-e", f"trace={','.join(CHANGING)}"]
    if order is not None:
        options += ["-e", order.order]
    try:
        process = subprocess.Popen(["strace", *options, "-p", str(child)], stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise Unavailable("strace is not installed", do="Install it: apt-get install strace.") from error
    assert process.stderr is not None
    said = process.stderr.readline()
    if b"attached" not in said:
        process.kill()
        process.wait()
        raise Unavailable(
            f"strace could not attach: {said.decode(errors='replace').strip()}",
            do="Run as root, or allow tracing: sysctl kernel.yama.ptrace_scope=0.",
        )
    return process


def _line(fd: int) -> bytes:
    """One line, or what there was when the other end was closed."""
    data, give_up_at = b"", time.monotonic() + DEADLINE_SECONDS
    while not data.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, give_up_at - time.monotonic()))[0]:
            raise AssertionError(f"the traced child said nothing for {DEADLINE_SECONDS} s")
        piece = os.read(fd, 65536)
        if not piece:
            break
        data += piece
    return data


def _parse(lines: list[str]) -> Iterator[Call]:
    """The calls in the order in which they began; one that another thread interrupted is put together again."""
    counts: Counter[tuple[int, str]] = Counter()
    results: dict[tuple[int, str], list[str]] = {}
    for line in lines:
        if match := _RESUMED.match(line):
            results.setdefault((int(match[1]), match[2]), []).append(match[4])
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        whole = match[1] is not None
        thread, name, args = int(match[1] or match[5]), match[2] or match[6], match[3] if whole else match[7]
        counts[thread, name] += 1
        pending = results.get((thread, name), [])
        result = match[4] if whole else (pending.pop(0) if pending else "")
        yield Call(thread, name, counts[thread, name], args, result)
