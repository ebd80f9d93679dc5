"""Ranks of one node read each chunk once: equal results, and nobody hangs when one of them dies, stops or errs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import CkptdError, Corrupt, Unavailable, Unreachable
from ckptd_client import CheckpointClient, payload, ring, sharing
from ckptd_client.ring import GaveUp, Ring
from ckptd_client.sharing import Sharing, group_of
from tests.client.ranks import DEADLINE_SECONDS, Drive, Job, on_threads, results
from tests.homes import spoil

WORLD = 3
DATA = 40_000
CHUNK_BYTES = 64 * 1024


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small state in many chunks goes through a ring of two slots, as from a drive of which nothing is kept."""
    monkeypatch.setattr(sharing, "SHARE_BYTES", 0)
    monkeypatch.setattr(sharing, "_kept_for_all", lambda storage, chunks: False)
    monkeypatch.setattr(ring, "RING_BYTES", 2 * CHUNK_BYTES)
    defaults = payload.write.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "chunk_bytes", CHUNK_BYTES)


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.rand(200_000, generator=generator),
        "turned": torch.rand((50, 40), generator=generator).t(),
        "small": [torch.rand(3, generator=generator) for _ in range(50)],
        "step": seed,
    }


def save(drive: Drive, steps: list[int], world: int = 1) -> None:
    def life(client: CheckpointClient) -> None:
        client.restore(state(0))
        for step in steps:
            client.save(state(step), step=step, per_rank={"mine": torch.full((4,), client.rank)}, wait=True)

    Job(drive, world).run(life)


def restored(client: CheckpointClient) -> tuple[int, dict[str, Any], dict[str, Any]]:
    live = state(99)
    own: dict[str, Any] = {"mine": torch.zeros(4, dtype=torch.int64)}
    return client.restore(live, per_rank=own), live, own


def same(live: dict[str, Any], step: int) -> bool:
    def tensors(of: dict[str, Any]) -> list[torch.Tensor]:
        return [of["w"], of["turned"], *of["small"]]

    pairs = zip(tensors(live), tensors(state(step)), strict=True)
    return live["step"] == step and all(torch.equal(a, b) for a, b in pairs)


def payload_reads(drive: Drive, world: int) -> int:
    """How many times any rank read from payload."""
    history = [call for rank in range(world) for call in drive.seen_by(rank).history]
    return sum(operation == "read" and "/0-" in key for operation, key in history)


def test_every_chunk_leaves_the_storage_once(drive: Drive, small: None) -> None:
    save(drive, [5], world=WORLD)
    found = Job(drive, WORLD).run(restored)
    assert [step for step, _, _ in found] == [5] * WORLD
    assert all(same(live, 5) for _, live, _ in found)
    assert [own["mine"].tolist() for _, _, own in found] == [[rank] * 4 for rank in range(WORLD)]
    ledger = drive.ledger()
    (ref, *_) = ledger.manifest(ledger.checkpoint_at("en-it", 5).manifest).objects()
    headers = WORLD  # each rank reads the header
    assert payload_reads(drive, WORLD) == len(ref.chunks) + headers


def test_damage_sends_all_to_the_answer_before(drive: Drive, small: None) -> None:
    save(drive, [5, 10])
    path = drive.objects(10)[0]
    known = threading.Barrier(WORLD, action=lambda: spoil(path, at=DATA))

    def life(client: CheckpointClient) -> tuple[int, dict[str, Any], dict[str, Any]]:
        client.latest()
        known.wait(DEADLINE_SECONDS)
        return restored(client)

    found = Job(drive, WORLD).run(life)
    assert [step for step, _, _ in found] == [5] * WORLD
    assert all(same(live, 5) for _, live, _ in found)
    assert drive.kinds().count("checkpoint-quarantined") == 1


def test_damage_that_one_rank_reads_alone_stops_all_and_quarantines_nothing(drive: Drive, small: None) -> None:
    save(drive, [5])
    fault = drive.seen_by(1).flip(".safetensors", at=CHUNK_BYTES + 17)
    errors = Job(drive, WORLD).outcomes(restored)
    assert fault.fired
    assert all(isinstance(error, Corrupt) for error in errors)
    assert drive.kinds().count("checkpoint-quarantined") == 0


def test_an_outage_of_one_rank_is_waited_out_by_all(drive: Drive, small: None, quick: None) -> None:
    save(drive, [5])
    faults = [drive.seen_by(1).fail_before("read", ".safetensors", nth=2, times=3)]
    faults += [drive.seen_by(2).fail_before("reader", ".safetensors", nth=4)]
    found = Job(drive, WORLD).run(restored)
    assert all(same(live, 5) for _, live, _ in found)
    assert [fault.fired for fault in faults] == [3, 1]


def test_an_outage_that_stays_is_unreachable_on_all(drive: Drive, small: None, impatient: None) -> None:
    save(drive, [5])
    drive.seen_by(1).fail_before("read", ".safetensors", nth=2, times=None, error=Unavailable("planned: gone"))
    errors = Job(drive, WORLD).outcomes(restored)
    assert all(isinstance(error, Unreachable) for error in errors)
    assert "planned: gone" in str(errors[0])


