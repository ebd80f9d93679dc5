"""The resume contract: what differs is told, what must not differ is refused on all ranks, and parts come and go only
on purpose. And saves that succeed but hold nothing new are told, too."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ckptd import __version__
from ckptd.cli import main as cli
from ckptd.errors import Invalid
from ckptd.manifest import ContractValue
from ckptd_client import CheckpointClient
from ckptd_client.contract import Contract, Difference
from ckptd_client.data import RngState
from tests.client.ranks import RUN, Drive, Job, Trained, on_threads, results

GIVEN: dict[str, ContractValue] = {"seed": 1, "batch": 32, "accumulate": 2, "data": "en-it", "amp": False}


def saved(drive: Drive, app: Mapping[str, object] | None = None, *, world: int = 1, **options: Any) -> None:
    """One incarnation that saves step 3."""

    def life(client: CheckpointClient) -> None:
        client.latest()
        client.save(app or Trained(updates=3).app, step=3, wait=True)

    Job(drive, world, options=options).run(life)


def refusals(drive: Drive, world: int, app: Mapping[str, object] | None = None, **options: Any) -> list[Invalid]:
    """`restore` on all ranks, each of which must refuse and change nothing."""

    def life(client: CheckpointClient) -> list[Invalid]:
        trained = Trained(seed=5)
        trained.app.update(app or {})
        before = trained.digest()
        with pytest.raises(Invalid) as caught:
            client.restore(trained.app)
        assert trained.digest() == before
        return [caught.value]

    found = [error for (error,) in Job(drive, world, options=options).run(life)]
    assert drive.kinds()[-1] == "generation-started"  # never ready
    return found


def recorded(drive: Drive, step: int = 3) -> dict[str, Any]:
    ledger = drive.ledger()
    return dict(ledger.manifest(ledger.checkpoint_at(RUN, step).manifest).contract)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name == "ckptd"]


# What is recorded.


def test_the_manifest_says_under_which_conditions_it_was_saved(drive: Drive) -> None:
    def life(client: CheckpointClient) -> None:
        client.latest()
        client.save(Trained(updates=3).app, step=3, per_rank={"rng": RngState()}, wait=True)

    Job(drive, 2, options={"contract": GIVEN}).run(life)
    found = recorded(drive)
    assert {name: found[name] for name in GIVEN} == GIVEN
    assert type(found["amp"]) is bool
    assert (found["world"], found["ckptd"], found["torch"]) == (2, __version__, str(torch.__version__))
    assert found["python"].startswith("3.")
    assert found["dtypes"] == "float32"
    assert {name: value for name, value in found.items() if "." in name} == {
        "app_state.model": "module",
        "app_state.optimizer": "optimizer AdamW",
        "app_state.scheduler": "scheduler StepLR",
        "app_state.mean": "tensor",
        "app_state.epoch": "value",
        "app_state.config": "dict",
        "per_rank.rng": "stateful",
    }


def test_show_prints_it(drive: Drive, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    saved(drive, contract=GIVEN)
    monkeypatch.setattr(sys, "argv", ["ckptd", "show", RUN, "3", "--url", drive.url])
    with pytest.raises(SystemExit, match="0"):
        cli.run()
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert ["contract", "saved with"] in rows
    assert ["seed", "1"] in rows
    assert ["app_state.optimizer", "optimizer AdamW"] in rows


# What differs.


def test_differences_are_told_with_both_values_and_the_start_goes_on(
    drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    saved(drive, world=2, contract=GIVEN)
    now = {**GIVEN, "batch": 64, "accumulate": 1, "new": "x"}
    del now["data"]

    def life(client: CheckpointClient) -> int:
        return client.restore(Trained().app)

    with caplog.at_level(logging.INFO, "ckptd"):
        assert Job(drive, 1, options={"contract": now}).run(life) == [3]
    assert [line.partition(", step 3: ")[2] for line in warned(caplog) if "contract" in line] == [
        "accumulate: saved 2, now 1 (warning)",
        "batch: saved 32, now 64 (warning)",
        "data: saved 'en-it', now nothing (warning)",
        "new: saved nothing, now 'x' (warning)",
        "world: saved 2, now 1 (warning)",
    ]


def test_the_same_contract_is_silent(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    saved(drive, contract=GIVEN)
    with Job(drive).client(contract=GIVEN, strict=tuple(GIVEN)) as client:
        assert client.restore(Trained().app) == 3
    assert warned(caplog) == []


def test_severity_depends_on_the_field() -> None:
    contract = Contract({"batch": 1, "seed": 1}, strict=("seed", "world"), allow=("app_state.ema", "app_state.opt"))
    before: dict[str, ContractValue] = {
        "torch": "2.13.0+cpu", "python": "3.11.2", "ckptd": "1.0.0", "batch": 1, "seed": 1, "world": 4,
        "app_state.a": "module", "app_state.b": "optimizer SGD", "app_state.c": "value",
        "app_state.opt": "optimizer SGD",
    }  # fmt: skip
    after: dict[str, ContractValue] = {
        "torch": "2.13.1", "python": "3.12.2", "ckptd": "1.0.0", "batch": 2, "seed": 2, "world": 2,
        "app_state.ema": "module", "app_state.b": "optimizer AdamW", "app_state.c": "tensor",
        "app_state.opt": "optimizer Adam",
    }  # fmt: skip
    assert {d.field: d.severity for d in contract.compare(before, after)} == {
        "torch": "info", "python": "warning", "batch": "warning", "seed": "refused", "world": "refused",
        "app_state.a": "refused", "app_state.ema": "warning", "app_state.b": "refused", "app_state.c": "warning",
        "app_state.opt": "warning",
    }  # fmt: skip
    assert contract.compare(before, before) == []
    # Of a checkpoint without a contract nothing is known, and a strict field must be known.
    assert contract.compare({}, after) == [
        Difference("seed", None, 2, "refused"), Difference("world", None, 2, "refused"),
    ]  # fmt: skip


# What is refused.


def test_strict_fields_are_refused_on_every_rank_with_both_values_and_what_to_do(drive: Drive) -> None:
    saved(drive, contract=GIVEN)
    options: dict[str, Any] = {
        "contract": {**GIVEN, "seed": 2, "data": "de-fr", "batch": 8},
        "strict": ("seed", "data"),
    }
    errors = refusals(drive, 3, **options)
    for error in errors:
        assert error.fields["differences"] == [
            {"field": "data", "saved": "en-it", "present": "de-fr"},
            {"field": "seed", "saved": 1, "present": 2},
        ]
        assert "data: saved 'en-it', now 'de-fr' (refused)" in error.message
        assert "batch: saved 32, now 8 (warning)" in error.message
        assert "checkpoint of step 3 (g00000001-000000000003-r1)" in error.message
        assert "take them out of strict=" in error.do
    options["strict"] = ()
    assert Job(drive, 3, options=options).run(lambda client: client.restore(Trained().app)) == [3] * 3


def test_a_refusal_on_one_rank_stops_all_before_anything_is_read_or_installed(drive: Drive) -> None:
    saved(drive)
    trained = [Trained(seed=rank) for rank in range(3)]
    trained[1].app["optimizer"] = torch.optim.SGD(trained[1].model.parameters(), lr=0.1)
    before = [each.digest() for each in trained]
    reading = drive.seen_by(1).fail_before("reader", ".safetensors", times=None)

    def life(client: CheckpointClient) -> str:
        with pytest.raises(Invalid) as caught:
            client.restore(trained[client.rank].app)
        return caught.value.message

    errors = Job(drive, 3).run(life)
    said = "app_state.optimizer: saved 'optimizer AdamW', now 'optimizer SGD' (refused)"
    assert all(said in error for error in errors)
    assert errors[0].startswith("rank 1: the checkpoint of step 3")
    assert reading.fired == 0
    assert [each.digest() for each in trained] == before


def test_ranks_with_different_contracts_are_told_apart_at_once_even_in_a_new_run(drive: Drive) -> None:
    def life(client: CheckpointClient) -> None:
        with pytest.raises(Invalid, match=r"ranks 0 and 1 .* seed: 0 and 1"):
            client.restore(Trained().app)

    job = Job(drive, 2)
    with job.client(0, contract={"seed": 0}) as first, job.client(1, contract={"seed": 1}) as second:
        results(on_threads([lambda: life(first), lambda: life(second)]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"contract": {"world": 3}}, "contract field 'world'"),
        ({"contract": {"app_state.x": 3}}, "contract field 'app_state.x'"),
        ({"contract": {"": 3}}, "contract field ''"),
        ({"contract": {"lr": float("nan")}}, "contract field lr: expected a number"),
        ({"contract": {"lr": [1]}}, "contract field lr: expected a number"),
        ({"contract": {"text": "x" * 501}}, "contract field text"),
        ({"contract": {str(n): n for n in range(65)}}, "65 fields"),
        ({"strict": "seed"}, "strict='seed': expected a list"),
        ({"contract": {"seed": 1}, "strict": ("sed",)}, r"\['sed'\]"),
        ({"allow": ("emma",)}, r"\['emma'\]"),
        ({"contract": {"seed": 1}, "strict": ("seed",), "allow": ("seed",)}, "both strict and allowed"),
    ],
)
def test_a_contract_that_cannot_be_one_is_refused_when_it_is_made(options: dict[str, Any], said: str) -> None:
    arguments = {"given": options.get("contract"), "strict": options.get("strict", ())}
    with pytest.raises(Invalid, match=said):
        Contract(**arguments, allow=options.get("allow", ()))


# Parts that come and go.


def test_missing_and_new_parts_are_refused_by_name_and_the_way_out_is_told(drive: Drive) -> None:
    trained = Trained(updates=3)
    trained.app["ema"] = torch.nn.Linear(2, 2)
    saved(drive, trained.app)
    errors = refusals(drive, 2, {"loader": {"position": 3}})
    for error in errors:
        assert "app_state.ema: saved 'module', now nothing (refused)" in error.message
        assert "app_state.loader: saved nothing, now 'dict' (refused)" in error.message
        assert "allow=('app_state.ema', 'app_state.loader',)" in error.do


def test_allowed_parts_stay_as_they_are_built_and_the_rest_is_restored(
    drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    before = Trained(updates=3)
    before.app["ema"] = torch.nn.Linear(2, 2)
    saved(drive, before.app)
    trained = Trained(seed=9)
    trained.app["loader"] = {"position": 3}
    other = torch.optim.SGD(trained.model.parameters(), lr=0.7, momentum=0.9)
    trained.app["optimizer"] = other
    del trained.app["scheduler"]
    allow = ("app_state.ema", "app_state.loader", "app_state.optimizer", "app_state.scheduler")
    with Job(drive).client(allow=allow) as client:
        assert client.restore(trained.app) == 3
    assert trained.app["loader"] == {"position": 3}
    assert "ema" not in trained.app
    assert (other.param_groups[0]["lr"], dict(other.state)) == (0.7, {})
    assert trained.app["epoch"] == 3
    assert torch.equal(trained.model.weight, before.model.weight)
    told = "\n".join(warned(caplog))
    for name in allow:
        assert f"{name}: saved " in told


def test_an_allowed_part_that_fits_is_restored_like_any_other(drive: Drive) -> None:
    saved(drive)
    trained = Trained(seed=9)
    with Job(drive).client(allow=("app_state.optimizer", "app_state.never")) as client:
        client.restore(trained.app)
    assert trained.digest() == Trained(updates=3).digest()


def test_a_rank_without_its_own_state_is_told_and_a_new_part_of_it_can_be_allowed(
    drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    def first(client: CheckpointClient) -> None:
        client.latest()
        client.save(Trained(updates=3).app, step=3, per_rank={"rank": client.rank}, wait=True)

    Job(drive, 2).run(first)

    def again(client: CheckpointClient) -> tuple[bool, dict[str, object]]:
        own: dict[str, object] = {"rank": -1, "new": "mine"}
        client.restore(Trained().app, per_rank=own)
        return client.per_rank_restored, own

    with pytest.raises(BaseExceptionGroup) as caught:
        Job(drive, 2).run(again)
    assert "per_rank['new'] is missing in the checkpoint" in str(caught.value.exceptions[0])
    allowed = {"allow": ("per_rank.new",)}
    assert Job(drive, 2, options=allowed).run(again) == [(True, {"rank": r, "new": "mine"}) for r in range(2)]
    assert not [line for line in warned(caplog) if "no per-rank state" in line]
    assert Job(drive, 3, options=allowed).run(again) == [(False, {"rank": -1, "new": "mine"})] * 3
    (told,) = [line for line in warned(caplog) if "no per-rank state" in line]
    assert "it was saved by 2 ranks, now there are 3" in told
    assert "seed_rank(seed, generation=4, rank)" in told


# Random numbers.


class Drawing:
    """Loading it draws random numbers, as building a loader or a sampler may."""

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        torch.rand(3), random.random(), np.random.random()


def test_random_numbers_are_restored_last_and_later_seeding_is_noticed(drive: Drive) -> None:
    rng = RngState()
    assert not rng.moved
    with Job(drive).client() as client:
        client.latest()
        torch.manual_seed(3)
        client.save({"draws": Drawing()}, step=1, per_rank={"rng": rng}, wait=True)
    expected = (float(torch.rand(())), random.random(), float(np.random.random()))
    torch.manual_seed(99)
    with Job(drive).client() as client:
        client.restore({"draws": Drawing()}, per_rank={"rng": rng})
        assert client.per_rank_restored
    assert not rng.moved
    assert (float(torch.rand(())), random.random(), float(np.random.random())) == expected
    assert rng.moved
    for draw in (random.random, np.random.random, lambda: torch.manual_seed(5)):
        rng.load_state_dict(rng.state_dict())
        assert not rng.moved
        draw()
        assert rng.moved


# Optimizers.


def warnings_of(drive: Drive, app: Mapping[str, object], step: int = 2) -> list[str]:
    with Job(drive, run_name=f"run-{random.randrange(10**9)}").client() as client:
        client.latest()
        return client.save(app, step=step, wait=True).warnings


class Leaky(torch.optim.AdamW):
    """Its state_dict() has lost what a helper forgot to build."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


