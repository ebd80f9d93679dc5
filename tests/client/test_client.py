"""Making a client, and `restore`: in place, verified, together, or not at all."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch._C._distributed_c10d import HashStore

from ckptd.errors import CkptdError, Corrupt, Invalid, Unavailable, Unreachable
from ckptd_client import CheckpointClient, agreement, incarnation, payload
from tests.client.ranks import DEADLINE_SECONDS, RUN, Drive, Job, TellingStore, Trained, serving, train
from tests.homes import everything, spoil

WORLD = 4
DATA = 4096 + 10  # an offset among the tensors of a small payload


pytestmark = pytest.mark.usefixtures("quick")


def records(drive: Drive, kind: str) -> list[dict[str, Any]]:
    return [record["body"] for record in drive.records() if record["kind"] == kind]


def restore(client: CheckpointClient) -> tuple[int, int]:
    """The step, once the state was checked, and the generation."""
    trained = Trained(seed=9)
    step = client.restore(trained.app)
    assert trained.digest() == (Trained(updates=step) if step else Trained(seed=9)).digest()
    return step, client.generation


def after_latest(damage: Callable[[], None], world: int) -> Callable[[CheckpointClient], tuple[int, int]]:
    """A life in which the damage comes once all ranks know what they resume from."""
    known = threading.Barrier(world, action=damage)

    def life(client: CheckpointClient) -> tuple[int, int]:
        client.latest()
        known.wait(DEADLINE_SECONDS)
        return restore(client)

    return life


def refused(
    job: Job, prepare: Callable[[int, Trained], None] = lambda rank, trained: None, *, unread: bool = False
) -> list[CkptdError]:
    """Restore on all ranks; each must fail and have installed nothing, and if `unread`, have written no byte."""

    def life(client: CheckpointClient) -> list[CkptdError]:
        trained = Trained(seed=client.rank)
        own: dict[str, object] = {"rank": -1, "position": torch.zeros(3)}
        prepare(client.rank, trained)
        before = trained.digest()
        with pytest.raises(CkptdError) as caught:
            client.restore(trained.app, per_rank=own)
        if unread:
            assert trained.digest() == before
        assert trained.digest()[-1] == before[-1]  # plain values and the scheduler's
        assert own["rank"] == -1
        return [caught.value]

    return [error for (error,) in job.run(life)]


# In place.


def test_restore_brings_everything_back_in_place(drive: Drive) -> None:
    train(drive, [3])
    trained = Trained(seed=9)
    weight, mean, momentum = trained.model.weight, trained.app["mean"], trained.optimizer
    with Job(drive).client() as client:
        assert client.restore(trained.app) == 3
    assert trained.digest() == Trained(updates=3).digest()
    assert trained.model.weight is weight
    assert trained.app["mean"] is mean
    assert trained.app["optimizer"] is momentum
    trained.generator = Trained(updates=3).generator
    other = Trained(updates=3)
    for one in (trained, other):
        one.update()
    assert trained.digest() == other.digest()


def test_a_new_run_starts_at_step_0_and_nothing_is_changed(drive: Drive) -> None:
    assert Job(drive, 2).run(restore) == [(0, 1)] * 2
    assert drive.kinds()[-1] == "generation-ready"


def test_restore_may_be_repeated(drive: Drive) -> None:
    train(drive, [3])

    def twice(client: CheckpointClient) -> list[tuple[int, int]]:
        return [restore(client), restore(client)]

    assert Job(drive, 2).run(twice) == [[(3, 2), (3, 2)]] * 2
    assert drive.kinds().count("generation-ready") == 2


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_leaves_per_rank_state_as_it_is(drive: Drive, world: int) -> None:
    train(drive, [4], world=2, per_rank=True)

    def life(client: CheckpointClient) -> tuple[int, object, bool]:
        own: dict[str, object] = {"rank": "mine"}
        return client.restore(Trained().app, per_rank=own), own["rank"], client.resumed_same_world

    assert Job(drive, world).run(life) == [(4, "mine", False)] * world


def test_no_per_rank_state_was_saved_or_wanted(drive: Drive) -> None:
    train(drive, [4], world=2)

    def life(client: CheckpointClient) -> tuple[int, object, bool]:
        own: dict[str, object] = {"rank": "mine"}
        return client.restore(Trained().app, per_rank=own), own["rank"], client.resumed_same_world

    assert Job(drive, 2).run(life) == [(4, "mine", True)] * 2
    train(drive, [5], world=2, per_rank=True)
    assert Job(drive, 2).run(restore) == [(5, 4)] * 2


def test_a_single_process_has_per_rank_state_too(drive: Drive) -> None:
    train(drive, [4], per_rank=True)
    own: dict[str, object] = {"rank": -1, "position": torch.zeros(3)}
    with Job(drive).client() as client:
        client.restore(Trained().app, per_rank=own)
    assert own["rank"] == 0


def test_state_is_the_same_to_the_bit_after_a_save_and_a_start(drive: Drive) -> None:
    tied = torch.randn(3, 2)
    state: dict[str, object] = {
        "nested": {"list": [1, 2.5, None, True, "ü"], 7: ("a", b"\x00\xff"), "empty": {}},
        "big": 2**200 + 1,
        "odd": [float("nan"), float("-inf"), -0.0],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "scalar": np.float32(0.1),
        "bfloat16": torch.randn(5).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "view": torch.arange(1000)[10:20:3],
        "zero": torch.tensor(3),
        "none": torch.empty(0, 4),
        "order": OrderedDict([("b", 1), ("a", 2)]),
        "tied": [tied, tied],
    }
    with Job(drive).client() as client:
        client.latest()
        client.save(state, step=1, wait=True)
    with Job(drive).client() as client:
        found = client.latest()
        assert found is not None
        loaded: Any = found.load()
    assert repr(loaded["nested"]) == repr(state["nested"])
    assert (loaded["big"], repr(loaded["odd"])) == (2**200 + 1, "[nan, -inf, -0.0]")
    assert (type(loaded["order"]), list(loaded["order"])) == (OrderedDict, ["b", "a"])
    np.testing.assert_array_equal(loaded["array"], np.arange(6, dtype=np.int16).reshape(2, 3).T)
    assert (loaded["array"].dtype, type(loaded["scalar"])) == (np.int16, np.float32)
    assert loaded["scalar"] == np.float32(0.1)
    for name in ("bfloat16", "float8", "view", "zero", "none"):
        expected = state[name]
        assert isinstance(expected, torch.Tensor)
        assert (loaded[name].dtype, loaded[name].shape) == (expected.dtype, expected.shape)
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (loaded[name], expected)]
        assert bits[0].equal(bits[1])
    assert loaded["tied"][0] is loaded["tied"][1]
    assert loaded["tied"][0].equal(tied)


def test_D3_payload_is_safetensors_and_nothing_is_executed_when_it_is_loaded(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    train(drive, [3], world=2, per_rank=True)
    assert load(drive.objects(3)[0].read_bytes())["shared/model/weight"].equal(Trained(updates=3).model.weight)

    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("a pickle was opened")

    for owner, name in ((pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, forbidden)
    assert Job(drive, 2).run(restore) == [(3, 2)] * 2


# Damage: together to the checkpoint before.


def test_S5_a_flipped_byte_is_read_again_elsewhere_and_all_ranks_go_back_together(drive: Drive) -> None:
    train(drive, [5, 10])
    spoil(drive.objects(10)[0], at=DATA)
    assert Job(drive, WORLD).run(restore) == [(5, 3)] * WORLD
    (found,) = records(drive, "checkpoint-quarantined")
    assert found["damage"]["object"].endswith(drive.objects(10)[0].name)
    assert found["damage"]["chunk"] == 0
    assert found["reported_by"]["process"] == f"pid {os.getpid()}"
    assert found["confirmed_by"]["process"] != f"pid {os.getpid()}"
    assert records(drive, "generation-started")[-1]["fallback_of"] == 2
    assert drive.objects(10)[0].key in everything(drive.storage)  # nothing is deleted


def test_S5_an_object_that_vanishes_after_the_answer(drive: Drive) -> None:
    train(drive, [5, 10])
    path = drive.objects(10)[0]
    assert Job(drive, 3).run(after_latest(path.unlink, 3)) == [(5, 3)] * 3
    assert records(drive, "checkpoint-quarantined")[0]["damage"]["observed"] == "missing"


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "flipped"])
def test_D2_a_manifest_that_is_not_the_committed_one(drive: Drive, cut: bool) -> None:
    train(drive, [5, 10])
    path = drive.manifest(10)
    assert Job(drive, 2).run(after_latest(lambda: spoil(path, at=200, cut=cut), 2)) == [(5, 3)] * 2
    assert records(drive, "checkpoint-quarantined")[0]["damage"]["object"].endswith(path.name)


def test_D2_a_sound_payload_that_is_not_the_committed_one(drive: Drive) -> None:
    train(drive, [5, 10])
    old, new = drive.objects(5)[0], drive.objects(10)[0]
    assert len(old.read_bytes()) == len(new.read_bytes())
    new.write_bytes(old.read_bytes())
    assert Job(drive, 2).run(restore) == [(5, 3)] * 2


def test_S5_damage_that_only_one_rank_reads_sends_all_back(drive: Drive) -> None:
    train(drive, [5, 10], world=WORLD, per_rank=True)
    path = drive.objects(10)[3]
    spoil(path, at=DATA)

    def life(client: CheckpointClient) -> tuple[int, object]:
        own: dict[str, object] = {"rank": -1, "position": torch.zeros(3)}
        step = client.restore(Trained().app, per_rank=own)
        assert isinstance(own["position"], torch.Tensor)
        assert own["position"].tolist() == [5.0] * 3
        return step, own["rank"]

    assert Job(drive, WORLD).run(life) == [(5, rank) for rank in range(WORLD)]
    assert records(drive, "checkpoint-quarantined")[0]["damage"]["object"].endswith(path.name)


def test_S5_two_damaged_checkpoints_in_a_row(drive: Drive) -> None:
    train(drive, [5, 10, 15])
    for step in (10, 15):
        spoil(drive.objects(step)[0], at=DATA)
    assert Job(drive, 2).run(restore) == [(5, 4)] * 2
    assert records(drive, "generation-started")[-1]["fallback_of"] == 3


def test_S5_a_reader_that_is_wrong_alone_quarantines_nothing_and_ends_after_three_fallbacks(drive: Drive) -> None:
    train(drive, [5, 10])
    drive.seen_by(1).flip(".safetensors", at=DATA, cached_only=True)
    errors = refused(Job(drive, 2))
    for error in errors:
        assert isinstance(error, Corrupt)
        reasons = error.fields["candidates"]
        assert len(reasons) == incarnation.MAX_FALLBACKS + 1
        assert all("step 10 (g00000001-000000000010-r1), rank 1: " in reason for reason in reasons)
        assert "chunk 0: expected " in str(error)
    assert records(drive, "checkpoint-quarantined") == []
    assert [body["resume_from"][-6:] for body in records(drive, "generation-started")[1:]] == ["010-r1"] * 4
    assert Job(drive, 1).run(restore) == [(10, 6)]  # another machine reads it well


def test_S5_a_reader_that_is_wrong_once_tries_again(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    train(drive, [5, 10])
    flipped = drive.seen_by(1).flip(".safetensors", at=DATA, cached_only=True)

    def life(client: CheckpointClient) -> tuple[int, int]:
        if client.rank == 0:
            report = client._transport.report_damage

            def heal(*args: Any) -> Any:
                flipped.heal()
                return report(*args)

            monkeypatch.setattr(client._transport, "report_damage", heal)
        return restore(client)

    assert Job(drive, 2).run(life) == [(10, 3)] * 2


def test_S5_a_second_reading_that_cannot_be_made_confirms_nothing(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(drive, [5, 10])
    spoil(drive.objects(10)[0], at=DATA)

    def unable(*args: Any) -> Any:
        raise Unavailable("planned: no second process")

    monkeypatch.setattr(incarnation.Incarnation, "_hand_in", _hand_in_with(unable))
    errors = refused(Job(drive, 2))
    assert all(isinstance(error, Corrupt) for error in errors)
    assert records(drive, "checkpoint-quarantined") == []
    assert "it could not be made: Unavailable: planned: no second process" in caplog.text


def _hand_in_with(reader: Callable[..., Any]) -> Callable[..., None]:
    original = incarnation.Incarnation._hand_in

    def hand_in(self: incarnation.Incarnation, *args: Any) -> None:
        self._transport.ledger._second_reader = reader
        original(self, *args)

    return hand_in


def test_S5_a_generation_that_is_ready_has_no_fallback_and_all_ranks_say_so(drive: Drive) -> None:
    train(drive, [5, 10])
    path = drive.objects(10)[0]
    both = threading.Barrier(2, action=lambda: spoil(path, at=DATA))

    def life(client: CheckpointClient) -> list[str]:
        assert restore(client) == (10, 2)
        both.wait(DEADLINE_SECONDS)
        with pytest.raises(Corrupt) as caught:
            client.restore(Trained().app)
        return [str(reason) for reason in caught.value.fields["candidates"]]

    first, second = Job(drive, 2).run(life)
    assert first == second
    assert len(first) == 2  # each rank found it
    assert len(records(drive, "generation-started")) == 2


def test_S6_damage_after_a_save_by_hand_is_an_error_on_all_ranks(drive: Drive) -> None:
    """Only rank 0 knows that the save declared the generation ready."""
    train(drive, [5])
    path = drive.objects(5)[0]
    both = threading.Barrier(2, action=lambda: spoil(path, at=DATA))

    def life(client: CheckpointClient) -> bool:
        client.latest()
        client.save(Trained().app, step=6, per_rank={}, wait=True)
        both.wait(DEADLINE_SECONDS)
        with pytest.raises(Corrupt):
            client.restore(Trained().app)
        return True

    assert Job(drive, 2).run(life) == [True, True]


def test_an_outage_while_loading_is_waited_out(drive: Drive) -> None:
    train(drive, [5])
    fault = drive.seen_by(1).fail_before("reader", ".safetensors", times=3)
    assert Job(drive, 2).run(restore) == [(5, 2)] * 2
    assert fault.fired == 3


def test_S7_an_outage_that_stays_while_loading_is_unreachable_and_no_fallback(drive: Drive, impatient: None) -> None:
    train(drive, [5, 10])
    drive.seen_by(1).fail_before("reader", times=None, error=Unavailable("planned: no answer"))
    errors = refused(Job(drive, 2))
    assert all(isinstance(error, Unreachable) for error in errors)
    assert errors[0].message == "rank 1: planned: no answer"
    assert len(records(drive, "generation-started")) == 2


# S4: all or nobody.


def test_S4_nobody_goes_on_when_one_rank_votes_no(drive: Drive) -> None:
    train(drive, [5], world=WORLD, per_rank=True)
    spoil(drive.objects(5)[3], at=DATA)
    errors = refused(Job(drive, WORLD))
    assert all(isinstance(error, Corrupt) for error in errors)
    assert "it is not started from zero" in errors[0].message


def test_S4_no_byte_is_written_anywhere_before_all_ranks_have_found_that_it_fits(drive: Drive) -> None:
    train(drive, [5])
    store = TellingStore(HashStore(), "/fitting/1/")
    last = drive.seen_by(2).pause("reader", ".safetensors")
    mine = [Trained(seed=rank) for rank in range(3)]
    before = [trained.digest() for trained in mine]

    def life(client: CheckpointClient) -> int:
        if client.rank == 2:
            threading.Thread(target=look, daemon=True).start()
        return client.restore(mine[client.rank].app)

    seen: list[list[list[bytes]]] = []

    def look() -> None:
        assert last.arrived.wait(DEADLINE_SECONDS)
        for _ in range(2):
            assert store.told.acquire(timeout=DEADLINE_SECONDS)
        seen.append([trained.digest() for trained in mine])
        last.resume.set()

    assert Job(drive, 3, store=store).run(life) == [5] * 3
    assert seen == [before]
    assert [trained.digest() for trained in mine] == [Trained(updates=5).digest()] * 3


def test_S4_nothing_is_installed_and_nobody_returns_before_the_last_rank_has_verified(drive: Drive) -> None:
    train(drive, [5])
    store = TellingStore(HashStore(), "/loaded/1/")
    last = drive.seen_by(2).pause("reader", ".safetensors", nth=2)
    mine = [Trained(seed=rank) for rank in range(3)]
    before = [trained.digest()[-1] for trained in mine]
    returned: list[int] = []

    def life(client: CheckpointClient) -> int:
        if client.rank == 2:
            threading.Thread(target=look, daemon=True).start()
        step = client.restore(mine[client.rank].app)
        returned.append(client.rank)
        return step

    seen: list[tuple[list[bytes], int, str]] = []

    def look() -> None:
        assert last.arrived.wait(DEADLINE_SECONDS)
        for _ in range(2):
            assert store.told.acquire(timeout=DEADLINE_SECONDS)
        seen.append(([trained.digest()[-1] for trained in mine], len(returned), drive.kinds()[-1]))
        last.resume.set()

    assert Job(drive, 3, store=store).run(life) == [5] * 3
    assert seen == [(before, 0, "generation-started")]
    assert [trained.digest() for trained in mine] == [Trained(updates=5).digest()] * 3


def test_S4_a_model_of_another_shape_on_one_rank_stops_all_before_anything_is_changed(drive: Drive) -> None:
    train(drive, [5])

    def other_shape(rank: int, trained: Trained) -> None:
        if rank == 1:
            trained.app["mean"] = torch.zeros(3)

    errors = refused(Job(drive, 3), other_shape, unread=True)
    assert all(isinstance(error, Invalid) for error in errors)
    assert "float32[3], in the checkpoint float32[2]" in errors[1].message
    assert errors[0].message.startswith("rank 1: the checkpoint does not fit")
    assert drive.kinds()[-1] == "generation-started"  # it is not ready


class Refusing:
    def state_dict(self) -> dict[str, object]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise ZeroDivisionError("planned")


class Accepting(Refusing):
    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def test_S4_a_load_state_dict_that_raises_on_one_rank_stops_all(drive: Drive) -> None:
    with Job(drive).client() as client:
        client.latest()
        client.save({"own": Accepting()}, step=1, wait=True)

    def life(client: CheckpointClient) -> list[CkptdError]:
        with pytest.raises(Invalid, match="planned") as caught:
            client.restore({"own": Refusing() if client.rank == 2 else Accepting()})
        return [caught.value]

    errors = [error for (error,) in Job(drive, 3).run(life)]
    assert errors[0].message.startswith("rank 2: ")
    assert "ZeroDivisionError" in repr(errors[2].__cause__)
    assert drive.kinds()[-1] == "generation-started"


class Moody(torch.nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("planned")


def test_S4_a_state_dict_that_raises_on_one_rank_stops_all(drive: Drive) -> None:
    train(drive, [5])

    def moody(client: CheckpointClient) -> str:
        trained = Trained()
        if client.rank == 1:
            trained.app["model"] = Moody(4, 3)
        with pytest.raises(Invalid) as caught:
            client.restore(trained.app)
        return caught.value.message

    said = "the checkpoint could not be loaded: ZeroDivisionError: planned"
    assert Job(drive, 2).run(moody) == [f"rank 1: {said}", said]


def test_S4_bytes_as_committed_that_are_no_payload_stop_all(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not damage of the storage: another reading would find the same, and an older checkpoint is no cure."""
    with monkeypatch.context() as patched:
        patched.setattr(payload, "header_bytes", lambda entries: bytes(4096))
        train(drive, [5])
    errors = refused(Job(drive, 2))
    assert all(isinstance(error, Corrupt) for error in errors)
    assert "is not a sound safetensors file" in errors[0].message
    assert records(drive, "checkpoint-quarantined") == []


