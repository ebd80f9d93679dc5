"""A state that all ranks hold alike is written by all of them, and comes back whole, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptd.errors import CkptdError, SaveOff
from ckptd.testing.auditor import Auditor
from ckptd_client import CheckpointClient
from tests.client.ranks import RUN, Drive, Job, Trained, on_threads, results
from tests.homes import spoil

PARALLEL = {"parallel": True}


def written(drive: Drive, step: int) -> Any:
    ledger = drive.ledger()
    return ledger.manifest(ledger.checkpoint_at(RUN, step).manifest)


def save_together(drive: Drive, world: int, step: int, *, per_rank: bool = False) -> None:
    def life(client: CheckpointClient) -> None:
        trained = Trained()
        client.restore(trained.app)
        trained = Trained(updates=step)
        own = {"rank": client.rank} if per_rank else None
        client.save(trained.app, step=step, per_rank=own, wait=True)

    Job(drive, world, options=PARALLEL).run(life)


def restored(drive: Drive, world: int) -> list[tuple[int, list[bytes]]]:
    def life(client: CheckpointClient) -> tuple[int, list[bytes]]:
        trained = Trained()
        return client.restore(trained.app), trained.digest()

    return Job(drive, world).run(life)


@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_writes_a_part_and_all_parts_are_the_state_once(drive: Drive, world: int) -> None:
    save_together(drive, world, 3)
    parts = written(drive, 3).parts
    assert len(parts) == world
    assert [part.shared is not None for part in parts] == [True] + [False] * (world - 1)
    assert all(part.payload.size > 4096 for part in parts)
    for other in (world, 1, 4):
        assert restored(drive, other) == [(3, Trained(updates=3).digest())] * other
    Auditor(drive.storage, RUN).assert_clean(acknowledged=[3])


def test_state_of_their_own_goes_with_it(drive: Drive) -> None:
    save_together(drive, 2, 1, per_rank=True)

    def life(client: CheckpointClient) -> object:
        trained, own = Trained(), dict[str, object](rank=None)
        assert client.restore(trained.app, per_rank=own) == 1
        assert trained.digest() == Trained(updates=1).digest()
        return own["rank"]

    assert Job(drive, 2).run(life) == [0, 1]


def test_alone_it_is_a_save_like_any_other(drive: Drive) -> None:
    save_together(drive, 1, 2)
    assert len(written(drive, 2).parts) == 1
    assert restored(drive, 2) == [(2, Trained(updates=2).digest())] * 2


@pytest.mark.parametrize("wrong", ["another shape", "not divided"])
def test_W9_ranks_that_hold_other_tensors_make_no_checkpoint(drive: Drive, wrong: str) -> None:
    """All learn why, and the save after it is made."""

    def life(client: CheckpointClient) -> str:
        trained = Trained(updates=1)
        client.restore(trained.app)
        state = dict(trained.app)
        if client.rank == 1 and wrong == "another shape":
            state["mean"] = torch.zeros(3)
        if client.rank == 1 and wrong == "not divided":
            client._gatherer.divided = False
        own: dict[str, object] | None = {} if wrong == "not divided" else None
        with pytest.raises(CkptdError) as caught:
            client.save(state, step=1, per_rank=own, wait=True)
        client._gatherer.divided = True
        client.save(trained.app, step=2, wait=True)
        return str(caught.value)

    told = Job(drive, 2, options=PARALLEL).run(life)
    assert all("rank 1 holds other tensors than rank 0" in message for message in told), told
    assert drive.steps() == [2]


def test_a_rank_that_cannot_write_its_part_calls_the_save_off_for_all(drive: Drive) -> None:
    full = drive.seen_by(1).fail_before("put", lambda key: key.endswith(".safetensors"), times=None)

    def life(client: CheckpointClient) -> list[CkptdError]:
        trained = Trained(updates=1)
        client.restore(trained.app)
        with pytest.raises(CkptdError) as caught:
            client.save(trained.app, step=1, wait=True)
        if client.rank == 1:
            full.heal()
        return [caught.value]

    (first,), (second,) = Job(drive, 2, options=PARALLEL).run(life)
    assert isinstance(first, SaveOff)
    assert "rank 1 could not write" in first.message
    assert drive.steps() == []
    assert "planned: put failed" in second.message


def test_a_rank_that_was_not_told_to_divide_is_found_at_the_start(drive: Drive) -> None:
    job = Job(drive, 2)

    def on_rank(rank: int) -> CkptdError:
        with job.client(rank, parallel=rank == 0) as client, pytest.raises(CkptdError) as caught:
            client.restore(Trained().app)
        return caught.value

    found = on_threads([lambda: [on_rank(0)], lambda: [on_rank(1)]])
    (first,), (second,) = results(found)
    assert first.message == second.message
    assert "different contracts: the option parallel: True and False" in first.message


def test_damage_of_any_part_sends_all_ranks_back(drive: Drive) -> None:
    save_together(drive, 2, 1)
    save_together(drive, 2, 2)
    spoil(drive.objects(2)[1])
    assert restored(drive, 2) == [(1, Trained(updates=1).digest())] * 2