def test_an_optimizer_without_its_state_is_told_at_the_save(drive: Drive) -> None:
    trained = Trained(updates=2)
    assert warnings_of(drive, trained.app) == []
    unused = torch.optim.AdamW(torch.nn.Linear(4, 3).parameters())
    (told,) = warnings_of(drive, {"model": trained.model, "deep": {"optimizer": unused}})
    assert told == "app_state['deep']['optimizer'] has no state at step 2: is it the optimizer that is stepped?"
    assert warnings_of(drive, {"optimizer": unused}, step=0) == []
    leaky = Leaky(trained.model.parameters())
    leaky.step()
    (told,) = warnings_of(drive, {"optimizer": leaky})
    assert told == "app_state['optimizer'].state_dict() holds state of 0 parameters, the optimizer of 2"


def test_parameters_that_were_never_stepped_are_right_and_those_with_a_gradient_are_not(drive: Drive) -> None:
    used, unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*used.parameters(), *unused.parameters()])
    used(torch.ones(2)).sum().backward()
    optimizer.step()
    app = {"used": used, "unused": unused, "optimizer": optimizer}
    assert warnings_of(drive, app) == []
    unused(torch.ones(2)).sum().backward()  # in the middle of an accumulation, before its step
    (told,) = warnings_of(drive, app)
    assert told == "app_state['optimizer']: 2 of 4 parameters have a gradient and no optimizer state"


