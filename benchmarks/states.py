"""States to save: a GPT-like model with AdamW in fp32, and one of many tiny tensors. Real modules and optimizers."""

from __future__ import annotations

import math

import torch
from torch import nn

LAYERS, VOCABULARY, CONTEXT = 10, 16_384, 1_024
GIGABYTE = 10**9


class State:
    """A model, perhaps its optimizer, and their tensors by name. The values differ within each tensor; `change` makes
    all of them new, so that no saver gets away with what it wrote before."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.app_state: dict[str, object] = {"model": model}
        if optimizer is not None:
            self.app_state["optimizer"] = optimizer
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors().values())
        self._marks: dict[str, list[float]] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors, flat. Asked for anew, because loading an optimizer's state may replace its tensors."""
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        if self.optimizer is not None:
            names = {id(p): name for name, p in self.model.named_parameters()}
            for parameter, values in self.optimizer.state.items():
                found |= {f"optimizer.{names[id(parameter)]}.{key}": value for key, value in values.items()}
        return found

    def change(self) -> None:
        torch._foreach_add_(list(self.tensors().values()), 1e-3)

    def remember(self) -> None:
        """Note a few values of each tensor, for `check`."""
        self._marks = {name: _mark(tensor) for name, tensor in self.tensors().items()}

    def spoil(self) -> None:
        """Make the noted values wrong, so that `check` notices a load that did nothing."""
        for tensor in self.tensors().values():
            flat = tensor.view(-1)
            flat[0] = flat[flat.numel() // 2] = flat[-1] = -1.0

    def check(self, who: str) -> None:
        """What was remembered is there again."""
        for name, tensor in self.tensors().items():
            if _mark(tensor) != self._marks[name]:
                raise ValueError(f"{who} did not bring {name} back")


def _mark(tensor: torch.Tensor) -> list[float]:
    flat = tensor.view(-1)
    return [float(flat[0]), float(flat[flat.numel() // 2]), float(flat[-1])]


def make(gigabytes: float, tensors: int = 0) -> State:
    """GPT-like, about 497 tensors; or, with `tensors`, that many of equal size and no optimizer."""
    return _many(gigabytes, tensors) if tensors else _gpt(gigabytes)


def _many(gigabytes: float, count: int) -> State:
    model = nn.Module()
    each = max(1, round(gigabytes * GIGABYTE / 4 / count))
    values = torch.randn(each)
    for number in range(count):
        model.register_parameter(f"p{number}", nn.Parameter(values + number / count))
    return State(model, None)


def _gpt(gigabytes: float) -> State:
    parameters = gigabytes * GIGABYTE / 12  # a weight and two moments of four bytes
    linear = VOCABULARY + CONTEXT
    width = max(8, round((math.sqrt(linear**2 + 48 * LAYERS * parameters) - linear) / (24 * LAYERS)))
    shapes: dict[str, tuple[int, ...]] = {"wte": (VOCABULARY, width), "wpe": (CONTEXT, width)}
    for layer in range(LAYERS):
        for name, size in (("qkv", 3 * width), ("out", width), ("up", 4 * width)):
            shapes[f"h{layer}_{name}_weight"], shapes[f"h{layer}_{name}_bias"] = (size, width), (size,)
        shapes[f"h{layer}_down_weight"], shapes[f"h{layer}_down_bias"] = (width, 4 * width), (width,)
        for name in ("ln1_weight", "ln1_bias", "ln2_weight", "ln2_bias"):
            shapes[f"h{layer}_{name}"] = (width,)
    shapes["ln_weight"] = shapes["ln_bias"] = (width,)
    model = nn.Module()
    generator = torch.Generator().manual_seed(1)
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) * 0.02))
    return State(model, _adamw(model))


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    """As after some steps: moments that hang together with the weights."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        weight = parameter.detach()
        moments = {"exp_avg": weight * 0.1, "exp_avg_sq": weight.square()}
        optimizer.state[parameter] = {"step": torch.tensor(100.0), **moments}
    return optimizer


def packed(state: State, buffer: torch.Tensor) -> None:
    """One memcpy of the whole state into a flat uint8 buffer that was touched before."""
    offset = 0
    for tensor in state.tensors().values():
        buffer[offset : offset + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        offset += tensor.nbytes
