"""A spool on a disk of 1 MiB that is full, while the storage is away. Run as a program, in a mount namespace:

unshare -Urm python -m tests.client.full_spool FOLDER
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptd.errors import Unavailable
from ckptd.storage import init_root
from ckptd_client import patience
from tests.client.ranks import DEADLINE_SECONDS, Drive, Job


def main(folder: Path, patched: pytest.MonkeyPatch) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    patched.setattr(patience, "FIRST_SECONDS", 0.02)
    local, url = folder / "local", f"file://{folder}/root"
    for place in (local, folder / "root"):
        place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(local)], check=True)
    init_root(url)
    drive = Drive(url, patched)
    small, big = {"w": torch.ones(1000)}, {"w": torch.ones(1 << 20)}
    with Job(drive).client(spool=local) as client:
        client.restore(dict(small))
        away = drive.seen_by(0).fail_before("put", times=None)
        first = client.save(small, step=1)
        second = client.save(big, step=2)
        third = client.save(small, step=3)
        with pytest.raises(Unavailable, match="No space left on device") as caught:
            second.wait(DEADLINE_SECONDS)
        assert isinstance(caught.value.__cause__, OSError)
        client._saver.make_room(DEADLINE_SECONDS)
        assert (first.status, third.status) == ("queued", "queued")
        assert len(os.listdir(local)) == 2  # nothing is left of the one that did not fit
        assert client.counts == {"queued": 2, "durable": 0, "failed": 1, "superseded": 0, "skipped": 0, "spooled": 2}
        away.heal()
        client.wait()
        assert drive.steps("en-it") == [1, 3]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        main(Path(sys.argv[1]), patched)