def test_a_rank_that_cannot_reach_the_others_keeps_its_own_reason(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "GRACE_SECONDS", 0.0)
    train(drive, [5])

    def life(client: CheckpointClient) -> list[CkptdError]:
        client.latest()
        if client.rank == 0:
            return []
        client._started()._agreement._deadline_seconds = 0.2  # type: ignore[attr-defined]
        trained = Trained()
        trained.app["mean"] = torch.zeros(3)
        with pytest.raises(Invalid, match="does not fit") as caught:
            client.restore(trained.app)
        return [caught.value]

    _, (error,) = Job(drive, 2).run(life)
    assert "not all ranks could be told: Unreachable: rank 1 of 2 waited 0 s for ranks [0]" in error.__notes__[0]


# By hand.


def test_S6_by_hand_the_first_save_declares_the_generation_ready(drive: Drive) -> None:
    train(drive, [5])

    def life(client: CheckpointClient) -> object:
        found = client.latest()
        assert found is not None
        assert drive.kinds()[-1] != "generation-ready"
        state = found.load()
        client.save(Trained(updates=6).app, step=6, per_rank={}, wait=True)
        return state["epoch"]

    assert Job(drive, 2).run(life) == [5, 5]
    assert drive.kinds()[-2:] == ["generation-ready", "checkpoint-committed"]


