"""app_state: collected with canonical names, checked as a whole, installed in place and to the bit."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from ckptd.errors import Invalid
from ckptd.storage.memory import MemoryStorage
from ckptd_client import payload
from ckptd_client.snapshot import HostSnapshot
from ckptd_client.state import flatten, unflatten
from ckptd_client.stateful import canonical_state_dict, check, collect, install
from tests.client.reading_back import read_back

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A group of one, so that DistributedDataParallel can be built."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Has a submodule of its own called "module", tied weights and a buffer."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.module = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.module(self.embed(tokens))))


class Inner(nn.Module):
    """Every name starts with "module.", and there is no wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def stored(app_state: dict[str, Any]) -> dict[str, Any]:
    """The way through a payload object and back."""
    flat = flatten(collect(app_state), "shared")
    storage = MemoryStorage()
    with HostSnapshot().capture([flat]) as captured:
        ref = payload.write(storage, "runs/r/data/x", captured)
    loaded: Any = unflatten(flat.tree, read_back(storage, ref))
    return dict(loaded)


def randomised(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 100)
    return module


def equal_states(left: nn.Module, right: nn.Module) -> bool:
    a, b = canonical_state_dict(left), canonical_state_dict(right)
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module)  # compiles at the first call, which never comes here
    assert isinstance(wrapped, nn.Module)
    return wrapped


def inner_compiled(net: Net) -> nn.Module:
    net.module[0] = compiled(net.module[0])
    return net


WRAPPINGS: dict[str, Any] = {
    "plain": lambda net: net,
    "ddp": DistributedDataParallel,
    "dp": nn.DataParallel,
    "compiled": compiled,
    "compiled ddp": lambda net: compiled(DistributedDataParallel(net)),
    "ddp of compiled": lambda net: DistributedDataParallel(compiled(net)),
    "compiled inside": inner_compiled,
    "ddp inside": lambda net: nn.ModuleDict({"net": DistributedDataParallel(net)}),
}
NAMES = ["embed.weight", "module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]
NAMES += ["module.1.running_mean", "module.1.running_var", "module.1.num_batches_tracked", "head.weight"]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_saved_names_are_those_of_the_bare_module(wrapping: str, process_group: None) -> None:
    state = canonical_state_dict(WRAPPINGS[wrapping](Net()))
    prefix = "net." if wrapping == "ddp inside" else ""
    assert list(state) == [prefix + name for name in NAMES]
    assert vars(state)["_metadata"][f"{prefix}module.1"] == {"version": 2}
    assert not any("_orig_mod" in name for name in vars(state)["_metadata"])


@pytest.mark.parametrize("loading", [name for name in WRAPPINGS if name != "ddp inside"])
@pytest.mark.parametrize("saving", ["plain", "ddp", "compiled ddp", "compiled inside"])
def test_any_wrapping_loads_what_any_other_saved(saving: str, loading: str, process_group: None) -> None:
    source = WRAPPINGS[saving](randomised(Net(), 1))
    target = WRAPPINGS[loading](randomised(Net(), 2))
    install({"model": target}, stored({"model": source}))
    assert equal_states(source, target)


@pytest.mark.parametrize("loading", ["plain", "ddp", "compiled"])
@pytest.mark.parametrize("saving", ["ddp", "compiled ddp", "ddp of compiled", "compiled"])
def test_a_wrappers_raw_state_dict_loads_too(saving: str, loading: str, process_group: None) -> None:
    source = WRAPPINGS[saving](randomised(Net(), 1))
    target = WRAPPINGS[loading](randomised(Net(), 2))
    install({"model": target}, stored({"model": source.state_dict()}))
    assert equal_states(source, target)


def test_a_users_own_module_called_module_is_left_alone(process_group: None) -> None:
    assert list(canonical_state_dict(Inner())) == ["module.weight", "module.bias"]
    for source, target in [
        (Inner(), Inner()),
        (DistributedDataParallel(Inner()), Inner()),
        (Inner(), compiled(Inner())),
    ]:
        install({"model": target}, stored({"model": randomised(source, 1)}))
        assert equal_states(source, target)
    raw = DistributedDataParallel(randomised(Inner(), 3))
    install({"model": (inner := Inner())}, stored({"model": raw.state_dict()}))
    assert equal_states(raw, inner)


def test_names_that_fall_together_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("x", torch.ones(1))
            self._orig_mod = nn.Module()
            self._orig_mod.register_buffer("x", torch.ones(1))

    with pytest.raises(Invalid, match="two entries of the module are called 'x'"):
        collect({"model": Twice()})


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    flat = flatten(collect({"model": (net := Net())}), "shared")
    assert "shared/model/embed.weight" in flat.tensors
    assert "shared/model/head.weight" not in flat.tensors
    target = Net()
    install({"model": target}, stored({"model": net}))
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.head.weight, net.head.weight)


