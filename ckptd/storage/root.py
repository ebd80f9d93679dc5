"""Storage URLs: what they say, opening one, and making a new root."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fsspec.core import split_protocol

from ckptd.errors import Invalid
from ckptd.storage.base import Storage
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryStorage, shared

if TYPE_CHECKING:
    from ckptd.storage.fsspec_store import FsspecStorage
    from ckptd.storage.s3 import S3Storage

_OTHER_STORES = ("gs", "abfs", "az")
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def open_storage(url: str) -> Storage:
    """The storage of a URL: `file:///absolute/path`, plain `/absolute/path`, `s3://bucket/prefix`,
    `gs://bucket/prefix`, `abfs://container/prefix` (or `az://`), or `memory://name`.

    `?publish=lock` after a path is for drives without hard links (see `LocalStorage`). Every process of a
    run opens its own. `NotInitialised` if the root has no marker, `Invalid` for a URL that cannot be one.
    """
    storage = _at(url)
    storage.check_root()
    return storage


def init_root(url: str) -> str:
    """Make a storage root ready: its folder, whose parent must exist, or its prefix, whose bucket must, and its
    marker; the uuid.

    `ckptd init` calls it. On a root that has its marker it changes nothing, and racing callers get one uuid.
    """
    return _at(url).initialise()


def refill_reserve(storage: Storage) -> None:
    """Keep a little space for records where a full storage could stop them: `ckptd init`, retention and housekeeping
    call it. Raises what `check_root` does."""
    if isinstance(storage, LocalStorage):
        storage.refill_reserve()


def _at(url: str) -> LocalStorage | MemoryStorage | S3Storage | FsspecStorage:
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
    if protocol == "s3":
        return _s3(url)
    if protocol in _OTHER_STORES:
        from ckptd.storage.fsspec_places import open_place  # as for S3

        return open_place(url)
    raise _refused(
        url,
        f"found {protocol}://, and this version stores on file://, s3://, gs://, abfs://, az:// and memory:// only: "
        "of other stores it is not known whether they create an object only where none is",
    )


def _s3(url: str) -> S3Storage:
    try:
        from ckptd.storage.s3 import S3Storage  # only who uses S3 needs its libraries
    except ModuleNotFoundError as error:
        if (error.name or "ckptd").startswith("ckptd"):
            raise
        raise Invalid(
            f"storage URL {url!r} needs the extra 's3', which is not installed: there is no module {error.name}",
            do="Run: pip install 'ckptd[s3]'",
            field="url",
        ) from error
    return S3Storage(url)


def _refused(url: str, reason: str) -> Invalid:
    return Invalid(
        f"storage URL {url!r} is not allowed: {reason}",
        do="Use file:///absolute/path of a folder that every rank sees, or s3://bucket/prefix.",
        field="url",
    )
