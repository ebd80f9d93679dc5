"""What a probe found, and the place in a storage where it writes.

A probe is a function from a `Bench` to findings. `judged` turns the errors it meets into findings, but for a storage
that merely does not answer now: that says nothing about its fitness and goes to the caller as `Unavailable`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ckptd import layout
from ckptd.errors import CkptdError, Unavailable, describe
from ckptd.storage.base import Storage

Verdict = Literal["ok", "warn", "unfit"]
Opener = Callable[[], Storage]

# What stays as it is until somebody changes permissions, the mount or the bucket's policy.
_LASTING_ERRNOS = {"EACCES", "EPERM", "EROFS", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK"}
_LASTING_STATUSES = {401, 403}


@dataclass(frozen=True)
class Finding:
    """`detail` is what was seen; `do` what to do about it, empty for `ok`."""

    name: str
    verdict: Verdict
    detail: str
    do: str = ""


def ok(name: str, detail: str) -> Finding:
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, do: str = "") -> Finding:
    return Finding(name, "warn", detail, do)


def unfit(name: str, detail: str, do: str = "") -> Finding:
    return Finding(name, "unfit", detail, do or "Use another storage: this one does not keep what ckptd relies on.")


class Bench:
    """Two instances of one storage, as two processes have them, and the keys that were written through them.

    `folder` is a name that nobody else uses. Callable from any thread.
    """

    def __init__(self, open_one: Opener, folder: str) -> None:
        self.open_one = open_one
        self.one, self.other = open_one(), open_one()
        self.folder = folder
        self._written: dict[str, None] = {}
        self._lock = threading.Lock()

    def key(self, name: str) -> str:
        """A key to write to. It is noted before it is written, because the outcome of a write may stay open."""
        key = layout.probe_key(self.folder, name)
        with self._lock:
            self._written[key] = None
        return key

    @property
    def written(self) -> list[str]:
        with self._lock:
            return list(self._written)

    def put(self, name: str, data: bytes) -> str:
        """Write a small object through the first instance; its key."""
        key = self.key(name)
        self.one.put(key, [data], len(data))
        return key

    def names(self, storage: Storage) -> list[str]:
        """What lies in the probe's folder."""
        return storage.list(layout.probe_key(self.folder, "x").rpartition("/")[0])


def lasting(error: CkptdError) -> bool:
    """Whether an error tells something about the storage that waiting does not change."""
    if not isinstance(error, Unavailable):
        return True
    return error.fields.get("errno") in _LASTING_ERRNOS or error.fields.get("status") in _LASTING_STATUSES


def judged(name: str, probe: Callable[[], Finding | Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of one probe. An error that does not belong there is a finding as well; `Unavailable` comes
    through if it may pass."""
    try:
        found = probe()
        if isinstance(found, Finding):
            yield found
        else:
            yield from found
    except CkptdError as error:
        if not lasting(error):
            raise
        yield unfit(name, describe(error), error.do)


def not_raised(kind: type[CkptdError], call: Callable[[], object]) -> str:
    """Empty if `call` raises an error of `kind`; else what it did instead."""
    try:
        call()
    except kind:
        return ""
    except CkptdError as error:
        if not lasting(error):
            raise
        return f"expected {kind.__name__}, found {describe(error)}"
    return f"expected {kind.__name__}, found no error"


def access(bench: Bench, name: str = "access") -> Iterator[Finding]:
    """Whether this identity may put, get, list and delete; each has a finding of its own. Where it may not put,
    reading is tried on what every storage has. `name` is one that nobody else uses in the bench's folder."""
    storage, data = bench.one, b"ckptd was here"
    key = bench.key(name)

    def put() -> Finding:
        storage.put(key, [data], len(data))
        return ok("put", "writes a small object")

    def get() -> Finding:
        found = storage.get(key, len(data))
        return ok("get", "reads it back") if found == data else unfit("get", f"found {found!r}, expected {data!r}")

    def listed() -> Finding:
        return ok("list", "lists it") if name in bench.names(storage) else unfit("list", "what was put is not listed")

    writable = next(judged("put", put))
    yield writable
    if writable.verdict == "ok":
        yield from judged("get", get)
        yield from judged("list", listed)
        yield from judged("delete", lambda: _deleted(storage, key))
    else:
        yield from judged("get", lambda: _done(storage.check_root(), ok("get", "reads the marker")))
        yield from judged("list", lambda: _done(storage.list(layout.RUNS), ok("list", "lists the runs")))


def _done(result: object, finding: Finding) -> Finding:
    """A finding for a call that only had to come back."""
    return finding


def _deleted(storage: Storage, key: str) -> Finding:
    """Only a warning: no commit and no start deletes anything."""
    try:
        storage.delete(key)
    except CkptdError as error:
        if not lasting(error):
            raise
        return warn("delete", describe(error), "Allow deletes if ckptd is to free space; it runs without.")
    return ok("delete", "deletes it")