def test_S6_restore_declares_it_when_all_ranks_hold_the_state(drive: Drive) -> None:
    train(drive, [5])
    last = drive.seen_by(1).pause("reader", ".safetensors")

    def life(client: CheckpointClient) -> tuple[int, int]:
        if client.rank == 1:
            threading.Thread(target=look, daemon=True).start()
        return restore(client)

    kinds: list[str] = []

    def look() -> None:
        assert last.arrived.wait(DEADLINE_SECONDS)
        kinds.extend(drive.kinds())
        last.resume.set()

    assert Job(drive, 2).run(life) == [(5, 2)] * 2
    assert kinds[-1] == "generation-started"
    assert drive.kinds()[-1] == "generation-ready"


def test_a_ready_that_cannot_be_written_stops_all_ranks(drive: Drive, impatient: None) -> None:
    def life(client: CheckpointClient) -> str:
        if client.rank == 0:
            client.latest()
            client._transport.ledger.deadline_seconds = 0.0
            drive.seen_by(0).fail_before("list", times=None, error=Unavailable("planned: gone"))
        with pytest.raises(Unreachable) as caught:
            client.restore(Trained().app)
        return caught.value.message

    found = Job(drive, 2).run(life)
    assert found == ["planned: gone"] * 2


def test_D1_damage_found_by_hand_names_object_and_chunk_and_tells_of_the_second_reading(drive: Drive) -> None:
    train(drive, [5, 10])
    path = drive.objects(10)[0]
    spoil(path, at=DATA)
    with Job(drive).client() as client:
        found = client.latest()
        assert found is not None
        with pytest.raises(Corrupt) as caught:
            found.load()
    assert f"chunk 0 of runs/{RUN}/data/" in caught.value.message
    assert caught.value.fields["object"].endswith(path.name)
    assert caught.value.__notes__ == [
        f"second reading: {caught.value.fields['object']}: {caught.value.fields['observed']}"
    ]
    assert Job(drive).run(restore) == [(5, 3)]  # the next start passes it over


