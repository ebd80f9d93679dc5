"""Where tests keep their runs, and what nobody may do there: other bytes under a key, a root that is gone.

All of it goes through the storage's own tools, so that one test says the same of a folder and of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.storage.s3_settings import S3Settings, read_settings
from tests.core.by_hand import overwrite

MAX_BYTES = 1 << 24  # no object of a test is longer


@dataclass(frozen=True)
class Stored:
    """An object on a storage, to be handled as nobody may."""

    storage: Storage
    key: str

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def read_bytes(self) -> bytes:
        return self.storage.get(self.key, MAX_BYTES)

    def write_bytes(self, data: bytes) -> None:
        overwrite(self.storage, self.key, data)

    def unlink(self) -> None:
        self.storage.delete(self.key)


def spoil(stored: Stored, *, at: int = -1, cut: bool = False) -> None:
    """Flip one byte of an object for good, or cut it there."""
    data = bytearray(stored.read_bytes())
    data[at] ^= 1
    stored.write_bytes(bytes(data[:at] if cut else data))


def everything(home: Storage | str) -> set[str]:
    """The keys of all objects at a storage or its URL, seen past its own methods; of a folder and a bucket also what
    lies beside the root, with its full name."""
    if isinstance(home, MemoryStorage):
        return set(home._objects)
    url = home if isinstance(home, str) else home.url
    if url.startswith("file://"):
        root = Path(url.removeprefix("file://"))
        names, inside = [str(path) for path in root.parent.rglob("*") if path.is_file()], f"{root}/"
    else:
        bucket = Bucket(url)
        names, inside = bucket.names(bucket.prefix.rpartition("/")[0]), f"{bucket.prefix}/"
    return {name.removeprefix(inside) for name in names}


@cache
def _client(settings: S3Settings) -> Any:
    """Making one takes longer than all that is asked of it."""
    return settings.new_client()


@contextmanager
def unmounted(url: str) -> Iterator[None]:
    """The root is gone for the time of the block: an empty folder where it was mounted, a bucket that was emptied.
    Nobody may write there meanwhile."""
    if url.startswith("file://"):
        root = Path(url.removeprefix("file://"))
        root.rename(root.with_name("elsewhere"))
        root.mkdir()
        yield
        assert list(root.iterdir()) == []
        root.rmdir()
        root.with_name("elsewhere").rename(root)
    else:
        bucket = Bucket(url)
        objects = {name: bucket.read(name) for name in bucket.names(bucket.prefix)}
        for name in objects:
            bucket.delete(name)
        yield
        assert bucket.names(bucket.prefix) == []
        for name, data in objects.items():
            bucket.write(name, data)


class Bucket:
    """What lies below an `s3://` URL, by full names and past the storage, which puts nothing where no marker is."""

    def __init__(self, url: str) -> None:
        settings = read_settings(url)
        self.prefix = settings.prefix
        self._name = settings.bucket
        self._client = _client(replace(settings, prefix=""))

    def names(self, folder: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=f"{folder}/")
        return [item["Key"] for page in pages for item in page.get("Contents") or ()]

    def read(self, name: str) -> bytes:
        data: bytes = self._client.get_object(Bucket=self._name, Key=name)["Body"].read()
        return data

    def write(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._name, Key=name, Body=data)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=self._name, Key=name)
