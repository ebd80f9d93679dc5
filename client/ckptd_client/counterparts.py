"""Which tensors of a checkpoint have a live one that they can be read straight into.

A live tensor is written before anybody has installed anything, so it must be clear beforehand that installing would
do no more than copy these bytes into it. That is so for plain tensors in app_state, for the parameters and buffers of
modules, and for the state tensors of optimizers, as long as no code of the user's takes part: no hooks, no
methods of other classes than torch's own. All else is read into new memory, and installed by its `load_state_dict`.
Modules and optimizers get `load_state_dict` in any case; it finds that source and target are the same memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch

from ckptd_client.blank import Blank
from ckptd_client.places import Scattered, memory_of
from ckptd_client.stateful import holds_live, live_state_names

_MODULE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MODULE_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_EXTRA_STATE = "_extra_state"


class Counterpart(NamedTuple):
    """`loaded[key]` could be read into `live`."""

    loaded: MutableMapping[Any, object]
    key: object
    live: torch.Tensor


def read_into_live(blank: Blank, loaded: MutableMapping[Any, object], live: Mapping[Any, object]) -> None:
    """Put live tensors in the places of blank ones, where that is sound. Training thread; writes no byte.

    `loaded` is `blank.state` or a part of it, `live` what it will be installed into.
    """
    by_name: defaultdict[str, list[Counterpart]] = defaultdict(list)
    for found in _counterparts(loaded, live):
        name = blank.name_of(found.loaded[found.key])
        if name is not None:
            by_name[name].append(found)
    chosen = {
        name: uses
        for name, uses in by_name.items()
        # Tied in the checkpoint: tied in the live state as well, all of them.
        if len(uses) == blank.uses[name] and (len(uses) == 1 or len({_memory(use.live) for use in uses}) == 1)
    }
    for name in _overlapping({name: uses[0].live for name, uses in chosen.items()}):
        del chosen[name]
    for name, uses in chosen.items():
        tensor = uses[0].live
        straight = tensor.device.type == "cpu" and tensor.is_contiguous()
        blank.put_live(name, tensor, memory_of(tensor) if straight else Scattered(tensor))
        for use in uses:
            use.loaded[use.key] = use.live


def _counterparts(loaded: MutableMapping[Any, object], live: Mapping[Any, object]) -> Iterator[Counterpart]:
    for key, value in loaded.items():
        target = live.get(key)
        if isinstance(target, torch.Tensor):
            yield from _one(loaded, key, target)
        elif isinstance(target, torch.nn.Module):
            if isinstance(value, MutableMapping) and _is_plain_module(target):
                yield from _of_module(value, target)
        elif isinstance(target, torch.optim.Optimizer):
            if isinstance(value, MutableMapping) and _is_plain_optimizer(target):
                yield from _of_optimizer(value, target)
        elif holds_live(target) and isinstance(value, MutableMapping):
            yield from _counterparts(value, target)


def _of_module(loaded: MutableMapping[Any, object], module: torch.nn.Module) -> Iterator[Counterpart]:
    live = module.state_dict()
    for name, live_name in live_state_names(module, loaded).items():
        value = live.get(live_name)
        if isinstance(value, torch.Tensor) and not live_name.endswith(_EXTRA_STATE):
            yield from _one(loaded, name, value)


def _of_optimizer(loaded: MutableMapping[Any, object], optimizer: torch.optim.Optimizer) -> Iterator[Counterpart]:
    states, groups = loaded.get("state"), loaded.get("param_groups")
    if not isinstance(states, dict) or not isinstance(groups, list):
        return
    saved_ids = [index for group in groups for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(saved_ids, parameters, strict=True):
        saved, held = states.get(index), optimizer.state.get(parameter)
        if isinstance(saved, dict) and isinstance(held, dict):
            for key in saved.keys() & held.keys():
                if isinstance(held[key], torch.Tensor):
                    yield from _one(saved, key, held[key])


def _one(loaded: MutableMapping[Any, object], key: object, live: torch.Tensor) -> Iterator[Counterpart]:
    value = loaded[key]
    if (
        isinstance(value, torch.Tensor)
        and type(live) in (torch.Tensor, torch.nn.Parameter)
        and (live.dtype, live.shape, live.layout) == (value.dtype, value.shape, torch.strided)
        and live.device.type in ("cpu", "cuda")
        and not (live.is_conj() or live.is_neg())
        and live.data_ptr()
        and (live.is_contiguous() or _covers_itself_once(live))
    ):
        yield Counterpart(loaded, key, live.detach())


def _covers_itself_once(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory, as they do in an expanded tensor."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * size
    return True


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names whose memory is, in part or all, another name's too: in the checkpoint they may differ."""
    extents: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors.items():
        nbytes = tensor.nbytes
        if not tensor.is_contiguous():
            steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            nbytes = (steps + 1) * tensor.itemsize
        begin = tensor.data_ptr()
        extents.append((str(tensor.device), begin, begin + nbytes, name))
    found: set[str] = set()
    device, last_end, last_name = "", 0, ""
    for where, begin, end, name in sorted(extents):
        if where == device and begin < last_end:
            found |= {name, last_name}
        if where != device or end > last_end:
            device, last_end, last_name = where, end, name
    return found


def _is_plain_module(module: torch.nn.Module) -> bool:
    return all(
        not any(getattr(each, hooks, None) for hooks in _MODULE_HOOKS)
        and all(_is_torchs_own(type(each), method) for method in _MODULE_METHODS)
        for each in module.modules()
    )


def _is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return (
        kind.load_state_dict is torch.optim.Optimizer.load_state_dict
        and kind.state_dict is torch.optim.Optimizer.state_dict
        and not any(getattr(optimizer, hooks, None) for hooks in _OPTIMIZER_HOOKS)
    )


def _is_torchs_own(kind: type, method: str) -> bool:
    owner = next(base for base in kind.__mro__ if method in vars(base))
    return owner.__module__.partition(".")[0] == "torch"
