"""Storages that are broken on purpose, in this process: the sweep must notice each."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckptd.errors import AlreadyExists
from ckptd.storage import local, publish, unsure
from ckptd.storage.base import Buffer
from ckptd.storage.files import WRITE_FLAGS, flat, os_errors, write_all
from ckptd.storage.local import LocalStorage


def _unsynced() -> None:
    """Folders are never fsynced."""
    for module in (local, publish, unsure):
        setattr(module, "sync_folder", lambda folder, *names: None)  # noqa: B010 - mypy knows it in one of them


def _trusting() -> None:
    """A folder's later fsync is believed, whatever an earlier one said."""
    for module in (local, unsure):
        setattr(module, "unsure_names", lambda folder: [])  # noqa: B010


def _straight() -> None:
    """Objects are written under their final name."""

    def create(self: LocalStorage, key: str, chunks: Iterable[Buffer], size: int, *, marked: bool = True) -> None:
        path = os.path.join(self.root, key)
        with os_errors("write", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                fd = os.open(path, WRITE_FLAGS, 0o444)
            except FileExistsError as error:
                raise AlreadyExists(key) from error
            try:
                for chunk in chunks:
                    write_all(fd, flat(chunk))
                os.fsync(fd)
            finally:
                os.close(fd)

    LocalStorage._create = create  # type: ignore[method-assign]


def _unflushed() -> None:
    """Nothing is fsynced at all."""
    os.fsync = lambda fd: None


WEAKENED = {"unflushed": _unflushed, "unsynced": _unsynced, "trusting": _trusting, "straight": _straight}
