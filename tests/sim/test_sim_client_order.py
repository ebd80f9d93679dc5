"""The simulator's job does what the real client does: the same calls on the storage, in the same order."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator

import pytest
import torch

from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from ckptd.testing.sim import job as jobs
from ckptd.testing.sim.baton import Baton
from ckptd.testing.sim.cluster import RUN, Cluster, Manners
from ckptd.testing.sim.drive import Drive
from ckptd.testing.sim.truth import Truth
from ckptd.testing.sim.weather import CALM
from ckptd_client import CheckpointClient, transport

Call = tuple[str, str]
CALM_MANNERS = Manners(
    append_seconds=30.0, start_seconds=30.0, save_seconds=30.0, max_world=1, max_jobs=1, services=0, keepers=0,
    keep_last=2, keep_every=None, snapshot_records=1000,
)  # fmt: skip


def told(calls: Iterable[Call]) -> Iterator[Call]:
    """Without nonces and digests, the probe of the storage, and how often and in what pieces an object is read."""
    reading = set[Call]()
    for operation, key in calls:
        if "ckptd-root" in key or key.startswith("probe") or operation == "check_root":
            continue
        call = operation, re.sub(r"-[0-9a-f]{12,16}\.", "-*.", key)
        reading = {seen for seen in reading if seen[1] == call[1]} if operation in ("reader", "read") else set()
        if call not in reading:
            yield call
        reading.add(call)


def of_the_client(monkeypatch: pytest.MonkeyPatch) -> list[list[Call]]:
    """Two incarnations of one rank with the real client: each restores and saves one step more."""
    medium, found = MemoryStorage(), list[list[Call]]()
    for step in (1, 2):
        view = FaultyStorage(medium)
        monkeypatch.setattr(transport, "open_storage", lambda url, view=view: view)
        with CheckpointClient("memory://order", RUN, rank=0, world_size=1) as client:
            state: dict[str, object] = {"step": 0, "weights": torch.zeros(3)}
            assert client.restore(state) == step - 1
            client.save({"step": step, "weights": torch.ones(3)}, step=step, wait=True)
        found.append(list(told(view.history)))
    return found


def of_the_job() -> list[list[Call]]:
    """The same with the simulator's."""
    rng = random.Random(1)
    baton = Baton(rng, 0.5)
    drive = Drive(baton, rng, CALM)
    cluster = Cluster(baton, rng, drive, Truth(drive), CALM_MANNERS)
    found = []
    for number in (1, 2):
        drive.events.clear()
        job = jobs.start(cluster, number, world=1, saves=1)
        job.plan, job.by_hand = [(1, False)], False
        baton.run(lambda: False)
        assert job.durable == 1
        who = f"job {number} rank 0: "
        events = [event.partition(who)[2].partition(" ") for event in drive.events if who in event]
        calls = [(operation, key.replace("..", "00000000")) for operation, _, key in events]
        found.append(list(told((o, f"runs/{k}") for o, k in calls if k.startswith(f"{RUN}/"))))
    return found


def test_the_job_calls_what_the_client_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    client, job = of_the_client(monkeypatch), of_the_job()
    assert [len(calls) > 20 for calls in client] == [True, True]
    assert job == client
