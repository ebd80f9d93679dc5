"""`save`: values as they were, queued and then durable; what fails is told once, to everybody, and harms nothing."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ckptd.digests import sha256_hex
from ckptd.errors import CkptdError, Conflict, Corrupt, Fenced, Invalid, OutcomeUnknown, Unavailable
from ckptd.failpoints import hooked
from ckptd_client import CheckpointClient, SaveHandle, saving, steps
from tests.client.ranks import DEADLINE_SECONDS, RUN, Drive, Job, Trained, of_log, on_threads, results, train

WORLD = 4


@pytest.fixture
def client(drive: Drive) -> Any:
    """A single process that has started."""
    with Job(drive).client() as client:
        client.restore(Trained().app)
        yield client


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.02)


def of_payload(key: str) -> bool:
    return key.endswith(".safetensors")


def restored(drive: Drive) -> tuple[int, list[bytes]]:
    trained = Trained(seed=99)
    with Job(drive).client() as client:
        return client.restore(trained.app), trained.digest()


def tmp_files(drive: Drive) -> list[str]:
    return [stored.name for stored in drive.find("tmp/*")]


def in_background(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    return thread, found


# What is saved.


def test_W1_values_are_those_of_the_call(drive: Drive, client: CheckpointClient) -> None:
    trained = Trained(updates=3)
    expected = trained.digest()
    writing = drive.seen_by(0).pause("put", of_payload)
    client.save(trained.app, step=3)
    assert writing.arrived.wait(DEADLINE_SECONDS)
    for _ in range(2):
        trained.update()  # training goes on while the bytes are still on their way
    trained.app["config"] = {"name": "another"}
    writing.resume.set()
    client.wait()
    assert restored(drive) == (3, expected)


def test_every_rank_adds_state_of_its_own(drive: Drive) -> None:
    train(drive, [5], world=WORLD, per_rank=True)
    assert len(drive.objects(5)) == WORLD

    def position(client: CheckpointClient) -> tuple[object, float, bool]:
        own: dict[str, object] = {"rank": -1, "position": torch.zeros(3)}
        client.restore(Trained().app, per_rank=own)
        assert isinstance(own["position"], torch.Tensor)
        return own["rank"], float(own["position"].sum()), client.resumed_same_world

    assert Job(drive, WORLD).run(position) == [(rank, 15.0, True) for rank in range(WORLD)]


def test_rank_0_alone_may_save_shared_state(drive: Drive) -> None:
    def life(client: CheckpointClient) -> str | None:
        client.restore(Trained().app)
        return client.save(Trained(updates=1).app, step=1, wait=True).status if client.rank == 0 else None

    assert Job(drive, 3).run(life) == ["durable", None, None]
    assert len(drive.objects(1)) == 1


def test_the_other_ranks_may_ask_too_and_learn_what_became_of_it(drive: Drive) -> None:
    def life(client: CheckpointClient) -> str:
        client.restore(Trained().app)
        return client.save(Trained(updates=1).app, step=1, wait=True).status

    assert Job(drive, 3).run(life) == ["durable"] * 3
    assert len(drive.objects(1)) == 1


def test_metrics_are_kept_with_those_that_are_no_numbers(drive: Drive, client: CheckpointClient) -> None:
    metrics = {"loss": float("nan"), "best": float("-inf"), "bleu": torch.tensor(0.5), "epoch": 3}
    client.save(Trained().app, step=1, metrics=metrics, wait=True)  # type: ignore[arg-type]
    with Job(drive).client() as later:
        found = later.latest()
    assert found is not None
    assert repr(found.metrics) == repr({"best": float("-inf"), "bleu": 0.5, "epoch": 3.0, "loss": float("nan")})


def test_the_same_step_twice_is_two_checkpoints_and_the_second_counts(drive: Drive, client: CheckpointClient) -> None:
    client.save(Trained(updates=1).app, step=4, wait=True)
    client.save(Trained(updates=2).app, step=4, wait=True)
    assert drive.steps() == [4, 4]
    assert restored(drive) == (4, Trained(updates=2).digest())


# Queued, then durable.


def test_W7_queued_is_one_thing_and_durable_another(
    drive: Drive, client: CheckpointClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptd")
    committing = drive.seen_by(0).pause("put", lambda key: of_log(key) and "0005" in key)
    handle = client.save(Trained(updates=7).app, step=7)
    assert committing.arrived.wait(DEADLINE_SECONDS)
    assert handle.status == "queued"
    assert drive.kinds()[-1] == "generation-ready"
    with pytest.raises(Unavailable, match="still queued"):
        handle.wait(0.01)
    committing.resume.set()
    assert handle.wait(DEADLINE_SECONDS).status == "durable"
    assert drive.steps() == [7]
    words = [record.getMessage() for record in caplog.records if "step 7" in record.getMessage()]
    assert words == [
        "save of step 7 queued (g00000001-000000000007-r1)",
        "save of step 7 durable (g00000001-000000000007-r1)",
    ]


def test_W8_no_rank_waits_for_another_inside_save(drive: Drive) -> None:
    stopped = {rank: drive.seen_by(rank).pause("put", of_payload) for rank in range(3)}
    returned = threading.Barrier(3)

    def life(client: CheckpointClient) -> str:
        client.restore(Trained().app)
        handle = client.save(Trained().app, step=1, per_rank={"rank": client.rank})
        # Nobody's bytes are written, and everybody's call has returned.
        returned.wait(DEADLINE_SECONDS)
        assert handle.status == "queued"
        stopped[client.rank].resume.set()
        return handle.wait(DEADLINE_SECONDS).status

    assert Job(drive, 3).run(life) == ["durable"] * 3


def test_one_save_is_in_flight_and_the_next_waits_for_it(drive: Drive, client: CheckpointClient) -> None:
    first_writes = drive.seen_by(0).pause("put", of_payload)
    first = client.save(Trained(updates=1).app, step=1)
    assert first_writes.arrived.wait(DEADLINE_SECONDS)
    status_then: list[str] = []

    def save_again() -> SaveHandle:
        second = client.save(Trained(updates=2).app, step=2)
        status_then.append(first.status)
        return second

    thread, found = in_background(save_again)
    assert (first.status, found) == ("queued", [])
    first_writes.resume.set()
    thread.join(DEADLINE_SECONDS)
    assert status_then == ["durable"]
    assert found[0].wait(DEADLINE_SECONDS).status == "durable"
    assert drive.steps() == [1, 2]


def test_saves_in_a_row_without_a_pause_all_become_checkpoints(drive: Drive, client: CheckpointClient) -> None:
    for step in range(1, 21):
        client.save(Trained().app, step=step)
    client.wait()
    assert drive.steps() == list(range(1, 21))


def test_W2_payload_comes_before_the_part_that_names_it_and_each_try_has_a_new_name(
    drive: Drive, client: CheckpointClient
) -> None:
    storage = drive.seen_by(0)
    storage.fail_before("put", of_payload)
    storage.fail_after("put", of_payload, nth=2)
    storage.history.clear()
    client.save(Trained().app, step=1, wait=True)
    puts = [key for operation, key in storage.history if operation == "put"]
    payloads = [key for key in puts if of_payload(key)]
    assert len(set(payloads)) == 3
    assert puts[:3] == payloads
    assert ["/part-0-" in puts[3], "/manifest-" in puts[4], of_log(puts[5]), len(puts)] == [True, True, True, 6]
    assert drive.objects(1)[0].name == payloads[2].rpartition("/")[2]
    storage.assert_all_fired()


def test_nothing_temporary_is_left_behind(drive: Drive) -> None:
    train(drive, [1, 2], world=2, per_rank=True)
    assert tmp_files(drive) == []


# What fails.


def test_W6_an_error_reaches_the_next_call_exactly_once(drive: Drive, client: CheckpointClient) -> None:
    fault = drive.seen_by(0).fail_before("put", of_payload, times=None, error=Unavailable("planned: disk full"))
    handle = client.save(Trained().app, step=1)
    with pytest.raises(Unavailable, match="disk full"):
        client.save(Trained().app, step=2)
    assert handle.status == "failed"
    fault.heal()
    client.save(Trained().app, step=3, wait=True)
    client.close()
    assert drive.steps() == [3]
    assert fault.fired == steps.WRITE_TRIES


def test_W6_who_has_seen_the_error_does_not_see_it_again(drive: Drive, client: CheckpointClient) -> None:
    fault = drive.seen_by(0).fail_before("put", of_payload, times=None)
    with pytest.raises(Unavailable, match="planned"):
        client.save(Trained().app, step=1, wait=True)
    fault.heal()
    client.wait()
    client.save(Trained().app, step=2, wait=True)


def test_W6_close_raises_what_nobody_saw_and_lets_go(drive: Drive) -> None:
    client = Job(drive).client()
    client.restore(Trained().app)
    drive.seen_by(0).fail_before("put", of_payload, times=None, error=Unavailable("planned: disk full"))
    client.save(Trained().app, step=1)
    with pytest.raises(Unavailable, match="disk full"):
        client.close()
    client.close()
    with pytest.raises(Invalid, match="this client is closed"):
        client.save(Trained().app, step=2)


def test_the_error_of_the_training_loop_is_not_masked(drive: Drive) -> None:
    drive.seen_by(0).fail_before("put", of_payload, times=None, error=Unavailable("planned: disk full"))

    def life() -> None:
        with Job(drive).client() as client:
            client.restore(Trained().app)
            client.save(Trained().app, step=1)
            raise ZeroDivisionError("the loss")

    with pytest.raises(ZeroDivisionError, match="the loss") as caught:
        life()
    assert "disk full" in caught.value.__notes__[0]


def test_the_save_in_flight_is_finished_when_the_training_loop_fails(drive: Drive) -> None:
    def life() -> None:
        with Job(drive).client() as client:
            client.restore(Trained().app)
            client.save(Trained().app, step=1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        life()
    assert drive.steps() == [1]


def test_an_error_that_is_none_of_ours_is_told_too(drive: Drive, client: CheckpointClient) -> None:
    def break_down() -> None:
        raise ZeroDivisionError("in the save thread")

    with hooked("payload-written", break_down), pytest.raises(ZeroDivisionError):
        client.save(Trained().app, step=1, wait=True)
    client._saver._uploader.flush()
    assert drive.kinds()[-1] == "save-aborted"
    client.save(Trained().app, step=2, wait=True)


def two_saves(client: CheckpointClient) -> list[BaseException | None]:
    """A life that restores, saves, and then saves once more; the errors of both."""
    client.restore(Trained().app)
    found: list[BaseException | None] = []
    for step in (1, 2):
        try:
            client.save(Trained().app, step=step, per_rank={"rank": client.rank}, wait=True)
        except CkptdError as error:
            found.append(error)
        else:
            found.append(None)
    return found


def test_W6_a_rank_that_cannot_write_calls_the_save_off_for_all(drive: Drive) -> None:
    fault = drive.seen_by(2).fail_before(
        "put", of_payload, times=steps.WRITE_TRIES, error=Unavailable("planned: disk full")
    )
    errors = Job(drive, WORLD).run(two_saves)
    first = [error for error, _ in errors]
    assert isinstance(first[0], Unavailable)
    assert "rank 2 could not write: Unavailable: planned: disk full" in first[0].message
    assert isinstance(first[2], Unavailable)
    assert first[2].message == "planned: disk full"
    for other in (first[1], first[3]):
        assert isinstance(other, Conflict)
        assert "was called off" in other.message
        assert "disk full" in other.message
    assert [second for _, second in errors] == [None] * WORLD
    assert drive.steps() == [2]
    assert fault.fired == steps.WRITE_TRIES


def test_W6_rank_0_that_cannot_write_calls_the_save_off_for_all(drive: Drive) -> None:
    drive.seen_by(0).fail_before("put", of_payload, times=steps.WRITE_TRIES, error=Unavailable("planned: disk full"))
    errors = Job(drive, 3).run(two_saves)
    assert [type(first) for first, _ in errors] == [Unavailable, Conflict, Conflict]
    assert [second for _, second in errors] == [None] * 3
    assert drive.steps() == [2]


def test_W3_a_rank_that_does_not_save_is_named_at_the_deadline(drive: Drive) -> None:
    part = threading.Event()

    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        if client.rank in (1, 3):
            return []
        assert client.rank == 2 or part.wait(DEADLINE_SECONDS)
        with pytest.raises(CkptdError) as caught:
            client.save(Trained().app, step=1, per_rank={}, wait=True)
        return [caught.value]

    deadline = {0: 0.5, 1: 30.0, 2: 30.0, 3: 30.0}
    job = Job(drive, WORLD)

    def on_rank(rank: int) -> Callable[[], list[CkptdError]]:
        def run() -> list[CkptdError]:
            with job.client(rank, save_deadline_seconds=deadline[rank]) as client:
                return life(client)

        return run

    with hooked("part-written", part.set):
        (rank_0,), _, (rank_2,), _ = results(on_threads([on_rank(rank) for rank in range(WORLD)]))
    assert isinstance(rank_0, Unavailable)
    assert "no part from ranks [1, 3]" in rank_0.message
    assert isinstance(rank_2, Conflict)
    assert "no part from ranks [1, 3]" in rank_2.message
    assert drive.ledger().checkpoints(RUN) == []


def test_W3_a_part_of_another_save_is_not_committed(drive: Drive) -> None:
    train(drive, [3], world=2, per_rank=True)
    foreign = drive.find("manifests/*/part-1-*.json")[0].read_bytes()
    assert json.loads(foreign)["step"] == 3

    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        if client.rank == 1:
            return []
        folder = f"runs/{RUN}/manifests/g00000002-000000000004-a1"
        drive.storage.put(f"{folder}/part-1-{sha256_hex(foreign)[:16]}.json", [foreign], len(foreign))
        with pytest.raises(CkptdError) as caught:
            client.save(Trained().app, step=4, per_rank={}, wait=True)
        return [caught.value]

    (error,), _ = Job(drive, 2).run(life)
    assert isinstance(error, Corrupt)
    assert "not of one save" in error.message
    assert drive.steps() == [3]
    assert drive.kinds()[-1] == "save-aborted"


def test_W4_an_object_that_went_away_before_the_commit_is_noticed(drive: Drive) -> None:
    def lose_an_object() -> None:
        (victim,) = drive.find("data/*/*-000000000001-*/1-*.safetensors")
        victim.unlink()

    def lose_it_once() -> None:
        if not lost:
            lost.append(1)
            lose_an_object()

    lost: list[int] = []
    with hooked("before-commit", lose_it_once):
        errors = Job(drive, 3).run(two_saves)
    first = [error for error, _ in errors]
    assert isinstance(first[0], Corrupt)
    assert "missing" in first[0].message
    assert [type(error) for error in first[1:]] == [Conflict, Conflict]
    assert [second for _, second in errors] == [None] * 3
    assert drive.steps() == [2]


@pytest.mark.parametrize("damage", ["cut", "other bytes"])
def test_W4_the_manifest_is_read_back(drive: Drive, client: CheckpointClient, damage: str) -> None:
    def spoil() -> None:
        (manifest,) = drive.find("manifests/*/manifest-*.json")
        data = manifest.read_bytes()
        manifest.write_bytes(data[:-1] if damage == "cut" else data.replace(b"ckptd 0", b"ckptd 9"))

    with hooked("before-commit", spoil), pytest.raises(Corrupt, match="is damaged"):
        client.save(Trained().app, step=1, wait=True)
    assert "checkpoint-committed" not in drive.kinds()


def test_W5_an_unknown_outcome_is_asked_again_and_the_save_is_durable_once(
    drive: Drive, client: CheckpointClient
) -> None:
    storage = drive.seen_by(0)
    client._transport.ledger.deadline_seconds = 0.0
    storage.fail_after("put", of_log)
    storage.fail_before("get", lambda key: key.endswith("0005.json"))
    with_answers, deletes = storage.calls["put"], storage.calls["delete"]
    assert client.save(Trained().app, step=1, wait=True).status == "durable"
    storage.assert_all_fired()
    assert drive.kinds().count("checkpoint-committed") == 1
    assert drive.steps() == [1]
    assert storage.calls["put"] == with_answers + 4  # payload, part, manifest, and one commit
    assert storage.calls["delete"] == deletes


def test_W5_a_commit_that_stays_unknown_is_not_called_off_and_may_land_later(drive: Drive) -> None:
    storage = drive.seen_by(0)
    with Job(drive).client(save_deadline_seconds=0.3) as client:
        client.restore(Trained().app)
        client._transport.ledger.deadline_seconds = 0.0
        late = storage.delay_put(of_log)
        lost = storage.fail_before("put", of_log, nth=2, times=None)
        with pytest.raises(OutcomeUnknown, match="is not known whether commit:"):
            client.save(Trained(updates=1).app, step=1, wait=True)
    lost.heal()
    assert "save-aborted" not in drive.kinds()
    assert not any(operation == "delete" and key.startswith("runs/") for operation, key in storage.history)
    assert late.release()
    assert restored(drive) == (1, Trained(updates=1).digest())


def test_an_outage_during_the_commit_is_waited_out(drive: Drive, client: CheckpointClient) -> None:
    faults = [drive.seen_by(0).fail_before("list", of_log, nth=1, times=5), drive.seen_by(0).fail_before("size")]
    assert client.save(Trained().app, step=1, wait=True).status == "durable"
    assert [fault.fired for fault in faults] == [5, 1]


def test_lost_answers_about_small_objects_are_found_to_have_landed(drive: Drive, client: CheckpointClient) -> None:
    storage = drive.seen_by(0)
    for name in ("/part-", "/manifest-"):
        storage.fail_after("put", lambda key, name=name: name in key)  # type: ignore[misc]
    assert client.save(Trained().app, step=1, wait=True).status == "durable"
    storage.assert_all_fired()
    assert drive.steps() == [1]


def test_a_rank_that_can_tell_nobody_says_so_itself(drive: Drive) -> None:
    drive.seen_by(1).fail_before("put", times=None, error=Unavailable("planned: read-only drive"))

    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        client._save_deadline_seconds = 0.5
        with pytest.raises(CkptdError) as caught:
            client.save(Trained().app, step=1, per_rank={}, wait=True)
        return [caught.value]

    (rank_0,), (rank_1,) = Job(drive, 2, options={"spool_patience_seconds": 0.1}).run(life)
    assert "no part from ranks [1]" in rank_0.message
    assert rank_1.message == "planned: read-only drive"


def test_a_save_that_cannot_be_called_off_yet_has_failed_at_once(drive: Drive, client: CheckpointClient) -> None:
    client._transport.ledger.deadline_seconds = 3600.0
    read_only = drive.seen_by(0).fail_before("put", times=None, error=Unavailable("planned: read-only drive"))
    with pytest.raises(Unavailable, match="read-only drive"):
        client.save(Trained().app, step=1, wait=True)
    assert "save-aborted" not in drive.kinds()
    read_only.heal()
    client._saver._uploader.flush()
    assert drive.kinds()[-1] == "save-aborted"


def test_a_rank_that_could_not_write_tells_rank_0_when_it_can(drive: Drive) -> None:
    read_only = drive.seen_by(1).fail_before("put", times=None, error=Unavailable("planned: read-only drive"))

    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        with pytest.raises(CkptdError) as caught:
            client.save(Trained().app, step=1, per_rank={}, wait=True)
        if client.rank == 1:
            read_only.heal()
        return [caught.value]

    (rank_0,), (rank_1,) = Job(drive, 2).run(life)
    assert "rank 1 could not write: Unavailable: planned: read-only drive" in rank_0.message
    assert rank_1.message == "planned: read-only drive"


def test_a_rank_whose_save_nobody_commits_learns_it_at_its_deadline(drive: Drive) -> None:
    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        if client.rank == 0:
            return []
        with pytest.raises(Unavailable, match="was not committed within 0 s") as caught:
            client.save(Trained().app, step=1, per_rank={}, wait=True)
        return [caught.value]

    assert len(Job(drive, 2, options={"save_deadline_seconds": 0.4}).run(life)[1]) == 1


def test_W3_a_file_that_is_no_part_is_not_committed(drive: Drive) -> None:
    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        if client.rank == 1:
            return []
        name = f"part-1-{sha256_hex(b'{}')[:16]}.json"
        drive.storage.put(f"runs/{RUN}/manifests/g00000001-000000000004-a1/{name}", [b"{}"], 2)
        with pytest.raises(Corrupt, match="is no part manifest") as caught:
            client.save(Trained().app, step=4, per_rank={}, wait=True)
        return [caught.value]

    Job(drive, 2).run(life)
    assert drive.kinds()[-1] == "save-aborted"


def test_W3_a_part_that_is_read_wrong_is_not_committed(drive: Drive) -> None:
    """One wrong byte in it may be one of a digest: what is committed then would never load."""

    def life(client: CheckpointClient) -> str:
        client.restore(Trained().app)
        client.save(Trained(updates=1).app, step=1, wait=True)
        misread = drive.seen_by(0).flip(lambda key: "/part-0-" in key, at=100)
        with pytest.raises(Corrupt, match="is not what its writer wrote"):
            client.save(Trained(updates=2).app, step=2, wait=True)
        misread.heal()
        client.save(Trained(updates=3).app, step=3, wait=True)
        return "went on"

    assert Job(drive, 1).run(life) == ["went on"]
    assert drive.steps() == [1, 3]


def test_a_fenced_incarnation_learns_that_nothing_it_saves_counts(drive: Drive) -> None:
    both = threading.Barrier(2)

    def life(client: CheckpointClient) -> list[type[BaseException]]:
        client.restore(Trained().app)
        both.wait(DEADLINE_SECONDS)
        if client.rank == 0:
            train(drive, [1])  # the job was started again elsewhere
        both.wait(DEADLINE_SECONDS)
        found: list[type[BaseException]] = []
        for step in (5, 6):
            with pytest.raises(CkptdError) as caught:
                client.save(Trained().app, step=step, per_rank={}, wait=True)
            found.append(caught.type)
        return found

    assert Job(drive, 2).run(life) == [[Fenced, Fenced]] * 2
    assert drive.steps() == [1]
    assert "save-aborted" not in drive.kinds()


def test_a_step_before_the_tip_is_refused_and_all_ranks_learn_it(drive: Drive) -> None:
    train(drive, [10])

    def life(client: CheckpointClient) -> list[CkptdError]:
        client.restore(Trained().app)
        with pytest.raises(Conflict) as caught:
            client.save(Trained().app, step=9, per_rank={}, wait=True)
        return [caught.value]

    (rank_0,), (rank_1,) = Job(drive, 2).run(life)
    assert "step 9 is before step 10" in rank_0.message
    assert "was called off" in rank_1.message
    assert drive.steps() == [10]


# Wrong calls.


def test_a_save_before_the_start_is_refused(drive: Drive) -> None:
    with Job(drive).client() as client:
        with pytest.raises(Invalid, match="nothing is known about the run yet") as caught:
            client.save(Trained().app, step=1)
        assert "client.restore" in caught.value.do


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None, 10**12])
def test_a_step_that_is_none_is_refused_and_the_client_goes_on(client: CheckpointClient, step: Any) -> None:
    with pytest.raises(Invalid, match="step") as caught:
        client.save(Trained().app, step=step)
    assert caught.value.fields["field"] == "step"
    client.save(Trained().app, step=1, wait=True)


@pytest.mark.parametrize(
    "metrics",
    [{"loss": "low"}, {"loss": None}, {"loss": torch.zeros(2)}, {"x" * 65: 1.0}, {3: 1.0},
     {f"m{index}": 1.0 for index in range(65)}],
    ids=["text", "none", "several numbers", "long name", "no name", "too many"],
)  # fmt: skip
def test_metrics_that_cannot_be_kept_are_refused_and_the_client_goes_on(
    drive: Drive, client: CheckpointClient, metrics: Any
) -> None:
    with pytest.raises(Invalid, match="metric") as caught:
        client.save(Trained().app, step=1, metrics=metrics)
    assert caught.value.fields["field"] == "metrics"
    client.save(Trained().app, step=1, wait=True)
    assert drive.steps() == [1]


def test_D3_what_cannot_be_kept_exactly_is_refused_with_its_path_and_nothing_is_written(
    drive: Drive, client: CheckpointClient
) -> None:
    before = drive.seen_by(0).calls["put"]
    with pytest.raises(Invalid, match=r"app_state\['hooks'\]\[0\]"):
        client.save({**Trained().app, "hooks": [print]}, step=1)
    with pytest.raises(Invalid, match=r"per_rank\['lock'\]"):
        client.save(Trained().app, step=1, per_rank={"lock": threading.Lock()})
    assert drive.seen_by(0).calls["put"] == before
    client.save(Trained().app, step=1, wait=True)


def test_the_same_call_counts_alike_on_all_ranks(drive: Drive) -> None:
    """Rank 0 saves more often than the others; the saves of all ranks are still named alike."""

    def life(client: CheckpointClient) -> Sequence[str]:
        client.restore(Trained().app)
        if client.rank == 0:
            client.save(Trained().app, step=1, wait=True)
            client.save(Trained().app, step=1, wait=True)
        names = [client.save(Trained().app, step=1, per_rank={}, wait=True).save for _ in range(2)]
        return [name.rpartition("-")[2] for name in names]

    assert Job(drive, 2).run(life) == [["a1", "a2"]] * 2
    assert drive.steps() == [1] * 4
