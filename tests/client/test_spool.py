"""With a spool: an outage stops no training, what was saved comes home when the storage is back, and no wait is
without an end. With or without one: an outcome that was unknown at the deadline is found out later."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd import layout
from ckptd.errors import Conflict, Corrupt, Fenced, Invalid, NotInitialised, OutcomeUnknown, Unavailable
from ckptd.failpoints import hooked
from ckptd.testing.auditor import Auditor
from ckptd.testing.faults import Failure
from ckptd.testing.faulty import FaultyStorage, Operation
from ckptd_client import CheckpointClient, SaveHandle, course, saving, spool, uploading
from ckptd_client.snapshot import HostSnapshot
from ckptd_client.spool import Spool
from ckptd_client.state import flatten
from tests.client.ranks import DEADLINE_SECONDS, RUN, Drive, Job, Trained, of_log, on_threads, results, train

OPERATIONS: tuple[Operation, ...] = ("put", "get", "reader", "size", "list", "sync", "delete", "check_root")
ATTEMPT, OTHER = "a" * 32, "b" * 32


@pytest.fixture(autouse=True)
def _quick(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTD_SPOOL", raising=False)
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(uploading, "FIRST_PAUSE_SECONDS", 0.005)
    monkeypatch.setattr(uploading, "LAST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(course, "POLL_SECONDS", 0.05)


class Outage:
    """From now on one machine gets no answer from its storage, until `end`."""

    def __init__(self, storage: FaultyStorage, *, error: Unavailable | None = None) -> None:
        error = error or Unavailable("planned: the storage is away")
        self.faults: list[Failure] = [storage.fail_before(op, times=None, error=error) for op in OPERATIONS]

    @property
    def met(self) -> int:
        return sum(fault.fired for fault in self.faults)

    def end(self) -> None:
        for fault in self.faults:
            fault.heal()


class Spooled:
    """A job of several ranks, each with a spool of its own, that has started; closed with the test."""

    def __init__(self, drive: Drive, folder: Path, world: int = 1, **options: Any) -> None:
        self.drive, self.folder, self.world = drive, folder, world
        job = Job(drive, world)

        def start(rank: int) -> CheckpointClient:
            told = {"spool": self.spool(rank), "spool_patience_seconds": 30.0, **options}
            per_rank = told.pop("by_rank", {}).get(rank, {})
            client = job.client(rank, **{**told, **per_rank})
            client.restore(Trained().app)
            return client

        self.clients = results(on_threads([lambda rank=rank: start(rank) for rank in range(world)]))  # type: ignore[misc]
        self.auditor = Auditor(drive.storage, RUN)

    def spool(self, rank: int = 0) -> Path:
        return self.folder / f"spool-{rank}"

    def files(self, rank: int = 0) -> list[str]:
        return sorted(path.name for path in self.spool(rank).iterdir())

    def outage(self, *ranks: int) -> Callable[[], None]:
        """The storage is away for these ranks, or for all. Calling the result ends it."""
        outages = [Outage(self.drive.seen_by(rank)) for rank in ranks or range(self.world)]

        def end() -> None:
            for outage in outages:
                outage.end()

        return end

    def save(self, step: int, rank: int = 0) -> SaveHandle:
        own = {"rank": rank, "position": torch.full((3,), float(step))} if self.world > 1 else None
        return self.clients[rank].save(Trained(updates=step).app, step=step, per_rank=own)

    def save_all(self, step: int) -> list[SaveHandle]:
        return [self.save(step, rank) for rank in range(self.world)]

    def wait_all(self) -> None:
        results(on_threads([client.wait for client in self.clients]))

    def close(self) -> list[BaseException | None]:
        return on_threads([client.close for client in self.clients])


@pytest.fixture
def spooled(drive: Drive, tmp_path: Path) -> Any:
    """Makes started jobs, and closes them without complaint."""
    made: list[Spooled] = []

    def make(world: int = 1, **options: Any) -> Spooled:
        made.append(Spooled(drive, tmp_path / f"job-{len(made)}", world, **options))
        return made[-1]

    yield make
    drive.seen_by(0).heal()
    for job in made:
        for rank in range(job.world):
            drive.seen_by(rank).heal()
        job.close()


def of_payload(key: str) -> bool:
    return key.endswith(".safetensors")


def train_elsewhere(drive: Drive) -> None:
    """The job is started again on another machine, whose storage is not away; it saves step 1."""
    with CheckpointClient(drive.url_for("elsewhere"), RUN) as client:
        client.restore(Trained().app)
        client.save(Trained(updates=1).app, step=1, wait=True)


def payload(drive: Drive, step: int, run: str = RUN) -> list[bytes]:
    return [stored.read_bytes() for stored in drive.objects(step, run)]


# An outage, and its end.


def test_an_outage_stops_no_training_and_its_saves_come_home_to_the_bit(drive: Drive, spooled: Any) -> None:
    job = spooled()
    end = job.outage()
    first, second = job.save(1), job.save(2)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)  # as the next save would
    assert [first.status, second.status] == ["queued", "queued"]
    assert [first.spooled, second.spooled] == [True, True]
    assert len(job.files()) == 2
    assert job.clients[0].counts == {
        "queued": 2, "durable": 0, "failed": 0, "superseded": 0, "skipped": 0, "spooled": 2,
    }  # fmt: skip
    assert (job.clients[0].durable_step, job.clients[0].durable_age_seconds) == (None, None)
    end()
    job.clients[0].wait()
    assert [first.status, second.status] == ["durable", "durable"]
    assert job.files() == []
    assert drive.steps() == [1, 2]
    assert job.clients[0].counts == {
        "queued": 0, "durable": 2, "failed": 0, "superseded": 0, "skipped": 0, "spooled": 2,
    }  # fmt: skip
    assert job.clients[0].durable_step == 2
    assert 0.0 <= job.clients[0].durable_age_seconds < DEADLINE_SECONDS
    job.auditor.assert_clean(acknowledged=[1, 2])
    train(drive, [1, 2], run="never-away")
    assert [payload(drive, step) for step in (1, 2)] == [payload(drive, step, "never-away") for step in (1, 2)]


def test_what_comes_after_the_outage_is_not_spooled(drive: Drive, spooled: Any) -> None:
    job = spooled()
    assert job.save(1).wait(DEADLINE_SECONDS).spooled is False
    end = job.outage()
    second = job.save(2)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    end()
    assert second.wait(DEADLINE_SECONDS).spooled is True
    assert job.save(3).wait(DEADLINE_SECONDS).spooled is False
    assert drive.steps() == [1, 2, 3]


def test_an_object_of_many_chunks_comes_home_whole(
    drive: Drive, spooled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spool.write, "__kwdefaults__", {"chunk_bytes": 100})
    job = spooled()
    end = job.outage()
    handle = job.save(4)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    end()
    handle.wait(DEADLINE_SECONDS)
    ledger = drive.ledger()
    (ref,) = ledger.manifest(ledger.checkpoint_at(RUN, 4).manifest).objects()
    assert ref.chunk_bytes == 100
    assert len(ref.chunks) > 10
    job.auditor.assert_clean(acknowledged=[4])
    trained = Trained(seed=99)
    with Job(drive).client() as later:
        assert later.restore(trained.app) == 4
    assert trained.digest() == Trained(updates=4).digest()


def test_a_save_that_was_on_the_storage_when_it_went_away_needs_no_spool(drive: Drive, spooled: Any) -> None:
    """The payload is there, the part manifest is not: training goes on all the same."""
    job = spooled()
    fault = drive.seen_by(0).fail_before("put", "", nth=2, times=None)
    first = job.save(1)
    second = job.save(2)
    assert first.spooled is False
    assert first.status == second.status == "queued"
    fault.heal()
    job.clients[0].wait()
    assert drive.steps() == [1, 2]


def test_a_storage_that_neither_takes_nor_refuses_does_not_stop_training(drive: Drive, spooled: Any) -> None:
    """The write hangs. When the next save needs the buffer and the patience is over, the disk takes the bytes."""
    job = spooled(spool_patience_seconds=0.05)
    hanging = drive.seen_by(0).pause("put", of_payload)
    first = job.save(1)
    assert hanging.arrived.wait(DEADLINE_SECONDS)
    second = job.save(2)
    assert first.spooled
    job.clients[0].wait()
    assert [first.status, second.status] == ["durable", "durable"]  # while the first write still hangs
    hanging.resume.set()
    job.clients[0].close()
    assert drive.steps() == [1, 2]
    job.auditor.assert_clean(acknowledged=[1, 2])
    train(drive, [1, 2], run="never-away")
    assert [payload(drive, step) for step in (1, 2)] == [payload(drive, step, "never-away") for step in (1, 2)]


def test_a_drive_that_is_not_mounted_is_an_outage_too(drive: Drive, spooled: Any) -> None:
    job = spooled()
    outage = Outage(drive.seen_by(0), error=NotInitialised("planned: not mounted"))
    handle = job.save(1)
    job.save(2)
    assert outage.met > 0
    outage.end()
    handle.wait(DEADLINE_SECONDS)
    job.clients[0].wait()
    assert drive.steps() == [1, 2]


# Bounds.


def test_the_oldest_waiting_save_is_given_up_when_one_too_many_comes(
    drive: Drive, spooled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job = spooled(spool_saves=2)
    end = job.outage()
    handles = []
    for step in range(1, 6):
        handles.append(job.save(step))
        assert len(job.files()) <= 3
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    assert [handle.status for handle in handles] == ["failed"] * 3 + ["queued"] * 2
    assert all(handle.superseded for handle in handles[:3])
    with pytest.raises(Unavailable, match=r"save of step 1 is superseded: .* at most 2 saves wait, and step 3 came"):
        handles[0].wait()
    assert len(job.files()) == 2
    assert sum("superseded" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING) == 3
    end()
    job.clients[0].wait()
    assert drive.steps() == [4, 5]
    assert job.clients[0].counts == {
        "queued": 0, "durable": 2, "failed": 0, "superseded": 3, "skipped": 0, "spooled": 5,
    }  # fmt: skip
    assert drive.kinds().count("save-aborted") == 3
    job.auditor.assert_clean(acknowledged=[4, 5])


def test_a_save_on_its_way_is_not_given_up_for_newer_ones(drive: Drive, spooled: Any) -> None:
    """Else a storage slower than the saves would never get one whole."""
    job = spooled(spool_saves=1)
    end = job.outage()
    first = job.save(1)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    uploading_first = drive.seen_by(0).pause("put", of_payload, point="during")
    end()
    assert uploading_first.arrived.wait(DEADLINE_SECONDS)
    second = job.save(2)
    third = job.save(3)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    assert (first.status, second.superseded, third.status) == ("queued", True, "queued")
    uploading_first.resume.set()
    job.clients[0].wait()
    assert drive.steps() == [1, 3]


def test_close_names_the_steps_that_are_not_durable_at_its_deadline(drive: Drive, spooled: Any) -> None:
    job = spooled(save_deadline_seconds=0.2)
    job.save(1).wait(DEADLINE_SECONDS)
    job.outage()
    handles = [job.save(2), job.save(3)]
    with pytest.raises(
        Unavailable, match=r"the saves of steps \[2, 3\] are not durable after 0 s; durable is step 1"
    ):
        job.clients[0].wait()
    with pytest.raises(Unavailable, match=r"steps \[2, 3\]"):
        job.clients[0].close()
    assert [handle.status for handle in handles] == ["failed", "failed"]
    assert job.files() == []
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptd-upload"]


def test_wait_true_returns_when_it_is_durable_also_with_a_spool(drive: Drive, spooled: Any) -> None:
    job = spooled()
    assert job.clients[0].save(Trained().app, step=1, wait=True).status == "durable"
    job.outage()
    job.clients[0]._save_deadline_seconds = 0.2
    with pytest.raises(Unavailable, match=r"steps \[2\]"):
        job.clients[0].save(Trained().app, step=2, wait=True)


def test_a_full_local_disk_costs_a_save_and_not_the_training(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.client.full_spool", str(tmp_path)]
    done = subprocess.run(["unshare", "-Urm", *program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "No space left on device" in done.stderr  # the warning


# What no waiting mends.


def test_a_spool_file_that_was_damaged_is_not_uploaded(drive: Drive, spooled: Any) -> None:
    job = spooled()
    end = job.outage()
    handle = job.save(1)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    (name,) = job.files()
    data = bytearray((job.spool() / name).read_bytes())
    data[-1] ^= 1
    (job.spool() / name).write_bytes(data)
    end()
    with pytest.raises(Corrupt, match="does not hold what was written to it: chunk 0"):
        handle.wait(DEADLINE_SECONDS)
    handle.told = False
    with pytest.raises(Corrupt, match="does not hold"):
        job.save(2)
    assert job.save(3).wait(DEADLINE_SECONDS).status == "durable"
    assert (drive.steps(), job.files()) == ([3], [])


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_spool_file_that_cannot_be_read_back_fails_its_save_alone(drive: Drive, spooled: Any, how: str) -> None:
    job = spooled()
    end = job.outage()
    handle = job.save(1)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    (name,) = job.files()
    path = job.spool() / name
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-1])
    end()
    with pytest.raises(Corrupt, match="cannot be read back"):
        handle.wait(DEADLINE_SECONDS)
    assert job.save(2).wait(DEADLINE_SECONDS).status == "durable"
    assert drive.steps() == [2]


def test_a_fenced_client_drops_its_spool_and_says_so_at_each_save(drive: Drive, spooled: Any) -> None:
    job = spooled()
    end = job.outage()
    handles = [job.save(1), job.save(2)]
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    train_elsewhere(drive)  # the job was started again elsewhere
    end()
    for handle in handles:
        with pytest.raises(Fenced):
            handle.wait(DEADLINE_SECONDS)
    assert job.files() == []
    for step in (3, 4):
        with pytest.raises(Fenced):
            job.save(step)
    assert drive.steps() == [1]
    assert "save-aborted" not in drive.kinds()


def test_a_step_before_the_tip_is_an_error_of_the_caller_also_with_a_spool(drive: Drive, spooled: Any) -> None:
    train(drive, [10])
    job = spooled()
    handle = job.save(9)
    assert handle.join(DEADLINE_SECONDS)
    with pytest.raises(Conflict, match="step 9 is before step 10"):
        job.save(11)
    assert job.save(12).wait(DEADLINE_SECONDS).status == "durable"


def test_an_error_that_is_none_of_ours_is_told_with_a_spool_too(drive: Drive, spooled: Any) -> None:
    def break_down() -> None:
        raise ZeroDivisionError("in the save thread")

    job = spooled()
    with hooked("payload-begin", break_down):
        handle = job.save(1)
        assert handle.join(DEADLINE_SECONDS)
    with pytest.raises(ZeroDivisionError):
        job.save(2)
    job.save(3).wait(DEADLINE_SECONDS)
    assert drive.steps() == [3]


@pytest.mark.parametrize("options", [{"spool_saves": 0}, {"spool": __file__}])
def test_a_spool_that_cannot_be_used_is_refused_at_once(drive: Drive, options: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        Job(drive).client(**options)
    assert caught.value.fields["field"] == next(iter(options))


# Several ranks.


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_spools_its_own_part_and_rank_0_commits_when_all_are_there(
    drive: Drive, spooled: Any, world: int
) -> None:
    job = spooled(world)
    end = job.outage()
    handles = [job.save_all(step) for step in (1, 2, 3)]
    for client in job.clients:
        client._saver.make_room(DEADLINE_SECONDS)
    assert [len(job.files(rank)) for rank in range(world)] == [2] * world
    end()
    job.wait_all()
    assert drive.steps() == [2, 3]
    assert [[handle.status for handle in of_step] for of_step in handles] == [
        ["failed"] * world, ["durable"] * world, ["durable"] * world,
    ]  # fmt: skip
    for rank, client in enumerate(job.clients):
        assert client.counts == {"queued": 0, "durable": 2, "failed": 0, "superseded": 1, "skipped": 0, "spooled": 3}
        assert client.durable_step == 3
        assert job.files(rank) == []
    job.auditor.assert_clean(acknowledged=[2, 3])
    train(drive, [2, 3], world=world, run="never-away", per_rank=True)
    assert [payload(drive, step) for step in (2, 3)] == [payload(drive, step, "never-away") for step in (2, 3)]


def test_a_rank_that_gave_a_save_up_tells_rank_0_when_the_storage_is_back(drive: Drive, spooled: Any) -> None:
    """Rank 0 does not wait for a part that will not come."""
    job = spooled(2, by_rank={0: {"spool_saves": 8}, 1: {"spool_saves": 1}})
    end = job.outage(1)
    handles = [job.save_all(step) for step in (1, 2)]
    job.clients[1]._saver.make_room(DEADLINE_SECONDS)
    assert handles[0][1].superseded
    assert handles[0][0].status == "queued"
    end()
    job.wait_all()
    with pytest.raises(Unavailable, match=r"rank 1 could not write: .* step 1 is superseded"):
        handles[0][0].wait()
    assert drive.steps() == [2]
    job.save_all(3)  # nothing is raised for it
    job.wait_all()
    assert drive.steps() == [2, 3]


def test_rank_0_gives_up_and_the_others_learn_it_without_an_error_in_their_next_save(
    drive: Drive, spooled: Any
) -> None:
    job = spooled(2, by_rank={0: {"spool_saves": 1}, 1: {"spool_saves": 8}})
    end = job.outage(0)
    handles = [job.save_all(step) for step in (1, 2)]
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    end()
    job.wait_all()
    assert handles[0][1].join(DEADLINE_SECONDS)
    assert isinstance(handles[0][1].error, Conflict)
    assert [handle.superseded for handle in handles[0]] == [True, True]
    job.save_all(3)
    job.wait_all()
    assert drive.steps() == [2, 3]


def test_the_deadline_for_parts_counts_from_when_the_storage_is_back(drive: Drive, spooled: Any) -> None:
    """An outage longer than the deadline costs nothing; a rank that does not come after it is named."""
    job = spooled(2)
    end = job.outage()
    handles = job.save_all(1)
    for client in job.clients:
        client._saver.make_room(DEADLINE_SECONDS)
        (item,) = client._saver._uploader._items
        object.__setattr__(item.job, "started_at", item.job.started_at - 3600.0)  # the outage lasts an hour
        assert item.job.left_seconds == 0.0
    end()
    assert [handle.wait(DEADLINE_SECONDS).status for handle in handles] == ["durable", "durable"]
    job.clients[0]._save_deadline_seconds = 0.2
    lonely = job.save(2, rank=0)
    with pytest.raises(Unavailable, match=r"no part from ranks \[1\]"):
        lonely.wait(DEADLINE_SECONDS)
    assert drive.steps() == [1]


# An outcome that is unknown at the deadline.


def test_W5_an_unknown_commit_is_found_out_in_the_background(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckptd")
    storage = drive.seen_by(0)
    with Job(drive).client(save_deadline_seconds=0.2) as client:
        client.restore(Trained().app)
        client._transport.ledger.deadline_seconds = 0.0
        landed = storage.pause("put", of_log, point="after")
        lost = storage.fail_after("put", of_log)
        handle = client.save(Trained(updates=1).app, step=1)
        assert landed.arrived.wait(DEADLINE_SECONDS)
        unread = storage.fail_before("get", of_log, times=None)
        landed.resume.set()
        with pytest.raises(OutcomeUnknown, match="it is not known whether the save of step 1 is a checkpoint"):
            handle.wait(DEADLINE_SECONDS)
        assert handle.status == "unknown"
        assert client.counts["queued"] == 1
        unread.heal()
        assert handle.wait(DEADLINE_SECONDS).status == "durable"
        assert handle.error is None
        assert client.durable_step == 1
        assert (lost.fired, drive.steps()) == (1, [1])
        assert client.counts == {"queued": 0, "durable": 1, "failed": 0, "superseded": 0, "skipped": 0, "spooled": 0}
        assert drive.kinds().count("checkpoint-committed") == 1
        words = [r.getMessage() for r in caplog.records if "step 1" in r.getMessage()]
        assert words[-1] == "save of step 1 durable after all (g00000001-000000000001-r1)"
        assert any("its outcome is unknown and asked for again" in word for word in words)
        client.save(Trained(updates=2).app, step=2, wait=True)


def test_W5_the_next_save_goes_on_while_an_outcome_is_unknown_and_settles_it(drive: Drive) -> None:
    """The first commit never landed; the second takes the slot, and the first learns that it was overtaken."""
    storage = drive.seen_by(0)
    asked_again, go_on = threading.Event(), threading.Event()

    def hold_back() -> None:
        if threading.current_thread().name == "ckptd-upload":
            asked_again.set()
            assert go_on.wait(DEADLINE_SECONDS)

    with Job(drive).client(save_deadline_seconds=0.2) as client, hooked("commit-asked", hold_back):
        client.restore(Trained().app)
        client.save(Trained().app, step=0, wait=True)
        client._transport.ledger.deadline_seconds = 0.0
        lost = storage.fail_before("put", of_log, times=None)
        first = client.save(Trained(updates=1).app, step=1)
        with pytest.raises(OutcomeUnknown):
            client.wait()
        assert asked_again.wait(DEADLINE_SECONDS)
        lost.heal()
        assert client.save(Trained(updates=2).app, step=2, wait=True).status == "durable"
        go_on.set()
        with pytest.raises(Conflict, match="step 1 is before step 2"):
            first.wait(DEADLINE_SECONDS)
        assert first.superseded
        assert client.counts == {"queued": 0, "durable": 2, "failed": 0, "superseded": 1, "skipped": 0, "spooled": 0}
    assert drive.steps() == [0, 2]


def test_W5_what_is_unknown_when_the_client_closes_stays_so(drive: Drive) -> None:
    storage = drive.seen_by(0)
    with Job(drive).client(save_deadline_seconds=0.2) as client:
        client.restore(Trained().app)
        client._transport.ledger.deadline_seconds = 0.0
        late = storage.delay_put(of_log)
        storage.fail_before("put", of_log, nth=2, times=None)
        handle = client.save(Trained(updates=1).app, step=1)
        with pytest.raises(OutcomeUnknown):
            client.wait()
    assert handle.over
    assert handle.status == "unknown"
    assert late.release()
    assert drive.steps() == [1]
    assert "save-aborted" not in drive.kinds()


def test_another_rank_learns_after_its_deadline_what_became_of_a_save(drive: Drive) -> None:
    committing = drive.seen_by(0).pause("put", lambda key: of_log(key) and key.endswith("05.json"))
    known = threading.Event()
    deadline = {0: 30.0, 1: 0.2}
    job = Job(drive, 2)

    def on_rank(rank: int) -> Callable[[], str]:
        def run() -> str:
            with job.client(rank, save_deadline_seconds=deadline[rank]) as client:
                client.restore(Trained().app)
                handle = client.save(Trained(updates=1).app, step=1, per_rank={"rank": rank})
                if rank == 1:
                    with pytest.raises(Unavailable, match="was not committed within 0 s"):
                        handle.wait(DEADLINE_SECONDS)
                    assert handle.status == "unknown"
                    known.set()
                else:
                    assert committing.arrived.wait(DEADLINE_SECONDS)
                    assert known.wait(DEADLINE_SECONDS)
                    committing.resume.set()
                return handle.wait(DEADLINE_SECONDS).status

        return run

    assert results(on_threads([on_rank(rank) for rank in range(2)])) == ["durable", "durable"]


def test_W5_a_spooled_save_whose_commit_is_unknown_lets_the_next_one_go_on(drive: Drive, spooled: Any) -> None:
    job = spooled(save_deadline_seconds=0.1)
    job.save(0).wait(DEADLINE_SECONDS)
    job.clients[0]._transport.ledger.deadline_seconds = 0.0
    lost = drive.seen_by(0).fail_before("put", of_log, times=None)
    first = job.save(1)
    with pytest.raises(OutcomeUnknown):
        first.wait(DEADLINE_SECONDS)
    second = job.save(2)
    with pytest.raises(OutcomeUnknown):
        second.wait(DEADLINE_SECONDS)  # it has come as far as the first
    lost.heal()
    assert second.wait(DEADLINE_SECONDS).status == "durable"
    assert first.join(DEADLINE_SECONDS)
    assert first.status == "durable" or first.superseded  # as the log ordered them
    job.auditor.assert_clean(acknowledged=[2])


# The folder.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spool").mkdir()
    return tmp_path / "spool"


def test_only_what_ended_generations_of_this_run_left_is_removed(folder: Path) -> None:
    here, there = "0123abcd-77", "9999aaaa-77"
    nonce = "0" * 16

    def name(run: str, storage: str, rank: int, attempt: str, generation: int) -> str:
        save = layout.save_id(generation, 7, all_ranks=True, count=1)
        return f"{run}-{storage[:8]}-r{rank}-{attempt}-{save}-{nonce}.spool"

    dead = [name(RUN, here, 0, OTHER, 2), name(RUN, here, 3, OTHER, 1)]
    kept = [
        name(RUN, here, 0, ATTEMPT, 3),  # our own
        name(RUN, here, 0, OTHER, 4),  # a younger incarnation's: we are the ones who are fenced
        name("en-it-r0", here, 0, OTHER, 1),  # another run's
        name(RUN, there, 0, OTHER, 1),  # of a run of this name on another storage
        name(RUN, here, 0, OTHER, 1) + ".bak",
        "notes.txt",
    ]
    for file in dead + kept:
        (folder / file).touch()
    (folder / "a-folder").mkdir()
    Spool(folder, RUN, here, 0, ATTEMPT).remove_old(3)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, "a-folder"])


def test_a_spool_file_holds_the_bytes_of_the_payload_and_is_for_its_owner_alone(folder: Path) -> None:
    state = {"weight": torch.arange(1000, dtype=torch.float32), "empty": torch.zeros(0)}
    captured = HostSnapshot().capture([flatten(state, "shared")])
    file = Spool(folder, RUN, "0123abcd", 0, ATTEMPT).write("g00000001-000000000001-r1", captured, chunk_bytes=1000)
    assert spool.NAME.fullmatch(file.path.name)
    assert file.path.stat().st_mode & 0o077 == 0
    assert b"".join(file) == b"".join(file) == file.path.read_bytes()
    assert len(file.chunks) == -(-file.size // 1000)


def test_the_longest_name_fits(folder: Path) -> None:
    captured = HostSnapshot().capture([flatten({"a": torch.zeros(1)}, "shared")])
    longest = layout.save_id(99_999_999, layout.MAX_STEP, all_ranks=True, count=999_999)
    file = Spool(folder, "r" * 128, "0123abcd", layout.MAX_WRITERS - 1, ATTEMPT).write(longest, captured)
    assert spool.NAME.fullmatch(file.path.name)


def test_a_spool_that_another_process_removed_is_told_as_such(drive: Drive, spooled: Any, tmp_path: Path) -> None:
    job = spooled()
    end = job.outage()
    handle = job.save(1)
    job.clients[0]._saver.make_room(DEADLINE_SECONDS)
    for path in job.spool().iterdir():
        path.unlink()
    job.spool().rmdir()
    second = job.save(2)
    job.save(3)
    with pytest.raises(Unavailable, match="does not take the"):
        second.wait(DEADLINE_SECONDS)
    end()
    assert handle.join(DEADLINE_SECONDS)


def test_the_environment_names_the_spool(drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_SPOOL", str(tmp_path / "from-env"))
    with Job(drive).client() as client:
        client.restore(Trained().app)
        outage = Outage(drive.seen_by(0))
        handle = client.save(Trained(updates=1).app, step=1)
        client._saver.make_room(DEADLINE_SECONDS)
        (file,) = (tmp_path / "from-env").iterdir()
        assert re.match(rf"{RUN}-[0-9a-f]{{8}}-r0-", file.name)
        outage.end()
        handle.wait(DEADLINE_SECONDS)
