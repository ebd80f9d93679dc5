"""A host that remembers which file had a name: what it opens may be gone. Seen on NFS 4.2, and played here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.errors import NotFound, Unavailable
from ckptd.storage.local import LocalStorage

KEY = "runs/r/log/0000000000000001.json"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "root")
    storage.initialise()
    storage.put(KEY, [b"x"], 1)
    return storage


def stale(monkeypatch: pytest.MonkeyPatch, name: str, until: Callable[[], bool]) -> list[int]:
    """`os.open` or `os.fstat` of the record says ESTALE until then; the list grows with every time."""
    real, seen = getattr(os, name), list[int]()

    def call(what: str | int, *args: int, **kwargs: int) -> object:
        path = what if isinstance(what, str) else os.readlink(f"/proc/self/fd/{what}")
        if os.path.basename(KEY) in path and not until():
            seen.append(1)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(what, *args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return seen


@pytest.mark.parametrize("name", ["open", "fstat"])
def test_a_file_that_another_host_deleted_is_not_found(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The name is remembered, so it is opened without the server, and only then seen to be gone."""
    real = os.open
    Path(storage.root, KEY).rename(Path(storage.root, "elsewhere"))
    stale(monkeypatch, name, lambda: False)
    if name == "fstat":  # a remembered name: the open goes well, though no such name is there any more

        def remembered(path: str, *args: int, **kwargs: int) -> int:
            if path == os.path.basename(KEY):
                copy = Path(storage.root, f"copy-of-{path}")
                copy.write_bytes(b"x")
                return real(copy, os.O_RDONLY)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", remembered)
    with pytest.raises(NotFound):
        storage.get(KEY, 10)


@pytest.mark.parametrize("name", ["open", "fstat"])
def test_a_stale_memory_of_a_file_that_is_there_is_asked_for_again(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[int] = []
    seen = stale(monkeypatch, name, lambda: len(seen) == 1)
    assert storage.get(KEY, 10) == b"x"
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["open", "fstat"])
def test_T6_a_listed_name_that_stays_stale_is_no_absence(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stale(monkeypatch, name, lambda: False)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="ESTALE"):
        storage.get(KEY, 10)
    assert len(os.listdir("/proc/self/fd")) == before
