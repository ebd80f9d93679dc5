"""Rules of the client that only real processes can show: what happens when one of them leaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.client.ranks import Drive, Job

SCRIPT = Path(__file__).with_name("leaving_rank.py")
PROCESS_SECONDS = 120.0


@pytest.fixture
def store() -> TCPStore:
    """The store of the process group, in this process, as an agent of torchrun holds it."""
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def leave(drive: Drive, store: TCPStore, ways: Sequence[str]) -> list[str]:
    """Start a rank for each way of leaving; what they said, once all have ended well."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(len(ways)), str(store.port), drive.url, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, how in enumerate(ways)
    ]
    said = []
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=PROCESS_SECONDS)
            assert rank.returncode == 0, errors
            said.append(out)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return said


def test_W8_no_collective_is_called_and_ranks_that_leave_at_once_still_leave_their_part(
    drive: Drive, store: TCPStore
) -> None:
    said = leave(drive, store, ["closes", "ends", "ends"])
    assert said == ["rank 0 queued\nrank 0 durable\n", "rank 1 queued\n", "rank 2 queued\n"]
    assert drive.steps() == [1]
    assert len(drive.objects(1)) == 3
    assert drive.find("tmp/*") == []
    with Job(drive).client() as client:
        assert client.restore({"model": torch.nn.Linear(200, 200)}) == 1


def test_W8_a_rank_that_leaves_does_not_wait_for_one_that_is_gone(drive: Drive, store: TCPStore) -> None:
    """Its deadline is half an hour; it ends when its part is written, though nobody will commit it."""
    assert leave(drive, store, ["vanishes", "ends"]) == ["", "rank 1 queued\n"]
    (part,) = drive.find("manifests/*/part-*.json")
    assert part.name.startswith("part-1-")
    assert drive.ledger().checkpoints("en-it") == []


def test_rank_0_that_leaves_at_once_finishes_the_save(drive: Drive, store: TCPStore) -> None:
    assert leave(drive, store, ["ends"]) == ["rank 0 queued\n"]
    assert drive.steps() == [1]