def test_the_tree_keeps_class_versions_for_load_state_dict() -> None:
    class Versioned(nn.Linear):
        _version = 3
        seen: dict[str, Any] = {}

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
            self.seen["metadata"] = local_metadata
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    install({"model": compiled(Versioned(2, 2))}, stored({"model": Versioned(2, 2)}))
    assert Versioned.seen["metadata"]["version"] == 3


def test_nested_dicts_live_tensors_and_plain_values() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    inner = {"cfg": {"old": 1}, "ema": torch.zeros(3), "net": nn.Linear(2, 2)}
    deep = inner["cfg"]
    live: dict[str, Any] = {"a": inner, "p": parameter, "step": 0, "rng": np.zeros(2), "plain": deep}
    source = {
        "a": {"cfg": {"new": [1, 2]}, "ema": torch.arange(3.0), "net": nn.Linear(2, 2)},
        **{"p": torch.ones(2), "step": 7, "rng": np.ones(2), "plain": {"new": 2}},
    }
    ema = inner["ema"]
    install(live, stored(source))
    assert live["a"] is inner
    assert inner["ema"] is ema
    assert torch.equal(torch.as_tensor(ema), torch.arange(3.0))
    assert live["p"] is parameter
    assert parameter.requires_grad
    assert parameter.tolist() == [1, 1]
    assert (live["step"], live["rng"].tolist(), live["plain"]) == (7, [1, 1], {"new": 2})
    assert live["plain"] is deep  # replaced inside, for whoever else holds it


def test_a_live_state_dict_is_copied_into() -> None:
    net = randomised(Net(), 1)
    target = randomised(Net(), 2)
    install({"model": target.state_dict()}, stored({"model": net.state_dict()}))
    assert equal_states(net, target)


def test_what_is_installed_does_not_share_memory_with_what_was_loaded() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    loaded = stored({"opt": optimizer, "plain": [torch.ones(2)], "w": torch.ones(2)})
    live: dict[str, Any] = {"opt": optimizer, "plain": [], "w": torch.zeros(2)}
    install(live, loaded)
    places = {tensor.untyped_storage().data_ptr() for tensor in tensors_in([loaded])}
    assert places.isdisjoint(t.untyped_storage().data_ptr() for t in tensors_in([optimizer.state_dict(), live]))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from tensors_in(item)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "nadam": lambda p: torch.optim.NAdam(p),
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
    for step in range(steps):
        inputs = torch.rand(4, 3, generator=torch.Generator().manual_seed(step))

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.as_tensor(net(inputs)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        scheduler.step()


def bits(value: Any) -> Any:
    """A nested state with each tensor as its dtype, shape and bytes, to compare exactly."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_scheduler_and_training_go_on_to_the_bit(kind: str) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = nn.Linear(3, 3)
        optimizer = OPTIMIZERS[kind](net.parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
        return {"net": net, "opt": optimizer, "sched": scheduler}

    source, target = build(1), build(2)
    train(source["net"], source["opt"], source["sched"], 4)
    install(target, stored(source))
    for key in source:
        assert bits(target[key].state_dict()) == bits(source[key].state_dict())
    for each in (source, target):
        train(each["net"], each["opt"], each["sched"], 3)
    for key in source:
        assert bits(target[key].state_dict()) == bits(source[key].state_dict())


class Counting(torch.optim.Optimizer):
    """Keeps state that torch's load_state_dict would cast: counters, float32 moments, nested lists."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.tensor(2**40 + 1),
                    "count": torch.tensor([2**40 + 1]),
                    "moment": torch.full(parameter.shape, 1 / 3),
                    "history": [torch.tensor([3], dtype=torch.int32), {"deep": (torch.tensor([True]),)}],
                    "calls": 7,
                }


def test_optimizer_state_keeps_its_dtypes() -> None:
    def build() -> Counting:
        return Counting([nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))])

    source, target = build(), build()
    target.state.clear()
    install({"opt": target}, stored({"opt": source}))
    assert bits(target.state_dict()) == bits(source.state_dict())