def test_damage_found_by_hand_stays_the_error_when_there_is_no_second_reading(drive: Drive) -> None:
    train(drive, [5])
    spoil(drive.objects(5)[0], at=DATA)
    with Job(drive).client() as client:
        found = client.latest()
        assert found is not None
        drive.seen_by(0).fail_before("list", times=None, error=Unavailable("planned: gone"))
        with pytest.raises(Corrupt) as caught:
            found.load()
    assert "it could not be made: Unavailable: planned: gone" in caught.value.__notes__[0]


@pytest.mark.parametrize("place", ["header length", "header", "data", "last byte"])
def test_D1_no_byte_may_differ(drive: Drive, place: str) -> None:
    train(drive, [5])
    (path,) = drive.objects(5)
    spoil(path, at={"header length": 1, "header": 60, "data": DATA, "last byte": -1}[place])
    with Job(drive).client() as client:
        found = client.latest()
        assert found is not None
        with pytest.raises(Corrupt, match="is damaged"):
            found.read_shared()


# Making one.


def test_from_env_takes_what_the_environment_says_and_options_go_before(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_URL", drive.url)
    monkeypatch.setenv("CKPTD_RUN", "of-env")
    with CheckpointClient.from_env() as client:
        assert (client.run, client.rank, client.world_size) == ("of-env", 0, 1)
        assert client.latest() is None
    with CheckpointClient.from_env(run="of-option", start_deadline_seconds=1.0) as client:
        assert client.run == "of-option"
    assert sorted(drive.ledger().runs()) == ["of-env", "of-option"]


def test_from_env_passes_token_and_storage_on(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(drive, token="secret") as url:
        monkeypatch.setenv("CKPTD_URL", url)
        monkeypatch.setenv("CKPTD_RUN", RUN)
        monkeypatch.setenv("CKPTD_TOKEN", "secret")
        monkeypatch.setenv("CKPTD_STORAGE", drive.url_for("mine"))
        with CheckpointClient.from_env() as client:
            client.restore(Trained().app)
            client.save(Trained().app, step=1, wait=True)
    puts = [key for operation, key in drive.seen_by("mine").history if operation == "put" and key.startswith("runs/")]
    assert len(puts) == 3  # payload, part, manifest; the service keeps the log


@pytest.mark.parametrize(
    ("variables", "said"),
    [([], "CKPTD_URL and CKPTD_RUN"), (["CKPTD_URL"], "CKPTD_RUN"), (["CKPTD_RUN"], "CKPTD_URL")],
)
def test_from_env_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, variables: list[str], said: str) -> None:
    for name in ("CKPTD_URL", "CKPTD_RUN", "CKPTD_TOKEN", "CKPTD_STORAGE"):
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "x")
    with pytest.raises(Invalid, match=f"^{said} is not set") as caught:
        CheckpointClient.from_env()
    assert "CKPTD_URL" in caught.value.do


