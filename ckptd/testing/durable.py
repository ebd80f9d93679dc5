"""What a power cut could take: a model of names and bytes that are on the medium, fed with system calls.

    lost = unsure(outcome.calls, root)        # {} if everything made below root was durable at the end

It believes as little as POSIX lets it: bytes are durable once an fsync of their file succeeded, names once an fsync
of their folder did. After an fsync that failed no later one makes the same bytes or the same name durable, because
the kernel may call clean what it could not write; only bytes written anew and names made anew count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptd.testing.syscalls import Call

VOLATILE, DURABLE, DOUBTFUL = "not fsynced", "durable", "its fsync failed, and a later one proves nothing"
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FD = re.compile(r"(?:\d+|AT_FDCWD)<([^>]*)>")


@dataclass
class _Bytes:
    state: str = VOLATILE


@dataclass
class _Name:
    bytes: _Bytes
    state: str = VOLATILE


@dataclass
class Medium:
    """Names made below `root` since the first call, and how safe each is."""

    root: str
    names: dict[str, _Name] = field(default_factory=dict)

    def take(self, call: Call) -> None:
        """A call that failed changes nothing, unless it is an fsync."""
        if call.name in ("fsync", "fdatasync"):
            self._fsync(_FD.findall(call.args)[0].removesuffix(" (deleted)"), call.ok)
        elif call.ok:
            self._change(call)

    def unsure(self) -> dict[str, str]:
        """The names outside tmp/ that are not safe, relative to the root, and why."""
        found = {}
        for path, name in sorted(self.names.items()):
            below = os.path.relpath(path, self.root)
            if below.startswith("..") or "tmp" in below.split("/"):
                continue
            if name.bytes.state is not DURABLE:
                found[below] = f"its bytes: {name.bytes.state}"
            if name.state is not DURABLE:
                found[below] = f"its name: {name.state}"
        return found

    def _change(self, call: Call) -> None:
        folders, strings = _FD.findall(call.args), _STRING.findall(call.args)
        match call.name:
            case "openat" if call.creates:
                self.names[_at(folders[0], strings[0])] = _Name(_Bytes())
            case "write" | "pwrite64" | "fallocate" | "ftruncate":
                written = self.names.get(folders[0])
                if written is not None:
                    written.bytes.state = VOLATILE
            case "mkdirat":
                self.names[_at(folders[0], strings[0])] = _Name(_Bytes(DURABLE))
            case "linkat":
                source, target = (_at(folder, name) for folder, name in zip(folders, strings, strict=True))
                self.names[target] = _Name(self._bytes(source))
            case "renameat" | "renameat2":
                source, target = (_at(folder, name) for folder, name in zip(folders, strings, strict=True))
                other = self._bytes(target) if "RENAME_EXCHANGE" in call.args else None
                self.names[target] = _Name(self._bytes(source))
                self.names.pop(source, None)
                if other is not None:
                    self.names[source] = _Name(other)
            case "unlinkat":
                self.names.pop(_at(folders[0], strings[0]), None)
            case "mkdir" | "unlink" | "rename" | "rmdir":
                raise AssertionError(f"a path from the top, which this model does not follow: {call}")

    def _bytes(self, path: str) -> _Bytes:
        """What was there before the first call is taken as safe."""
        return self.names[path].bytes if path in self.names else _Bytes(DURABLE)

    def _fsync(self, path: str, ok: bool) -> None:
        inside = [name for known, name in self.names.items() if os.path.dirname(known) == path]
        things: list[_Name | _Bytes] = [*inside]
        if path in self.names and not inside:
            things.append(self.names[path].bytes)
        for thing in things:
            if thing.state is VOLATILE:
                thing.state = DURABLE if ok else DOUBTFUL


def unsure(calls: Iterable[Call], root: str) -> dict[str, str]:
    """What of the names made by `calls` could be gone after a power cut at their end."""
    medium = Medium(root)
    for call in calls:
        medium.take(call)
    return medium.unsure()


def _at(folder: str, name: str) -> str:
    return os.path.normpath(os.path.join(folder, name))
