"""Which stores beside S3 a URL may name, and the file system for each.

Only those whose create-if-absent the store itself decides, in one request, and whose library hands it on. With
fsspec's own fallback others look first and then write: two writers would both win.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ckptd.errors import Invalid
from ckptd.storage.fsspec_store import DEADLINE_SECONDS, FsspecStorage
from ckptd.storage.keys import check_key

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._=+@/-]*")


@dataclass(frozen=True)
class _Place:
    extra: str
    module: str
    kind: str  # the class of its file system

    def connect(self) -> Any:
        """A file system of this process. It finds endpoint and credentials in the environment."""
        kind = getattr(import_module(self.module), self.kind)
        return kind(use_listings_cache=False, skip_instance_cache=True)


# gcsfs.core: what the package itself gives asks for each bucket's kind first, over gRPC.
_GOOGLE, _AZURE = _Place("gcs", "gcsfs.core", "GCSFileSystem"), _Place("azure", "adlfs", "AzureBlobFileSystem")
PLACES = {"gs": _GOOGLE, "abfs": _AZURE, "az": _AZURE}


def open_place(url: str) -> FsspecStorage:
    """The storage of `gs://bucket/prefix`, `abfs://container/prefix` or `az://container/prefix`, with
    `?deadline_seconds=` for each request. Endpoint and credentials come from the environment, as gcsfs and adlfs
    read it. `Invalid` for a URL that cannot be one, or without the extra. `ckptd.storage.root` calls it."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _refused(url, str(error)) from error
    place = PLACES[parts.scheme]
    prefix = parts.path.strip("/")
    if not _BUCKET.fullmatch(parts.netloc):
        raise _refused(url, f"expected the name of a bucket or container, found {parts.netloc!r}")
    if parts.fragment or not _PREFIX.fullmatch(prefix):
        raise _refused(url, f"expected a prefix of {_PREFIX.pattern}, found {parts.path!r}")
    try:
        check_key(prefix or "none")
    except Invalid as error:
        raise _refused(url, f"its prefix: {error.message}") from error
    seconds = _deadline(url, parts.query)
    _check_installed(url, place)
    root = f"{parts.netloc}/{prefix}".rstrip("/")
    query = f"?deadline_seconds={seconds:g}" if seconds != DEADLINE_SECONDS else ""
    return FsspecStorage(f"{parts.scheme}://{root}{query}", root, place.connect, deadline_seconds=seconds)


def _check_installed(url: str, place: _Place) -> None:
    try:
        import_module(place.module)
    except ImportError as error:
        raise Invalid(
            f"storage URL {url!r} needs the extra {place.extra!r}, which is not installed: {error}",
            do=f"Run: pip install 'ckptd[{place.extra}]'",
            field="url",
        ) from error


def _deadline(url: str, query: str) -> float:
    found = dict(parse_qsl(query, keep_blank_values=True))
    text = found.pop("deadline_seconds", str(DEADLINE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if found or not 0.1 <= seconds <= 3600:
        raise _refused(url, f"expected nothing or deadline_seconds=0.1 to 3600 after '?', found {query!r}")
    return seconds


def _refused(url: str, reason: str) -> Invalid:
    return Invalid(
        f"storage URL {url!r} is not allowed: {reason}",
        do="Use gs://bucket/prefix or abfs://container/prefix; credentials come from the environment.",
        field="url",
    )