@pytest.mark.parametrize(
    ("url", "run", "field"),
    [("", "r", "url"), ("ftp://x/y", "r", "url"), ("relative/path", "r", "url"), ("http://", "r", "url"),
     ("http://[::1", "r", "url"), ("file:///tmp", "Up", "run"), ("file:///tmp", "../x", "run")],
)  # fmt: skip
def test_a_url_or_a_run_that_cannot_be_one_is_refused_at_once(drive: Drive, url: str, run: str, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        CheckpointClient(url, run, rank=0, world_size=1)
    assert caught.value.fields["field"] == field


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_rank_and_world_come_from_torchruns_environment(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with CheckpointClient(drive.url, RUN) as client:
        assert (client.rank, client.world_size) == (2, 4)
        with pytest.raises(Invalid, match="before the process group formed"):
            client.latest()


def test_rank_and_world_come_from_the_process_group_first(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, group: None
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with CheckpointClient(drive.url, RUN) as client:
        assert (client.rank, client.world_size) == (0, 1)


def test_a_process_group_that_says_otherwise_is_an_error(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with CheckpointClient(drive.url, RUN) as client:
        request.getfixturevalue("group")
        with pytest.raises(Invalid, match="rank 2 of 4 was assumed, the process group says rank 0 of 1"):
            client.latest()
    with pytest.raises(Invalid, match="rank 1 of 2 was assumed"):
        CheckpointClient(drive.url, RUN, rank=1, world_size=2)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(drive: Drive, rank: int, world: int) -> None:
    with pytest.raises(Invalid, match="expected 0 <= rank < world_size"):
        CheckpointClient(drive.url, RUN, rank=rank, world_size=world)


def test_an_environment_that_is_no_number_is_named(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(Invalid, match="RANK='first'"):
        CheckpointClient(drive.url, RUN)


@pytest.mark.parametrize(
    ("variables", "job"),
    [({"CKPTD_JOB": "mine", "SLURM_JOB_ID": "7"}, "mine"), ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "x"}, "7"),
     ({"TORCHELASTIC_RUN_ID": "x"}, "x"), ({"TORCHELASTIC_RUN_ID": "none"}, None), ({}, None)],
)  # fmt: skip
def test_the_job_has_a_name_that_people_know(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    CheckpointClient(drive.url, RUN, rank=0, world_size=1).close()
    (opened,) = records(drive, "attempt-opened")
    assert opened["job"] == job or opened["job"].endswith(f":{os.getppid()}")
    assert (job is None) == (":" in opened["job"])


def test_a_client_that_asked_nothing_closes_quietly_and_knows_nothing(drive: Drive) -> None:
    with Job(drive, 2).client(1) as client:
        for name in ("generation", "resumed_same_world"):
            with pytest.raises(Invalid, match="nothing is known"):
                getattr(client, name)
    client.close()
