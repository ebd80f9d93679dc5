"""Storage URLs: what they say, opening one, and making a new root."""

from __future__ import annotations

import re

from fsspec.core import split_protocol

from ckptd.errors import Invalid
from ckptd.storage.base import Storage
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryStorage, shared

_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def open_storage(url: str) -> Storage:
    """The storage of a URL: `file:///absolute/path`, plain `/absolute/path`, or `memory://name`.

    `?publish=lock` after a path is for drives without hard links (see `LocalStorage`). Every process of a
    run opens its own. `NotInitialised` if the root has no marker, `Invalid` for a URL that cannot be one.
    """
    storage = _at(url)
    storage.check_root()
    return storage


def init_root(url: str) -> str:
    """Make a storage root ready: its folder, whose parent must exist, and its marker; the uuid.

    `ckptd init` calls it. On a root that has its marker it changes nothing, and racing callers get one uuid.
    """
    return _at(url).initialise()


def _at(url: str) -> LocalStorage | MemoryStorage:
    protocol, rest = split_protocol(url)
    path, mark, query = rest.partition("?")
    if protocol in (None, "file"):
        if mark and query not in ("publish=link", "publish=lock"):
            raise _refused(url, f"expected nothing or publish=lock after '?', found {query!r}")
        if not path.startswith("/"):
            raise _refused(url, f"expected an absolute path, found {path!r}")
        return LocalStorage(path, publish="lock" if query == "publish=lock" else "link")
    if protocol == "memory":
        if mark or not _MEMORY_NAME.fullmatch(path):
            raise _refused(url, f"expected memory:// and a name of {_MEMORY_NAME.pattern}, found {rest!r}")
        return shared(path)
    raise _refused(url, f"this version stores on file:// and memory://, found {protocol}://")


def _refused(url: str, reason: str) -> Invalid:
    return Invalid(
        f"storage URL {url!r} is not allowed: {reason}",
        do="Use file:///absolute/path of a folder that every rank sees.",
        field="url",
    )