@pytest.mark.parametrize("kind", ["sgd", "lbfgs", "all frozen"])
def test_optimizers_that_keep_no_state_for_each_parameter_are_no_suspects(drive: Drive, kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    if kind == "all frozen":
        model.requires_grad_(False)
    if kind == "lbfgs":
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters())
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2)).square().sum()
        if loss.requires_grad:
            loss.backward()
        return float(loss.item())

    optimizer.step(closure)
    assert warnings_of(drive, {"model": model, "optimizer": optimizer}) == []


def test_parameters_without_state_come_back_without(drive: Drive) -> None:
    def build() -> tuple[torch.nn.Linear, dict[str, object]]:
        used, unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam([*used.parameters(), *unused.parameters()])
        return used, {"used": used, "unused": unused, "optimizer": optimizer}

    used, app = build()
    used(torch.ones(2)).sum().backward()
    optimizer = app["optimizer"]
    assert isinstance(optimizer, torch.optim.Adam)
    optimizer.step()
    saved(drive, app)
    _, live = build()
    with Job(drive).client() as client:
        assert client.restore(live) == 3
    loaded = live["optimizer"]
    assert isinstance(loaded, torch.optim.Adam)
    assert sorted(loaded.state_dict()["state"]) == [0, 1]


class Deaf(torch.optim.AdamW):
    """Takes any state and keeps none."""

    def load_state_dict(self, state: Any) -> None:
        return


