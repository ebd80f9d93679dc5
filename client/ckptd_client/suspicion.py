"""Saves that succeed and are worth nothing: weights that do not move, optimizers whose state is not there.

Nothing here stops a save. It is said loudly: in the log, and in `SaveHandle.warnings`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckptd.digests import chunk_digest
from ckptd_client.snapshot import Captured
from ckptd_client.tree import Path

log = logging.getLogger("ckptd")


def weight_names(app_state: Mapping[str, object], prefix: str) -> tuple[str, ...]:
    """With what the names of the modules' tensors begin in the payload; of all tensors, if there is no module."""
    modules = tuple(f"{path.name(prefix)}/" for path, _ in _all(app_state, torch.nn.Module))
    return modules or (f"{prefix}/",)


class WeightsWatch:
    """Notices that a save holds the very weights of the save before, although training went on in between.

    That is what a checkpoint of stale copies looks like: of tensors that the optimizer no longer updates, of a model
    whose storage was moved. Counters and random numbers change all the same, so only the modules are looked at.
    """

    def __init__(self) -> None:
        self.stale_saves = 0
        """How many saves were found to be stale, in this process."""
        self._last: tuple[int, str] | None = None

    def look(self, captured: Captured | None, names: tuple[str, ...], step: int, warnings: list[str]) -> None:
        """Rank 0, on the save thread, before `captured` is released. Reads the weights once more; what there is to
        say is added to `warnings` and logged."""
        if captured is None:
            return
        entries = sorted(entry for entry in captured.entries if entry.nbytes and entry.name.startswith(names))
        if not entries:
            return
        data = captured.data
        digest = chunk_digest(*(data[entry.offset : entry.offset + entry.nbytes] for entry in entries))
        last, self._last = self._last, (step, digest)
        if last is None or last[0] == step or last[1] != digest:
            return
        self.stale_saves += 1
        warning = (
            f"the weights at step {step} are bit for bit those of step {last[0]}: is app_state still the model that "
            f"is trained? (stale saves so far: {self.stale_saves})"
        )
        warnings += tell([warning], step)


def optimizer_warnings(app_state: Mapping[str, object], state: Mapping[str, Any], step: int) -> list[str]:
    """What looks wrong about the optimizers in `app_state`, of which `state` is what will be saved. Training thread.

    Parameters that were never stepped have no state, which is right. So only this is suspicious: no state at all
    after the first step, less in state_dict() than in the optimizer, a gradient without state beside it.
    """
    found: list[str] = []
    for path, optimizer in _all(app_state, torch.optim.Optimizer):
        saved = _at(state, path).get("state")
        live = [p for p, own in optimizer.state.items() if own and isinstance(p, torch.Tensor)]
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        bare = [p for p in trained if p.grad is not None and not optimizer.state.get(p)]
        if saved is not None and len(saved) < len(live):
            found.append(f"{path}.state_dict() holds state of {len(saved)} parameters, the optimizer of {len(live)}")
        elif not _state_for_each(optimizer):
            continue
        elif step > 0 and trained and not live:
            found.append(f"{path} has no state at step {step}: is it the optimizer that is stepped?")
        elif live and bare:
            found.append(f"{path}: {len(bare)} of {len(trained)} parameters have a gradient and no optimizer state")
    return found


def lost_optimizer_state(app_state: Mapping[str, object], loaded: Mapping[str, Any]) -> list[str]:
    """Optimizers that took a state without complaint and do not hold it. After `install`, on every rank."""
    lost: list[str] = []
    for path, optimizer in _all(app_state, torch.optim.Optimizer):
        saved, holds = _at(loaded, path).get("state"), optimizer.state_dict().get("state")
        if saved is not None and holds is not None and len(saved) != len(holds):
            lost.append(f"{path} holds state of {len(holds)} tensors after loading, the checkpoint of {len(saved)}")
    return lost


def tell(warnings: list[str], step: int) -> list[str]:
    """Log them; returns them."""
    for warning in warnings:
        log.warning("save of step %d: %s", step, warning)
    return warnings


def _state_for_each(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer of torch's has state for each parameter it has stepped. Of others nothing is known."""
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.LBFGS):
        return False
    return not isinstance(optimizer, torch.optim.SGD) or any(g["momentum"] for g in optimizer.param_groups)


def _all(state: Mapping[Any, object], kind: type, path: Path | None = None) -> Iterator[tuple[Path, Any]]:
    """The objects of one kind, in nested dicts too, with their places."""
    for key, value in state.items():
        here = (path or Path("app_state")).child(key)
        if isinstance(value, kind):
            yield here, value
        elif isinstance(value, dict):
            yield from _all(value, kind, here)


def _at(state: Any, path: Path) -> Mapping[str, Any]:
    """What is saved at a place; nothing where another form of state lies there."""
    keys = path.keys()
    for key in keys:
        state = state.get(key) if isinstance(state, Mapping) else None
    return state if isinstance(state, Mapping) else {}
