"""Tensors that did not change are written once, and every checkpoint that needs them stays whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ckptd.errors import Conflict
from ckptd.keeper import Keeper
from ckptd.manifest import Manifest
from ckptd.retaining import RetainRequest, retain
from ckptd.second import read_here
from ckptd.testing.auditor import Auditor
from ckptd_client import CheckpointClient
from tests.client.ranks import RUN, Drive, Job
from tests.homes import spoil

FROZEN_BYTES = 400_000


def lora(step: int) -> dict[str, Any]:
    """A frozen base and what is trained beside it; some bytes of an odd length lie between them."""
    generator = torch.Generator().manual_seed(7)
    base = {f"layer{i}": torch.rand(FROZEN_BYTES // 16, generator=generator) for i in range(4)}
    return {"base": base, "adapter": torch.full((50,), float(step)), "log": bytes([step]) * 301, "step": step}


def blank() -> dict[str, Any]:
    state = lora(0)
    state["base"] = {name: torch.zeros_like(value) for name, value in state["base"].items()}
    return state


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    bases = zip(left["base"].values(), right["base"].values(), strict=True)
    return all(torch.equal(a, b) for a, b in [*bases, (left["adapter"], right["adapter"])]) and (
        (left["log"], left["step"]) == (right["log"], right["step"])
    )


def manifest(drive: Drive, step: int) -> Manifest:
    ledger = drive.ledger()
    return ledger.manifest(ledger.checkpoint_at(RUN, step).manifest)


def train(drive: Drive, first: int, last: int, world: int = 1, **options: Any) -> None:
    def life(client: CheckpointClient) -> None:
        client.restore(blank())
        for step in range(first, last + 1):
            client.save(lora(step), step=step, wait=True)

    Job(drive, world, options=options).run(life)


def resumed(drive: Drive, world: int = 1) -> list[int]:
    """The step that all ranks come back to, with the state of that step."""

    def life(client: CheckpointClient) -> int:
        state = blank()
        step = client.restore(state)
        assert same(state, lora(step))
        return step

    return Job(drive, world).run(life)


def test_what_is_frozen_is_written_once(drive: Drive) -> None:
    train(drive, 1, 5)
    sizes = [manifest(drive, step).payload_bytes for step in range(1, 6)]
    assert all(size > FROZEN_BYTES for size in sizes[:2])
    assert all(size < 10_000 for size in sizes[2:])
    (lender,) = {save for step in (3, 4, 5) for save in manifest(drive, step).borrows}
    assert lender == manifest(drive, 2).save
    assert resumed(drive, 2) == [5, 5]
    Auditor(drive.storage, RUN).assert_clean(acknowledged=[1, 2, 3, 4, 5])


def test_without_it_everything_is_written_each_time(drive: Drive) -> None:
    train(drive, 1, 4, incremental=False)
    assert all(manifest(drive, step).payload_bytes > FROZEN_BYTES for step in range(1, 5))


def test_a_base_that_moves_after_all_is_written(drive: Drive) -> None:
    def life(client: CheckpointClient) -> None:
        client.restore(blank())
        for step in range(1, 6):
            state = lora(step)
            if step == 5:
                state["base"]["layer2"][17] += 1
            client.save(state, step=step, wait=True)

    Job(drive).run(life)
    state = blank()
    with Job(drive).client() as client:
        assert client.restore(state) == 5
    expected = lora(5)
    expected["base"]["layer2"][17] += 1
    assert same(state, expected)


def test_a_lender_that_is_retired_goes_on_lending(drive: Drive) -> None:
    """Retention gives the lender up; its bytes stay, and training goes on borrowing them."""
    keeper = Keeper(drive.ledger(), reader=read_here)

    def life(client: CheckpointClient) -> None:
        client.restore(blank())
        for step in range(1, 9):
            client.save(lora(step), step=step, wait=True)
            if step > 2:
                retain(keeper, RUN, RetainRequest(keep_last=2))

    Job(drive).run(life)
    status = {c.step: c.status for c in drive.ledger().checkpoints(RUN)}
    assert status[2] == "retired"
    assert manifest(drive, 8).borrows == (manifest(drive, 2).save,)
    assert resumed(drive) == [8]
    Auditor(drive.storage, RUN).assert_clean(acknowledged=[7, 8])


def test_a_lender_in_quarantine_costs_one_save_and_then_all_is_written(drive: Drive) -> None:
    keeper = Keeper(drive.ledger())

    def life(client: CheckpointClient) -> None:
        client.restore(blank())
        for step in (1, 2, 3):
            client.save(lora(step), step=step, wait=True)
        keeper.quarantine(RUN, manifest(drive, 2).save, who="ann", reason="suspicious")
        with pytest.raises(Conflict, match="borrows from"):
            client.save(lora(4), step=4, wait=True)
        client.save(lora(5), step=5, wait=True)

    Job(drive).run(life)
    assert manifest(drive, 5).borrows == ()
    assert resumed(drive) == [5]


def test_damage_of_what_many_borrow_ends_at_a_checkpoint_without_it(drive: Drive) -> None:
    """One fallback, though six checkpoints hang on the damaged object."""
    train(drive, 1, 8)
    spoil(drive.objects(2)[0], at=-1000)
    assert resumed(drive, 2) == [1, 1]
    generations = [r["body"]["generation"] for r in drive.records() if r["kind"] == "generation-started"]
    assert len(generations) == 3


def test_each_rank_borrows_what_it_wrote(drive: Drive) -> None:
    train(drive, 1, 4, world=2, parallel=True)
    parts = manifest(drive, 4).parts
    assert all(part.borrowed for part in parts)
    assert {name for part in parts for item in part.borrowed for name in item.names} == {
        f"shared/base/layer{i}" for i in range(4)
    }
    assert resumed(drive, 3) == [4, 4, 4]


def test_with_a_spool_everything_is_written(drive: Drive, tmp_path: Any) -> None:
    """What waits on the local disk may come late, when what it would borrow from is gone."""
    train(drive, 1, 4, spool=tmp_path / "spool")
    assert all(manifest(drive, step).payload_bytes > FROZEN_BYTES for step in range(1, 5))
    assert resumed(drive) == [4]
