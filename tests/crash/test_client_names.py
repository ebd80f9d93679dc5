"""What the client does when a folder of its save could not be fsynced: nothing unsure is committed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from ckptd.storage import init_root, open_storage, publish, unsure
from ckptd.testing.auditor import Auditor
from ckptd_client import CheckpointClient


@pytest.mark.parametrize("nth", [1, 2])  # of the save's folder: for the part manifest, and for the manifest
def test_T7_a_manifest_whose_name_is_unsure_is_made_sure_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    url = f"file://{tmp_path}/root"
    init_root(url)
    real_fsync, real_exchange = os.fsync, unsure.exchange
    seen: list[str] = []
    anew: list[str] = []

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.rpartition("/")[0].endswith("/manifests"):
            seen.append(path)
            if len(seen) == nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_fsync(fd)

    def exchange(one: int, name: str, other: int, other_name: str) -> None:
        anew.append(other_name.partition("-")[0])
        real_exchange(one, name, other, other_name)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(publish, "exchange", exchange)
    with CheckpointClient(url, run="r") as client:
        client.restore({"model": torch.nn.Linear(2, 2)})
        client.save({"model": torch.nn.Linear(2, 2)}, step=1, wait=True)
    assert anew == [["part", "manifest"][nth - 1]]
    Auditor(open_storage(url), "r").assert_clean(acknowledged=[1])