def differences(app_state: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    before = bits(collect(app_state))
    with pytest.raises(Invalid, match="the checkpoint does not fit app_state") as caught:
        install(app_state, loaded)
    assert bits(collect(app_state)) == before
    found: list[str] = caught.value.fields["differences"]
    assert all(line in caught.value.message for line in found[:20])
    return found


def test_all_differences_are_told_at_once_and_nothing_is_changed() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)
    live: dict[str, Any] = {
        **{"net": Net(), "opt": optimizer, "w": torch.ones(2), "v": torch.ones(2), "gone": 1, "ok": 1},
        **{
            "more": {"ema": torch.ones(1), "gone": 2},
            "dict": {"ema": torch.ones(1)},
            "m": nn.Linear(1, 1),
            "o": optimizer,
        },
    }
    state = canonical_state_dict(Net(4))
    state["extra"] = state.pop("module.1.bias")
    state["module.1.num_batches_tracked"] = 3
    state["head.weight"] = state["head.weight"].double()[:, :3]
    loaded = {
        **{"net": state, "w": torch.ones(3), "v": 3, "new": 1, "ok": 2, "o": {"state": {}}},
        "opt": {"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]},
        **{"more": {"ema": torch.ones(1).int(), "new": 3}, "dict": [1], "m": [2]},
    }
    assert sorted(differences(live, loaded)) == sorted(
        [
            "app_state['gone'] is missing in the checkpoint",
            "app_state['new'] is only in the checkpoint",
            "app_state['more']['gone'] is missing in the checkpoint",
            "app_state['more']['new'] is only in the checkpoint",
            "app_state['more']['ema'] is float32[1], in the checkpoint int32[1]",
            "app_state['w'] is float32[2], in the checkpoint float32[3]",
            "app_state['v'] is a tensor, the checkpoint has a int",
            "app_state['dict'] is a dict, the checkpoint has a list",
            "app_state['m'] is a torch.nn.modules.linear.Linear, the checkpoint has a list",
            "app_state['o'] is an optimizer, the checkpoint has no param_groups and state there",
            "app_state['opt'] has parameter groups of [1] tensors, in the checkpoint [2, 1]",
            "app_state['net']: 'module.1.bias' is missing in the checkpoint",
            "app_state['net']: 'extra' is only in the checkpoint",
            "app_state['net']: 'embed.weight' is float32[5, 3], in the checkpoint float32[5, 4]",
            "app_state['net']: 'module.0.weight' is float32[3, 3], in the checkpoint float32[4, 4]",
            "app_state['net']: 'module.0.bias' is float32[3], in the checkpoint float32[4]",
            "app_state['net']: 'module.1.weight' is float32[3], in the checkpoint float32[4]",
            "app_state['net']: 'module.1.running_mean' is float32[3], in the checkpoint float32[4]",
            "app_state['net']: 'module.1.running_var' is float32[3], in the checkpoint float32[4]",
            "app_state['net']: 'module.1.num_batches_tracked' is a tensor, the checkpoint has a int",
            "app_state['net']: 'head.weight' is float32[5, 3], in the checkpoint float64[5, 3]",
        ]
    )


def test_a_long_list_of_differences_is_cut_in_the_message_only() -> None:
    live = {str(index): 0 for index in range(50)}
    with pytest.raises(Invalid, match="and 30 more") as caught:
        check(live, {})
    assert len(caught.value.fields["differences"]) == 50


def test_check_changes_nothing_when_all_is_well() -> None:
    net = randomised(Net(), 1)
    before = copy.deepcopy(net)
    check({"net": net, "step": 1}, stored({"net": randomised(Net(), 2), "step": 2}))
    assert equal_states(net, before)


def test_a_lazy_module_takes_the_saved_shape() -> None:
    source, target = nn.Linear(3, 2), nn.LazyLinear(2)
    install({"net": target}, stored({"net": source}))
    assert equal_states(source, target)


def test_extra_state_of_modules_comes_back() -> None:
    class Extra(nn.Module):
        value: Any = None

        def get_extra_state(self) -> Any:
            return self.value

        def set_extra_state(self, state: Any) -> None:
            self.value = state

    source, target = Extra(), Extra()
    source.value = {"scale": torch.ones(2), "count": 3}
    install({"net": target}, stored({"net": source}))
    assert bits(target.value) == bits(source.value)


def test_an_object_that_refuses_its_state_is_named() -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    with pytest.raises(
        Invalid, match=r"app_state\['x'\]\['y'\]: .*Refusing.load_state_dict refused the state: 'b'"
    ) as caught:
        install({"x": {"y": Refusing()}}, {"x": {"y": {"a": 1}}})
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_class_with_the_methods_is_no_stateful_object() -> None:
    assert collect({"kind": nn.Linear})["kind"] is nn.Linear  # left to flatten, which refuses it with its path


def test_dicts_without_end_are_refused() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(Invalid, match="nested more than"):
        collect(endless)


def test_metadata_of_a_plain_state_dict_survives_collect() -> None:
    state = Net().state_dict()
    collected = collect({"model": state})["model"]
    assert type(collected) is OrderedDict
    assert vars(collected)["_metadata"] == vars(state)["_metadata"]


def test_messages_name_the_state_they_are_about() -> None:
    live: dict[str, object] = {"rng": torch.zeros(3)}
    with pytest.raises(Invalid, match=r"does not fit per_rank(.|\n)*per_rank\['rng'\]"):
        check(live, {"rng": torch.zeros(4)}, root="per_rank")
    with pytest.raises(Invalid, match=r"per_rank\['rng'\]"):
        install(live, {"rng": torch.zeros(4)}, root="per_rank")