def test_a_slow_rank_is_waited_for(drive: Drive, small: None) -> None:
    save(drive, [5])
    slow = drive.seen_by(1).pause("read", ".safetensors", nth=3)
    job, seen = Job(drive, WORLD), []

    def later() -> tuple[int, dict[str, Any], dict[str, Any]]:
        assert slow.arrived.wait(DEADLINE_SECONDS)
        seen.append(drive.kinds()[-1])
        slow.resume.set()
        return 5, state(5), {}

    def life(rank: int) -> Any:
        def run() -> Any:
            with job.client(rank) as client:
                return restored(client)

        return run

    found = results(on_threads([*(life(rank) for rank in range(WORLD)), later]))
    assert all(same(live, 5) for _, live, _ in found)
    assert seen == ["generation-started"]


def test_a_rank_that_never_gets_its_bytes_ends_all_at_the_deadline(drive: Drive, small: None) -> None:
    save(drive, [5])
    hung = drive.seen_by(1).pause("read", ".safetensors", nth=3)
    began = time.monotonic()
    errors = Job(drive, WORLD).outcomes(restored, start_deadline_seconds=2.0)
    hung.resume.set()
    assert time.monotonic() - began < 30
    assert all(isinstance(error, Unreachable) for error in errors)
    assert any("not read in time: runs/" in str(error) for error in errors)


def test_a_rank_that_cannot_open_the_memory_makes_all_read_apart(
    drive: Drive, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(drive, [5])
    refused: list[int] = []

    def no(offer: dict[str, Any]) -> int:
        refused.append(offer["fd"])
        raise PermissionError("planned")

    monkeypatch.setattr(sharing, "_open", no)
    found = Job(drive, WORLD).run(restored)
    assert all(same(live, 5) for _, live, _ in found)
    assert len(refused) == WORLD - 1


def test_the_kernel_shares_what_lies_on_a_local_drive(drive: Drive) -> None:
    save(drive, [5])
    local = drive.url.startswith("file://")
    with drive.storage.reader(drive.objects(5)[0].key) as reader:
        assert reader.paged() == local


def test_who_reads_together() -> None:
    def offer(**other: Any) -> dict[str, Any]:
        return {"node": "a", "chunks": "x", "chunk_bytes": 1, "paged": False, "pid": 1, **other}

    offers = [offer(), offer(node="b"), offer(paged=True), None, offer(node="b", chunks="y"), offer(node="b")]
    assert [group_of(rank, offers) for rank in range(6)] == [[0, 2], [1, 5], [0, 2], [], [4], [1, 5]]
    assert group_of(0, [offer(paged=True), offer(paged=True)]) == []


def test_little_state_is_read_apart(drive: Drive) -> None:
    save(drive, [5])
    assert Sharing(0, drive.storage, [], []).offer(time.monotonic() + 5) is None
    found = Job(drive, 2).run(restored)
    assert all(same(live, 5) for _, live, _ in found)


PEER = """
import sys
from ckptd_client.ring import Ring
fd = int(sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
"""


def test_a_rank_killed_in_mid_read_is_noticed_and_its_memory_vanishes(tmp_path: Path) -> None:
    fd = os.memfd_create("ckptd-test")
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, str(fd)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]
    )
    try:
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"here\n"
        mine = Ring(fd, [(0, os.getpid()), (1, peer.pid)], 0, 4096, 8)
        mine.filled()
        slot, _ = mine.chunk(0, lambda: None)
        assert slot.nbytes == 4096
        waiting = threading.Event()
        found: list[BaseException] = []

        def wait() -> None:
            try:
                mine.chunk(1, waiting.set)
            except Unreachable as error:
                found.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(DEADLINE_SECONDS)
        peer.kill()
        thread.join(DEADLINE_SECONDS)
        assert f"rank 1 (process {peer.pid}) of this node ended" in str(found[0])
    finally:
        peer.kill()
        peer.wait()
        os.close(fd)


def test_a_rank_that_stopped_stops_the_others_and_one_that_is_done_does_not() -> None:
    fd = os.memfd_create("ckptd-test")
    members = [(0, os.getpid()), (1, os.getpid())]
    one, two = Ring(fd, members, 0, 4096, 4), Ring(fd, members, 1, 4096, 4)
    two.filled()
    two.end(done=True)
    one.chunk(1, lambda: None)
    two.end(done=False)
    with pytest.raises(GaveUp, match="rank 1 of this node stopped"):
        one.chunk(3, lambda: None)
    with pytest.raises(GaveUp):
        one.room(2 * one.slots, lambda: None)
    one.close()
    two.close()
    os.close(fd)


def test_errors_of_the_ring_are_no_errors_of_the_product() -> None:
    assert not issubclass(GaveUp, CkptdError)
