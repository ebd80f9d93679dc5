"""Reading straight into live tensors: the same bits as the way over load_state_dict, and only where that is sound."""

from __future__ import annotations

import copy
import time
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ckptd.errors import Corrupt, Invalid
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd_client import counterparts, payload
from ckptd_client.blank import Blank
from ckptd_client.chunks import Object, open_object
from ckptd_client.counterparts import read_into_live
from ckptd_client.filling import fill
from ckptd_client.fitting import _giver
from ckptd_client.places import Scattered
from ckptd_client.snapshot import HostSnapshot
from ckptd_client.state import flatten
from ckptd_client.stateful import check, collect, install
from tests.client.test_payload import KEY
from tests.client.test_stateful import OPTIMIZERS, Net, bits, compiled, randomised, train

torch.set_num_threads(1)


class Loaded:
    """What was saved of `source`, on the way into `target`."""

    def __init__(self, source: dict[str, Any], *, chunk_bytes: int = 700, storage: Storage | None = None) -> None:
        self.storage = storage or MemoryStorage()
        flat = flatten(collect(source), "shared")
        with HostSnapshot().capture([flat]) as captured:
            self.ref = payload.write(self.storage, KEY, captured, chunk_bytes=chunk_bytes)
        self.tree = flat.tree
        self.open()

    def open(self) -> Loaded:
        self.item: Object = open_object(self.storage, self.ref)
        self.item.wanted = set(self.item.spans)
        self.blank = Blank(self.tree, lambda name: self.item.spans[name][1] - self.item.spans[name][0])
        return self

    def direct(self) -> set[str]:
        """The names that go straight into live memory."""
        return set(self.blank.live)

    def fit(self, target: dict[str, Any]) -> Loaded:
        check(target, self.blank.state)
        read_into_live(self.blank, self.blank.state, target)
        self.item.places = self.blank.places()
        self.item.arrange()
        return self

    def read(self) -> Loaded:
        chunks = [(self.item, index) for index in self.item.needed()]
        fill(self.storage, chunks, time.monotonic() + 60)
        return self

    def into(self, target: dict[str, Any]) -> Loaded:
        self.fit(target).read()
        install(target, self.blank.finished(), given=_giver(self.blank.owned()))
        return self


def everything(seed: int) -> dict[str, Any]:
    """A part of every kind."""
    torch.manual_seed(seed)
    net = randomised(Net(), seed)
    odd = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW([*net.parameters(), *odd.parameters()])
    for parameter in (*net.parameters(), *odd.parameters()):
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    generator = np.random.default_rng(seed)
    return {
        "net": net,
        "odd": odd,
        "opt": optimizer,
        "sched": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "tensor": torch.rand(5, 7),
        "turned": torch.rand(6, 4).t(),
        "parameter": nn.Parameter(torch.rand(3)),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "half": torch.rand(9).bfloat16(),
        "nested": {"ema": torch.rand(3), "plain": [seed, "x"], "net": nn.Linear(2, 2)},
        "array": generator.random((4, 3)),
        "records": np.array([(seed, 0.5)], [("a", "<i4"), ("b", ">f8")]),
        "blob": bytes([seed]) * 1000,
        "step": seed,
    }


