"""`latest`: one answer for all ranks of an incarnation, whatever goes on around them, or the same error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from ckptd.errors import (
    CkptdError,
    Corrupt,
    Fenced,
    InUse,
    Invalid,
    NotInitialised,
    Unavailable,
    Unreachable,
)
from ckptd.storage import init_root
from ckptd.wire import Answer
from ckptd_client import CheckpointClient, Found, agreement, incarnation
from ckptd_client.patience import patiently
from tests.client.ranks import (
    DEADLINE_SECONDS,
    Drive,
    Job,
    TellingStore,
    Trained,
    of_log,
    on_threads,
    results,
    serving,
    train,
)
from tests.homes import everything, spoil

WORLD = 4


def latest(client: CheckpointClient) -> tuple[int, str | None]:
    found = client.latest()
    return client.generation, found.save if found is not None else None


def errors_of(outcomes: list[Any]) -> list[CkptdError]:
    assert all(isinstance(outcome, CkptdError) for outcome in outcomes), outcomes
    return outcomes


class Zombie:
    """An older incarnation that has all but committed a save: `commit` tries the rest, and tells what came of it."""

    def __init__(self, drive: Drive, step: int) -> None:
        self.client = _client_of(drive, "zombie")
        self.client.restore(Trained().app)
        self._commit = drive.seen_by("zombie").pause("size", ".safetensors")
        self.handle = self.client.save(Trained(updates=step).app, step=step)
        assert self._commit.arrived.wait(DEADLINE_SECONDS)

    def commit(self) -> BaseException | None:
        self._commit.resume.set()
        try:
            self.handle.wait(DEADLINE_SECONDS)
        except CkptdError as error:
            return error
        return None


def _client_of(drive: Drive, machine: str) -> CheckpointClient:
    return CheckpointClient(drive.url_for(machine), "en-it", rank=0, world_size=1, save_deadline_seconds=30.0)


# One answer.


def test_S3_all_ranks_get_the_same_answer(drive: Drive) -> None:
    train(drive, [5, 10], world=2)
    answers = Job(drive, WORLD).run(latest)
    assert answers == [(2, "g00000001-000000000010-r1")] * WORLD


def test_a_new_run_has_none_and_only_a_new_one(drive: Drive) -> None:
    assert Job(drive, WORLD).run(latest) == [(1, None)] * WORLD
    assert Job(drive, 2).run(latest) == [(2, None)] * 2  # nothing was committed yet
    train(drive, [1])
    assert Job(drive, 2).run(latest) == [(4, "g00000003-000000000001-r1")] * 2


def test_S3_a_zombies_commit_between_the_ranks_questions_changes_no_answer(drive: Drive) -> None:
    train(drive, [5])
    zombie = Zombie(drive, 9)
    # Rank 0 has begun; the other ranks have not asked yet.
    asked = [drive.seen_by(rank).pause("list", of_log) for rank in (1, 2, 3)]
    fate: list[BaseException | None] = []

    def between() -> tuple[int, str | None]:
        for pause in asked:
            assert pause.arrived.wait(DEADLINE_SECONDS)
        fate.append(zombie.commit())
        for pause in asked:
            pause.resume.set()
        return (0, None)

    job = Job(drive, WORLD)
    answers = on_threads([*(lambda r=r: _ask(job, r) for r in range(WORLD)), between])
    assert results(answers)[:WORLD] == [(3, "g00000001-000000000005-r1")] * WORLD
    assert isinstance(fate[0], Fenced)
    assert drive.steps() == [5]


def test_S3_a_commit_that_lands_before_the_beginning_is_the_answer_of_all(drive: Drive) -> None:
    train(drive, [5])
    zombie = Zombie(drive, 9)
    # Rank 0 has looked at step 5 and is about to append its beginning.
    beginning = drive.seen_by(0).pause("put", lambda key: "/log/" in key, nth=2)

    def between() -> tuple[int, str | None]:
        assert beginning.arrived.wait(DEADLINE_SECONDS)
        assert zombie.commit() is None
        beginning.resume.set()
        return (0, None)

    job = Job(drive, WORLD)
    answers = on_threads([*(lambda r=r: _ask(job, r) for r in range(WORLD)), between])
    assert results(answers)[:WORLD] == [(3, "g00000002-000000000009-r1")] * WORLD
    assert drive.steps() == [5, 9]
    zombie.client.close()


def _ask(job: Job, rank: int) -> tuple[int, str | None]:
    with job.client(rank) as client:
        return latest(client)


def test_S3_ranks_with_different_answers_stop_all_of_them(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    train(drive, [5])

    def wrong_on_rank_2(client: CheckpointClient) -> Found | None:
        if client.rank == 2:
            join = client._transport.join

            def other(*args: Any, **options: Any) -> Answer:
                return join(*args, **options).model_copy(update={"record_sha256": "0" * 64})

            monkeypatch.setattr(client._transport, "join", other)
        return client.latest()

    errors = errors_of(Job(drive, WORLD).outcomes(wrong_on_rank_2))
    assert all(isinstance(error, Unreachable) for error in errors)
    assert all("the ranks hold different answers" in error.message and "0" * 64 in error.message for error in errors)


def test_repeating_the_question_gives_the_same_answer(drive: Drive) -> None:
    train(drive, [5])

    def twice(client: CheckpointClient) -> bool:
        first = client.latest()
        return first is not None and client.latest() is first

    assert Job(drive, 2).run(twice) == [True, True]
    assert drive.kinds().count("generation-started") == 2


def test_a_question_that_failed_can_be_asked_again(drive: Drive, quick: None) -> None:
    train(drive, [5])
    fault = drive.seen_by(1).fail_before("list", of_log, times=None, error=Corrupt("planned"))

    def ask_twice(client: CheckpointClient) -> tuple[int, str | None]:
        with pytest.raises(Corrupt, match="planned"):
            client.latest()
        fault.heal()
        return latest(client)

    assert Job(drive, 2).run(ask_twice) == [(2, "g00000001-000000000005-r1")] * 2


# No answer.


def test_S7_a_drive_that_one_rank_has_not_mounted_is_no_new_run_for_anybody(drive: Drive) -> None:
    train(drive, [5])
    empty = drive.beside("empty")
    job = Job(drive, WORLD)

    def ask(rank: int) -> Callable[[], Found | None]:
        def run() -> Found | None:
            url = empty if rank == 2 else drive.url_for(rank)
            with CheckpointClient(url, "en-it", rank=rank, world_size=WORLD, store=job.store) as client:
                return client.latest()

        return run

    started_at = time.monotonic()
    errors = errors_of(on_threads([ask(rank) for rank in range(WORLD)]))
    assert time.monotonic() - started_at < 30  # nobody waits ten minutes for a person
    assert all(isinstance(error, NotInitialised) for error in errors)
    assert all("ckptd-root.json" in error.message for error in errors)
    assert [error.message.startswith("rank 2: ") for error in errors] == [True, True, False, True]
    assert not any("/empty/" in name for name in everything(drive.storage))


def test_S7_another_storage_on_one_rank_is_found_out(drive: Drive) -> None:
    train(drive, [5])
    other = drive.beside("other")
    init_root(other)
    job = Job(drive, 2)

    def other_drive() -> Found | None:
        with CheckpointClient(other, "en-it", rank=1, world_size=2, store=job.store) as client:
            return client.latest()

    def right_drive() -> Found | None:
        with job.client(0) as client:
            return client.latest()

    errors = errors_of(on_threads([right_drive, other_drive]))
    assert all(isinstance(error, NotInitialised) for error in errors)
    assert "rank 1 sees storage" in errors[0].message
    assert not any("/other/runs/" in name for name in everything(drive.storage))


def test_a_root_without_a_marker_is_refused_at_once_with_both_reasons(bare_home: str) -> None:
    with pytest.raises(NotInitialised, match="new storage, or a drive that is not mounted") as caught:
        CheckpointClient(bare_home, "en-it", rank=0, world_size=1)
    assert "ckptd init" in caught.value.do


def test_S7_storage_that_stays_down_is_unreachable_on_all_ranks(drive: Drive, quick: None) -> None:
    train(drive, [5])
    clients = [Job(drive, 1).client(0, start_deadline_seconds=0.3)]
    drive.seen_by(0).fail_before("list", times=None, error=Unavailable("planned: the drive is gone"))
    with pytest.raises(Unreachable, match="the drive is gone") as caught:
        clients[0].latest()
    assert "Nothing was started from zero" in caught.value.do
    clients[0].close()


def test_S7_the_ranks_learn_why_rank_0_got_no_answer(drive: Drive, impatient: None) -> None:
    train(drive, [5])

    def ask(client: CheckpointClient) -> Found | None:
        if client.rank == 0:
            drive.seen_by(0).fail_before("list", times=None, error=Unavailable("planned: the drive is gone"))
        return client.latest()

    errors = errors_of(Job(drive, 3).outcomes(ask))
    assert all(isinstance(error, Unreachable) for error in errors)
    assert [error.message for error in errors[1:]] == ["rank 0: planned: the drive is gone"] * 2


def test_an_outage_that_ends_in_time_is_waited_out(drive: Drive, quick: None) -> None:
    train(drive, [5])
    faults = [drive.seen_by(rank).fail_before("list", of_log, times=3) for rank in range(2)]
    faults += [drive.seen_by(0).fail_before("size", times=2)]  # the look before the promise
    assert Job(drive, 2).run(latest) == [(2, "g00000001-000000000005-r1")] * 2
    assert [fault.fired for fault in faults] == [3, 3, 2]


def test_a_rank_that_does_not_come_is_named(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_SECONDS", 0.0)
    store = TellingStore(HashStore(), "/hello/2")
    job = Job(drive, 3, store=store)

    def ask(rank: int) -> Callable[[], Found | None]:
        def run() -> Found | None:
            with job.client(rank, start_deadline_seconds=0.5) as client:
                assert rank == 2 or store.told.acquire(timeout=DEADLINE_SECONDS)
                return client.latest()

        return run

    errors = errors_of(on_threads([ask(0), ask(2)]))
    assert "ranks [1] to say hello" in errors[0].message
    assert drive.kinds() == ["run-created", "attempt-opened"]


def test_S7_a_run_whose_checkpoints_are_all_damaged_is_corrupt_with_the_reason_for_each(drive: Drive) -> None:
    train(drive, [5, 10])
    spoil(drive.manifest(5))
    drive.objects(10)[0].unlink()
    errors = errors_of(Job(drive, WORLD).outcomes(lambda client: client.latest()))
    assert all(isinstance(error, Corrupt) for error in errors)
    for error in errors:
        reasons = error.fields["candidates"]
        assert [(reason["step"], reason["valid"]) for reason in reasons] == [(10, False), (5, False)]
        assert "missing" in reasons[0]["reason"]
        assert "it is not started from zero" in str(error)
    assert drive.kinds().count("generation-started") == 1


def test_S7_a_run_with_commits_is_never_new_though_its_payload_is_gone(drive: Drive) -> None:
    train(drive, [5])
    for payload in drive.find("data/*"):
        payload.unlink()
    with pytest.raises(Corrupt), Job(drive).client() as client:
        client.latest()


def test_S8_a_checkpoint_that_is_evidently_gone_or_cut_is_passed_over(drive: Drive) -> None:
    train(drive, [5, 10, 15])
    drive.objects(15)[0].unlink()
    spoil(drive.objects(10)[0], at=-100, cut=True)
    assert Job(drive, 2).run(latest) == [(2, "g00000001-000000000005-r1")] * 2
    assert drive.kinds().count("checkpoint-quarantined") == 2


def test_S8_a_drive_that_does_not_let_itself_be_looked_at_is_unreachable(drive: Drive, quick: None) -> None:
    train(drive, [5])
    drive.seen_by(0).fail_before("size", times=None, error=Unavailable("planned: no answer"))
    client = Job(drive).client(start_deadline_seconds=0.2)
    with pytest.raises(Unreachable, match="cannot be looked at") as caught:
        client.latest()
    client.close()
    assert caught.value.fields["candidates"][0]["step"] == 5


# Who may start.


def test_S1_an_attempt_is_a_fresh_nonce_opened_when_the_client_of_rank_0_is_made(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "same")
    clients = [Job(drive).client() for _ in range(2)]
    assert drive.kinds() == ["run-created", "attempt-opened", "attempt-opened"]
    other_rank = Job(drive, 2).client(1)
    assert drive.kinds().count("attempt-opened") == 2
    assert clients[0]._attempt != clients[1]._attempt
    for client in [*clients, other_rank]:
        client.close()


def test_S1_an_incarnation_that_was_born_first_and_comes_late_is_fenced_on_all_ranks(drive: Drive) -> None:
    slow = Job(drive, 2)
    early = slow.client(0)
    train(drive, [5])

    def late(rank: int) -> Callable[[], Found | None]:
        def run() -> Found | None:
            with early if rank == 0 else slow.client(rank) as client:
                return client.latest()

        return run

    errors = errors_of(on_threads([late(0), late(1)]))
    assert all(isinstance(error, Fenced) for error in errors)
    assert errors[1].message.startswith("rank 0: ")
    train(drive, [6])  # the healthy line goes on
    assert drive.steps() == [5, 6]


def test_S1_an_attempt_can_be_given_and_must_look_like_one(drive: Drive) -> None:
    attempt = "0123456789abcdef" * 2
    assert Job(drive, 2, options={"attempt": attempt}).run(latest) == [(1, None)] * 2
    with pytest.raises(Invalid, match="32 hexadecimal"):
        Job(drive).client(attempt="7")


def test_S9_a_run_in_use_is_refused_on_all_ranks_unless_takeover_is_asked_for(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(incarnation, "IN_USE_SECONDS", 0.1)
    with serving(drive) as url:
        monkeypatch.setenv("CKPTD_JOB", "first")
        with Job(drive, url=url).client() as living:
            living.restore(Trained().app)
            living.save(Trained().app, step=1, wait=True)
            monkeypatch.setenv("CKPTD_JOB", "second")
            errors = errors_of(Job(drive, 2, url=url).outcomes(lambda client: client.latest()))
            assert all(isinstance(error, InUse) for error in errors)
            assert "in use by job 'first'" in errors[1].message
            assert "takeover" in errors[1].do
            answers = Job(drive, 2, url=url, options={"takeover": True}).run(latest)
            assert answers == [(2, "g00000001-000000000001-r1")] * 2
            with pytest.raises(Fenced):
                living.save(Trained().app, step=2, wait=True)


def test_S9_a_job_that_fell_silent_is_waited_for_and_replaced(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    with serving(drive, in_use_seconds=0.5) as url:
        monkeypatch.setenv("CKPTD_JOB", "dead")
        Job(drive, url=url).run(latest)
        monkeypatch.setenv("CKPTD_JOB", "new")
        assert Job(drive, 2, url=url).run(latest) == [(2, None)] * 2


# Patience.


def test_patience_ends_at_the_deadline_with_the_first_class_errors_only(quick: None) -> None:
    def unavailable() -> None:
        raise Unavailable("no", object="x")

    with pytest.raises(Unreachable, match="no") as caught:
        patiently(unavailable, 0.05)
    assert caught.value.fields == {"object": "x"}
    assert type(caught.value.__cause__) is Unavailable

    unreachable = Unreachable("candidates", do="that", candidates=["a"])

    def raise_it() -> None:
        raise unreachable

    with pytest.raises(Unreachable) as kept:
        patiently(raise_it, 0.0)
    assert kept.value is unreachable

    calls: list[int] = []

    def not_initialised() -> None:
        calls.append(1)
        raise NotInitialised("a person must look")

    with pytest.raises(NotInitialised):
        patiently(not_initialised, 60.0)
    assert calls == [1]


def test_the_heart_of_rank_0_beats_from_the_answer_on(drive: Drive) -> None:
    with serving(drive) as url, Job(drive, url=url).client() as client:
        assert client._heart is None
        client.latest()
        assert any(thread.name == "ckptd-heartbeat" for thread in threading.enumerate())
    assert not any(thread.name == "ckptd-heartbeat" for thread in threading.enumerate())