Deaf.__qualname__ = "AdamW"


def test_an_optimizer_that_loses_its_state_while_loading_stops_all_ranks(drive: Drive) -> None:
    saved(drive)

    def life(client: CheckpointClient) -> str:
        trained = Trained()
        if client.rank == 1:
            trained.app["optimizer"] = Deaf(trained.model.parameters())
        with pytest.raises(Invalid) as caught:
            client.restore(trained.app)
        return caught.value.message

    said = "state was loaded and is not there: app_state['optimizer'] holds state of 0 tensors after loading"
    first, second = Job(drive, 2).run(life)
    assert first.startswith(f"rank 1: {said}")
    assert second.startswith(said)


# Stale saves.


def test_weights_that_did_not_move_between_two_saves_are_told_and_counted(
    drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(updates=1)
    with Job(drive).client() as client:
        client.restore(trained.app)

        def save(step: int) -> list[str]:
            # Counters and random numbers move in any case.
            trained.app["epoch"] = step
            torch.rand(())
            return client.save(trained.app, step=step, per_rank={"rng": RngState()}, wait=True).warnings

        assert save(1) == []
        (told,) = save(2)
        assert told == (
            "the weights at step 2 are bit for bit those of step 1: is app_state still the model that is trained? "
            "(stale saves so far: 1)"
        )
        assert f"save of step 2: {told}" in warned(caplog)
        assert client.stale_saves == 1
        with torch.no_grad():
            for parameter in trained.model.parameters():  # moved, as wrappers and casts do: new memory, new values
                parameter.data = parameter.data.clone() + 1
        assert save(3) == []
        assert save(3) == []  # the same step again may well be the same
        (told,) = save(4)
        assert "those of step 3" in told
        assert client.stale_saves == 2


def test_a_copy_that_is_no_longer_trained_is_noticed_and_what_has_no_weights_is_not(drive: Drive) -> None:
    trained = Trained(updates=1)
    stale = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    with Job(drive).client() as client:
        client.latest()
        for step in (1, 2):
            trained.update()
            warnings = client.save({"weights": stale, "step": step}, step=step, wait=True).warnings
        assert len(warnings) == 1
        for step in (3, 4):
            assert client.save({"plain": "text"}, step=step, wait=True).warnings == []