def exact(state: Any) -> Any:
    """`bits`, of arrays too."""
    if isinstance(state, np.ndarray):
        return str(state.dtype), state.shape, state.tobytes()
    if isinstance(state, dict):
        return {key: exact(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [exact(value) for value in state]
    return bits(state)


@pytest.mark.parametrize("chunk_bytes", [64, 700, 4096, 10**6])
@pytest.mark.parametrize("prepared", [True, False])
def test_every_kind_comes_back_to_the_bit(chunk_bytes: int, prepared: bool) -> None:
    source, target = everything(1), everything(2)
    if not prepared:
        target["opt"].state.clear()
    loaded = Loaded(source, chunk_bytes=chunk_bytes).into(target)
    assert exact(collect(target)) == exact(collect(source))
    names = loaded.direct()
    assert {"shared/net/embed.weight", "shared/odd/weight", "shared/tensor", "shared/turned", "shared/half"} <= names
    assert {"shared/nested/ema", "shared/nested/net/weight", "shared/parameter", "shared/scalar"} <= names
    assert ("shared/opt/state/0/exp_avg" in names) == prepared
    assert not names & {"shared/array", "shared/blob", "shared/records"}
    assert isinstance(loaded.blank.live["shared/odd/weight"], Scattered)
    for each in (source, target):
        train(nn.Sequential(nn.Linear(3, 3)), each["opt"], each["sched"], 0)


def test_what_is_read_lies_in_the_live_tensors_before_anything_is_installed() -> None:
    source, target = everything(1), everything(2)
    addresses = {name: value.data_ptr() for name, value in target["net"].state_dict().items()}
    moment = next(iter(target["opt"].state.values()))["exp_avg"]
    loaded = Loaded(source).fit(target).read()
    assert bits(target["net"].state_dict()) == bits(source["net"].state_dict())
    assert bits(target["tensor"]) == bits(source["tensor"])
    assert bits(moment) == bits(next(iter(source["opt"].state.values()))["exp_avg"])
    install(target, loaded.blank.finished(), given=_giver(loaded.blank.owned()))
    assert {name: value.data_ptr() for name, value in target["net"].state_dict().items()} == addresses
    assert next(iter(target["opt"].state.values()))["exp_avg"] is moment or (
        next(iter(target["opt"].state.values()))["exp_avg"].data_ptr() == moment.data_ptr()
    )


def test_a_new_optimizers_state_is_what_was_read_without_a_copy() -> None:
    source, target = everything(1), everything(2)
    target["opt"].state.clear()
    loaded = Loaded(source).fit(target).read()
    state: Any = loaded.blank.state
    read = [entry["exp_avg"].data_ptr() for entry in state["opt"]["state"].values()]
    install(target, loaded.blank.finished(), given=_giver(loaded.blank.owned()))
    assert [entry["exp_avg"].data_ptr() for entry in target["opt"].state.values()] == read


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("prepared", [True, False])
def test_every_optimizer_goes_on_to_the_bit(kind: str, prepared: bool) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = nn.Linear(3, 3)
        optimizer = OPTIMIZERS[kind](net.parameters())
        return {"net": net, "opt": optimizer, "sched": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])}

    source, target = build(1), build(2)
    train(source["net"], source["opt"], source["sched"], 4)
    if prepared:
        train(target["net"], target["opt"], target["sched"], 2)
    Loaded(source).into(target)
    for each in (source, target):
        train(each["net"], each["opt"], each["sched"], 3)
    assert {key: bits(target[key].state_dict()) for key in source} == {
        key: bits(source[key].state_dict()) for key in source
    }


# Where it would not be sound.


