"""A save that comes while the one before is running, `prepare`, and a blocking save that writes while it copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import CkptdError, Invalid, SaveOff
from ckptd.failpoints import hooked
from ckptd.storage.base import Buffer
from ckptd_client import CheckpointClient, SaveHandle, packing, payload, saving, snapshot
from ckptd_client.state import flatten
from ckptd_client.stateful import collect
from tests.client.ranks import DEADLINE_SECONDS, Drive, Job, Trained

SKIP = {"when_busy": "skip"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.02)


def of_payload(key: str) -> bool:
    return key.endswith(".safetensors")


def started(drive: Drive, **options: Any) -> CheckpointClient:
    client = Job(drive).client(**options)
    client.restore(Trained().app)
    return client


# Skipping.


def test_a_save_that_comes_too_early_is_skipped_and_the_next_is_not(drive: Drive) -> None:
    with started(drive, **SKIP) as client:
        writing = drive.seen_by(0).pause("put", of_payload)
        first = client.save(Trained(updates=1).app, step=1)
        assert writing.arrived.wait(DEADLINE_SECONDS)
        second = client.save(Trained(updates=2).app, step=2)
        assert (second.status, client.counts["skipped"], client.counts["queued"]) == ("skipped", 1, 1)
        with pytest.raises(SaveOff, match="save of step 2 is skipped"):
            second.wait(0.0)
        writing.resume.set()
        client.wait()  # for the first; that the second was skipped is no error
        assert first.status == "durable"
        client.save(Trained(updates=3).app, step=3, wait=True)
    assert drive.steps() == [1, 3]
    assert drive.kinds().count("save-aborted") == 0  # alone, nobody has to be told
    assert client.counts == {"queued": 0, "durable": 2, "failed": 0, "superseded": 0, "skipped": 1, "spooled": 0}


def test_who_waits_for_a_save_gets_it(drive: Drive) -> None:
    with started(drive, **SKIP) as client:
        writing = drive.seen_by(0).pause("put", of_payload)
        client.save(Trained(updates=1).app, step=1)
        assert writing.arrived.wait(DEADLINE_SECONDS)
        waits = threading.Timer(0.0, writing.resume.set)
        waits.start()
        assert client.save(Trained(updates=2).app, step=2, wait=True).status == "durable"
        waits.join()
    assert drive.steps() == [1, 2]


def test_without_being_told_to_no_save_is_skipped(drive: Drive) -> None:
    with started(drive) as client:
        for step in range(1, 4):
            client.save(Trained(updates=step).app, step=step)
    assert drive.steps() == [1, 2, 3]
    with pytest.raises(Invalid, match="when_busy is 'drop'"):
        Job(drive).client(when_busy="drop")


def test_with_a_spool_only_the_bytes_count(drive: Drive, tmp_path: Path) -> None:
    """The first save waits for its commit when the second comes, and its bytes are on the storage."""
    with started(drive, spool=tmp_path / "spool", **SKIP) as client:
        committing = drive.seen_by(0).pause("put", lambda key: "manifest-" in key)
        client.save(Trained(updates=1).app, step=1)
        assert committing.arrived.wait(DEADLINE_SECONDS)
        writing = drive.seen_by(0).pause("put", of_payload)
        client.save(Trained(updates=2).app, step=2)
        assert writing.arrived.wait(DEADLINE_SECONDS)
        assert client.save(Trained(updates=3).app, step=3).status == "skipped"
        writing.resume.set()
        committing.resume.set()
        client.wait()
    assert drive.steps() == [1, 2]


class Held:
    """Keeps the save of step 1 running on one rank, while it is over on all others."""

    def __init__(self, drive: Drive, rank: int) -> None:
        self.drive, self.rank = drive, rank
        self.arrived, self.resume = threading.Event(), threading.Event()

    def plan(self, rank: int) -> None:
        """Before its save of step 1. Rank 0 is kept once it has committed, another when it asks what became of it."""
        if rank == self.rank != 0:
            pause = self.drive.seen_by(rank).pause("list", lambda key: "/log" in key)
            self.arrived, self.resume = pause.arrived, pause.resume

    def committed(self) -> None:
        """The failpoint after a commit."""
        if self.rank == 0 and not self.arrived.is_set():
            self.arrived.set()
            assert self.resume.wait(DEADLINE_SECONDS)


def three_saves(drive: Drive, busy: int, *, per_rank: bool) -> list[list[str]]:
    """What each of three ranks makes of its saves of steps 1, 2, 3, if rank `busy` still has step 1 when 2 comes."""
    held, all_at_step_2 = Held(drive, busy), threading.Barrier(3)

    def life(client: CheckpointClient) -> list[str]:
        own = {"rank": client.rank} if per_rank else None

        def save(step: int, **options: Any) -> SaveHandle:
            return client.save(Trained(updates=step).app, step=step, per_rank=own, **options)

        client.restore(Trained().app)
        held.plan(client.rank)
        handles = [save(1)]
        if client.rank == busy:
            assert held.arrived.wait(DEADLINE_SECONDS)
        else:
            handles[0].wait(DEADLINE_SECONDS)
        all_at_step_2.wait(DEADLINE_SECONDS)
        handles.append(save(2))
        if client.rank == busy:
            held.resume.set()
        assert handles[1].join(DEADLINE_SECONDS)
        client.wait()
        handles.append(save(3, wait=True))
        assert (client.counts["queued"], client.counts["failed"]) == (0, 0)
        return [handle.status for handle in handles]

    with hooked("after-commit", held.committed):
        return Job(drive, 3, options=SKIP).run(life)


@pytest.mark.parametrize("per_rank", [True, False])
def test_what_rank_0_skips_is_skipped_by_all(drive: Drive, per_rank: bool) -> None:
    assert three_saves(drive, 0, per_rank=per_rank) == [["durable", "skipped", "durable"]] * 3
    assert drive.steps() == [1, 3]


def test_what_a_writer_skips_is_skipped_by_all(drive: Drive) -> None:
    assert three_saves(drive, 1, per_rank=True) == [["durable", "skipped", "durable"]] * 3
    assert drive.steps() == [1, 3]


def test_a_rank_that_writes_nothing_skips_for_itself_alone(drive: Drive) -> None:
    durable = ["durable"] * 3
    assert three_saves(drive, 1, per_rank=False) == [durable, ["durable", "skipped", "durable"], durable]
    assert drive.steps() == [1, 2, 3]


def test_who_waits_for_a_save_that_another_rank_skipped_is_told(drive: Drive) -> None:
    held, at_step_2 = Held(drive, 0), threading.Barrier(2)

    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        first = client.save(Trained().app, step=1)
        if client.rank == 0:
            assert held.arrived.wait(DEADLINE_SECONDS)
            at_step_2.wait(DEADLINE_SECONDS)
            client.save(Trained().app, step=2)
            held.resume.set()
            return []
        first.wait(DEADLINE_SECONDS)
        at_step_2.wait(DEADLINE_SECONDS)
        with pytest.raises(CkptdError, match="is skipped") as caught:
            client.save(Trained().app, step=2, wait=True)
        return [caught.value]

    with hooked("after-commit", held.committed):
        _, (error,) = Job(drive, 2, options=SKIP).run(life)
    assert "save of step 2" in error.message


# Making room ahead.


def test_prepare_makes_the_room_that_the_first_save_takes(drive: Drive) -> None:
    with started(drive) as client:
        trained = Trained(updates=1)
        own = {"position": torch.zeros(3)}
        assert client._gatherer._snapshot.capacity_bytes == 0
        size = client.prepare(trained.app, per_rank=own)
        place = client._gatherer._snapshot._buffer.data_ptr()
        assert client._gatherer._snapshot.capacity_bytes >= size > 0
        for step in (1, 2):
            client.save(trained.app, step=step, per_rank=own, wait=True)
        assert client._gatherer._snapshot._buffer.data_ptr() == place
        assert sum(entry.nbytes for entry in entries_of(client, trained, own)) == size


def entries_of(client: CheckpointClient, trained: Trained, own: dict[str, Any]) -> tuple[snapshot.Entry, ...]:
    flats = [flatten(collect(trained.app), "shared"), flatten(own, "rank")]
    with client._gatherer._snapshot.capture(flats) as captured:
        return captured.entries


def test_a_rank_without_state_of_its_own_needs_no_room(drive: Drive) -> None:
    def life(client: CheckpointClient) -> int:
        client.restore(Trained().app)
        return client.prepare(Trained().app)

    first, second = Job(drive, 2).run(life)
    assert first > 0
    assert second == 0


def test_the_buffer_is_the_same_over_many_saves(drive: Drive) -> None:
    with started(drive) as client:
        trained, seen = Trained(updates=1), set[tuple[int, int]]()
        for step in range(1, 51):
            client.save(trained.app, step=step, wait=step % 2 == 0)
            seen.add((client._gatherer._snapshot.capacity_bytes, client._gatherer._snapshot._buffer.data_ptr()))
        assert len(seen) == 1
        assert len([line for line in Path("/proc/self/maps").read_text().splitlines() if covers(line, seen)]) == 1


def covers(line: str, seen: set[tuple[int, int]]) -> bool:
    """Whether a mapping of this process holds the buffer."""
    begin, end = (int(number, 16) for number in line.split()[0].split("-"))
    return any(begin <= place < end for _, place in seen)


# Written while it is copied.


def test_a_blocking_save_writes_while_the_rest_is_copied(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stops after its first megabyte, until that has been sent to the storage."""
    sent, stopped, real = threading.Event(), list[int](), packing._move

    def move(target: int, source: int, size: int) -> None:
        if stopped:
            assert sent.wait(DEADLINE_SECONDS)
        stopped.append(size)
        real(target, source, size)

    monkeypatch.setattr(packing, "MOVE_BYTES", 1 << 20)
    monkeypatch.setattr(packing, "_move", move)
    defaults = payload.write.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "chunk_bytes", 1 << 18)
    weight = torch.arange(1_000_000.0)
    with started(drive) as client:
        put = client._transport.storage.put
        monkeypatch.setattr(client._transport.storage, "put", telling(put, sent))
        client.save({"weight": weight}, step=1, wait=True)
    assert len(stopped) == 4
    back = torch.zeros(1_000_000)
    with Job(drive).client() as client:
        assert client.restore({"weight": back}) == 1
    assert torch.equal(back, weight)


def telling(put: Callable[..., None], sent: threading.Event) -> Callable[..., None]:
    """A put that tells when it has been given half a megabyte."""

    def watched(key: str, chunks: Iterable[Buffer], size: int) -> None:
        def passing() -> Iterator[Buffer]:
            done = 0
            for chunk in chunks:
                yield chunk
                done += len(chunk)
                if done >= 1 << 19:
                    sent.set()

        put(key, passing(), size)

    return watched


@pytest.mark.parametrize("wait", [True, False])
def test_a_copy_that_fails_is_raised_and_the_next_save_is_whole(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("the device is gone")

    with started(drive) as client:
        with monkeypatch.context() as patched:
            patched.setattr(snapshot, "pack", fail)
            with pytest.raises(RuntimeError, match="the device is gone"):
                client.save(Trained(updates=1).app, step=1, wait=wait)
        assert client.counts["failed"] == (1 if wait else 0)
        client.wait()
        client.save(Trained(updates=2).app, step=2, wait=True)
    assert drive.steps() == [2]