def with_hook(name: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    getattr(module[0], name)(lambda *args: None)
    return module


class Own(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize(
    "build",
    [
        lambda: with_hook("register_load_state_dict_pre_hook"),
        lambda: with_hook("register_load_state_dict_post_hook"),
        lambda: with_hook("register_state_dict_post_hook"),
        lambda: with_hook("register_state_dict_pre_hook"),
        lambda: nn.Sequential(Own(2, 2)),
    ],
)
def test_a_module_with_code_of_its_own_is_left_to_load_state_dict(build: Any) -> None:
    source, target = randomised(build(), 1), randomised(build(), 2)
    before = bits(target.state_dict())
    loaded = Loaded({"m": source}).fit({"m": target}).read()
    assert loaded.direct() == set()
    assert bits(target.state_dict()) == before
    install({"m": target}, loaded.blank.finished(), given=_giver(loaded.blank.owned()))
    assert bits(target.state_dict()) == bits(source.state_dict())


def test_wrappers_and_parametrizations() -> None:
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        parametrize.register_parametrization(module[0], "weight", Twice())
        return module

    source, target = randomised(build(), 1), randomised(build(), 2)
    loaded = Loaded({"m": source}).into({"m": compiled(target)})
    assert bits(target.state_dict()) == bits(source.state_dict())
    assert "shared/m/0.parametrizations.weight.original" in loaded.direct()


class Copies:
    """Gives copies out, and takes what it is given in its own way."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((4,), value)
        self.given: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["value"]
        self.value.copy_(state["value"] * 2)


def test_an_object_of_the_users_is_asked_to_load() -> None:
    source, target = Copies(3.0), Copies(1.0)
    loaded = Loaded({"c": source}).fit({"c": target}).read()
    assert loaded.direct() == set()
    assert target.value.tolist() == [1.0] * 4
    install({"c": target}, loaded.blank.finished(), given=_giver(loaded.blank.owned()))
    assert target.value.tolist() == [6.0] * 4


def test_what_two_parts_share_in_the_checkpoint_is_given_to_each_apart() -> None:
    shared = torch.rand(4)
    source: dict[str, Any] = {"w": shared, "plain": [shared], "c": (copy_of := Copies(0.0))}
    copy_of.value = shared
    source["c"].state_dict = lambda: {"value": shared}
    target: dict[str, Any] = {"w": torch.zeros(4), "plain": [], "c": Copies(1.0)}
    loaded = Loaded(source).into(target)
    assert loaded.direct() == set()
    assert bits(target["w"]) == bits(target["plain"][0]) == bits(target["c"].given) == bits(shared)
    assert len({t.data_ptr() for t in (target["w"], target["plain"][0], target["c"].given)}) == 3


def test_tied_live_tensors_that_are_two_in_the_checkpoint_are_installed_in_order() -> None:
    memory = torch.zeros(8)
    target = {"all": memory, "part": memory[2:5], "apart": torch.zeros(2)}
    source = {"all": torch.arange(8.0), "part": torch.full((3,), 9.0), "apart": torch.ones(2)}
    loaded = Loaded(source).into(target)
    assert loaded.direct() == {"shared/apart"}
    assert memory.tolist() == [0, 1, 9, 9, 9, 5, 6, 7]


def test_an_expanded_tensor_is_no_place_to_read_into() -> None:
    assert not counterparts._covers_itself_once(torch.zeros(1).expand(4))
    assert not counterparts._covers_itself_once(torch.zeros(9).as_strided((4, 4), (1, 1)))
    assert counterparts._covers_itself_once(torch.zeros(4, 6)[:, ::2].t())


def test_nothing_is_read_when_it_does_not_fit() -> None:
    source = {"net": randomised(Net(), 1), "w": torch.ones(3)}
    target = {"net": randomised(Net(), 2), "w": torch.ones(4)}
    before = bits(collect(target))
    with pytest.raises(Invalid, match=r"float32\[4\], in the checkpoint float32\[3\]"):
        Loaded(source).fit(target)
    assert bits(collect(target)) == before


def test_a_flipped_bit_anywhere_is_found_also_on_the_way_into_live_tensors() -> None:
    source = {"a": torch.rand(100), "b": torch.rand(7, 3).t(), "c": torch.rand(1)}
    loaded = Loaded(source, chunk_bytes=512)
    data = bytearray(loaded.storage.get(KEY, loaded.ref.size))
    for at in range(0, len(data), 13):
        data[at] ^= 1 << at % 8
        loaded.storage = MemoryStorage()
        loaded.storage.put(KEY, [bytes(data)], len(data))
        target = {"a": torch.zeros(100), "b": torch.zeros(7, 3).t(), "c": torch.zeros(1)}
        with pytest.raises(Corrupt) as caught:
            loaded.open().fit(target).read()
        assert caught.value.fields["chunk"] == at // 512
        data[at] ^= 1 << at % 8


def test_loading_takes_no_memory_beside_the_live_state() -> None:
    source = {"w": torch.rand(2**20), "v": torch.rand(2**20)}
    target = {"w": torch.zeros(2**20), "v": torch.zeros(2**20)}
    loaded = Loaded(source, chunk_bytes=2**20).fit(target)
    tracemalloc.start()
    try:
        loaded.read()
        assert tracemalloc.get_traced_memory()[1] < 2**19
    finally:
        tracemalloc.stop()
    assert bits(target["w"]) == bits(source["w"])


def test_small_tensors_in_hundreds_are_read_together() -> None:
    source = OrderedDict((f"t{index}", torch.full((3,), float(index))) for index in range(500))
    target = {"all": OrderedDict((name, torch.zeros(3)) for name in source)}
    loaded = Loaded({"all": source}, chunk_bytes=10**6).into(target)
    assert len(loaded.direct()) == 500
    assert bits(target["all"]) == bits(dict(source))
    assert copy.copy(loaded.item.needed()) == [0]
