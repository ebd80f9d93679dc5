"""app_state, the dict of things to save: from live objects to plain state, and from loaded state into live objects.

Saved module names are canonical: without the `module.` of a DistributedDataParallel or DataParallel wrapper and
without the `_orig_mod.` of torch.compile, so a run may change its wrapping between incarnations. Which
`module.` is a wrapper is read off the live module tree; a user's own submodule of that name stays.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import torch

from ckptd.errors import Invalid
from ckptd_client.tree import MAX_DEPTH, Path, type_name

WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
WRAPPED = "module"
COMPILED = "_orig_mod"
SHOWN_DIFFERENCES = 20


@runtime_checkable
class Stateful(Protocol):
    """What `collect` asks for its state, and `install` gives it back to."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def collect(app_state: Mapping[str, object], root: str = "app_state") -> dict[str, object]:
    """The state of everything in `app_state`, still sharing memory with it. Called on the training thread.

    Objects with state_dict() and load_state_dict() are asked, nested dicts are walked, all else stays as it is.
    """
    return {key: _collect(value, Path(root).child(key)) for key, value in app_state.items()}


def _collect(value: object, path: Path) -> object:
    if path.depth > MAX_DEPTH:
        raise Invalid(f"cannot save {path}: it is nested more than {MAX_DEPTH} levels deep", path=str(path))
    if isinstance(value, torch.Tensor):
        return value  # told first, as there may be very many
    if isinstance(value, torch.nn.Module):
        return canonical_state_dict(value)
    if _is_stateful(value):
        return value.state_dict()
    if _is_dict(value):
        walked = type(value)((key, _collect(item, path.child(key))) for key, item in value.items())
        if isinstance(value, OrderedDict):
            vars(walked).update(vars(value))  # a module's state_dict carries its metadata there
        return walked
    return value


def canonical_state_dict(module: torch.nn.Module) -> OrderedDict[str, Any]:
    """`module.state_dict()` without the names of wrappers. `Invalid` when two entries then have one name."""
    live = module.state_dict()
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in live.items():
        plain = _canonical(module, name)
        if plain in state:
            raise Invalid(f"two entries of the module are called {plain!r} once its wrappers are left out")
        state[plain] = value
    metadata = getattr(live, "_metadata", None)
    if metadata is not None:
        # The wrapper's own metadata comes first and gives way to that of the module inside.
        _set_metadata(state, ((_canonical(module, name), item) for name, item in metadata.items()))
    return state


def _canonical(module: torch.nn.Module, name: str) -> str:
    current: torch.nn.Module | None = module
    kept: list[str] = []
    for part in name.split("."):
        if part != COMPILED and not (part == WRAPPED and isinstance(current, WRAPPERS)):
            kept.append(part)
        current = current._modules.get(part) if current is not None else None
    return ".".join(kept)


def check(app_state: Mapping[str, object], loaded: Mapping[str, object], root: str = "app_state") -> None:
    """Whether `loaded` fits the live objects. Changes nothing; `Invalid` with the list of all differences.

    Compared are the entries of app_state, names, shapes and dtypes of modules and tensors, and the parameter
    groups of optimizers. What other objects hold is theirs to check.
    """
    differences = list(_dict_differences(app_state, loaded, Path(root)))
    if differences:
        shown = differences[:SHOWN_DIFFERENCES]
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more")
        raise Invalid(
            f"the checkpoint does not fit {root}:\n" + "\n".join(f"  - {line}" for line in shown),
            do="Build the objects as they were when it was saved, or load only the entries that fit.",
            differences=differences,
        )


def _dict_differences(live: Mapping[Any, object], loaded: Mapping[Any, object], path: Path) -> Iterator[str]:
    yield from (f"{path.child(key)} is missing in the checkpoint" for key in live if key not in loaded)
    yield from (f"{path.child(key)} is only in the checkpoint" for key in loaded if key not in live)
    for key in live:
        if key in loaded:
            yield from _differences(live[key], loaded[key], path.child(key))


def _differences(live: object, loaded: object, path: Path) -> Iterator[str]:
    if isinstance(live, torch.Tensor):
        yield from _tensor_differences(live, loaded, str(path))
    elif isinstance(live, torch.nn.Module | torch.optim.Optimizer) and not isinstance(loaded, Mapping):
        yield f"{path} is a {type_name(live)}, the checkpoint has a {type_name(loaded)}"
    elif isinstance(live, torch.nn.Module):
        yield from _module_differences(live, cast("Mapping[str, object]", loaded), path)
    elif isinstance(live, torch.optim.Optimizer):
        yield from _optimizer_differences(live, cast("Mapping[str, Any]", loaded), path)
    elif holds_live(live):
        if isinstance(loaded, Mapping):
            yield from _dict_differences(live, loaded, path)
        else:
            yield f"{path} is a dict, the checkpoint has a {type_name(loaded)}"


def _tensor_differences(live: torch.Tensor, loaded: object, where: str) -> Iterator[str]:
    if not isinstance(loaded, torch.Tensor):
        yield f"{where} is a tensor, the checkpoint has a {type_name(loaded)}"
    elif torch.nn.parameter.is_lazy(live):
        return  # a lazy module takes the shape it is given
    elif live.shape != loaded.shape or live.dtype != loaded.dtype:
        yield f"{where} is {_described(live)}, in the checkpoint {_described(loaded)}"


def _module_differences(live: torch.nn.Module, loaded: Mapping[str, object], path: Path) -> Iterator[str]:
    expected = canonical_state_dict(live)
    strip = _strips_wrapper(expected, loaded)
    found = {_plain_name(name, strip): value for name, value in loaded.items()}
    yield from (f"{path}: {name!r} is missing in the checkpoint" for name in expected if name not in found)
    yield from (f"{path}: {name!r} is only in the checkpoint" for name in found if name not in expected)
    for name, value in expected.items():
        if name in found and isinstance(value, torch.Tensor):
            yield from _tensor_differences(value, found[name], f"{path}: {name!r}")


def _optimizer_differences(live: torch.optim.Optimizer, loaded: Mapping[str, Any], path: Path) -> Iterator[str]:
    groups = loaded.get("param_groups")
    if not isinstance(groups, list) or not isinstance(loaded.get("state"), dict):
        yield f"{path} is an optimizer, the checkpoint has no param_groups and state there"
        return
    found = [len(group.get("params", ())) for group in groups]
    expected = [len(group["params"]) for group in live.param_groups]
    if found != expected:
        yield f"{path} has parameter groups of {expected} tensors, in the checkpoint {found}"


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


Given = Callable[[Any], Any]
"""Makes a loaded value one that may be given away."""


def install(
    app_state: MutableMapping[str, object],
    loaded: Mapping[str, object],
    root: str = "app_state",
    *,
    given: Given = copy.deepcopy,
) -> None:
    """Bring `app_state` to the loaded state, in place. Called on the training thread, before training goes on.

    Stateful objects get load_state_dict, tensors are copied into, plain values are replaced. `check` comes first,
    and on its `Invalid` nothing has changed; after an error from an object's own load_state_dict the objects
    before it have. Nothing installed shares memory with `loaded`, but for what `given` lets through.
    """
    check(app_state, loaded, root)
    _install_dict(app_state, loaded, Path(root), given)


def _install_dict(live: MutableMapping[Any, object], loaded: Mapping[Any, object], path: Path, given: Given) -> None:
    for key, value in loaded.items():
        target = live.get(key)
        here = path.child(key)
        if isinstance(target, torch.Tensor):
            with torch.no_grad():
                target.copy_(cast(torch.Tensor, value))
        elif _is_stateful(target):
            _load(target, value, here, given)
        elif holds_live(target):
            _install_dict(target, cast("Mapping[Any, object]", value), here, given)
        elif _is_dict(target) and _is_dict(value):
            target.clear()  # the caller may hold the inner dict too
            target.update(given(value))
        else:
            live[key] = given(value)


def _load(target: Stateful, value: Any, path: Path, given: Given) -> None:
    try:
        if isinstance(target, torch.nn.Module):
            target.load_state_dict(_live_state_dict(target, value))
        elif isinstance(target, torch.optim.Optimizer):
            _load_optimizer(target, given(value))
        else:
            target.load_state_dict(given(value))
    except Exception as error:
        raise Invalid(
            f"{path}: {type_name(target)}.load_state_dict refused the state: {error}",
            do="Build the object as it was when the checkpoint was saved.",
            path=str(path),
        ) from error


def _live_state_dict(module: torch.nn.Module, loaded: Mapping[str, object]) -> OrderedDict[str, Any]:
    """`loaded` under the names the live module goes by. Tensors are shared: load_state_dict copies them."""
    live = module.state_dict()
    names, strip = _live_names(module, live, loaded)
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in loaded.items():
        state[names[name]] = value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    metadata = getattr(loaded, "_metadata", None)
    if metadata is not None:
        found = {_plain_name(name, strip): item for name, item in metadata.items()}
        known = ((name, _canonical(module, name)) for name in getattr(live, "_metadata", ()))
        _set_metadata(state, ((name, found[plain]) for name, plain in known if plain in found))
    return state


def live_state_names(module: torch.nn.Module, loaded: Mapping[str, object]) -> dict[str, str]:
    """By what name each entry of `loaded` goes in the live module's state_dict()."""
    return _live_names(module, module.state_dict(), loaded)[0]


def _live_names(
    module: torch.nn.Module, live: Mapping[str, object], loaded: Mapping[str, object]
) -> tuple[dict[str, str], bool]:
    live_names = {_canonical(module, name): name for name in live}
    strip = _strips_wrapper(live_names.keys(), loaded)
    plain_names = {name: _plain_name(name, strip) for name in loaded}
    return {name: live_names.get(plain, plain) for name, plain in plain_names.items()}, strip


def _set_metadata(state: OrderedDict[str, Any], items: Iterable[tuple[str, Any]]) -> None:
    vars(state)["_metadata"] = OrderedDict(items)  # where torch keeps the versions of the module classes


def _strips_wrapper(expected: Iterable[str], names: Iterable[str]) -> bool:
    """Whether `names` are those of a wrapper's raw state_dict(): `module.` on all, and fitting better without."""
    wanted = set(expected)
    plain = {_plain_name(name, False) for name in names}
    inner = {_plain_name(name, True) for name in names}
    return all(name.startswith(f"{WRAPPED}.") for name in plain) and len(wanted & inner) > len(wanted & plain)


def _plain_name(name: str, strip: bool) -> str:
    parts = [part for part in name.split(".") if part != COMPILED]
    return ".".join(parts[1:] if strip and parts[:1] == [WRAPPED] else parts)


def _load_optimizer(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """load_state_dict, and then the dtypes as they were saved: torch casts state to the dtype of its parameter,
    which turns counters and float32 moments of bfloat16 parameters into something else."""
    optimizer.load_state_dict(loaded)
    saved_ids = [index for group in loaded["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(saved_ids, parameters, strict=True):
        saved = loaded["state"].get(index)
        installed = optimizer.state.get(parameter)
        if isinstance(saved, dict) and isinstance(installed, dict):
            for key in saved.keys() & installed.keys() - {"step"}:  # torch's own rule for "step" keeps what works
                installed[key] = _as_saved(saved[key], installed[key])


def _as_saved(saved: Any, installed: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(installed, torch.Tensor):
        return installed if installed.dtype == saved.dtype else saved.to(installed.device)
    if isinstance(saved, dict) and isinstance(installed, dict):
        return {key: _as_saved(value, installed.get(key)) for key, value in saved.items()}
    if type(saved) in (list, tuple) and isinstance(installed, list | tuple) and len(saved) == len(installed):
        return type(saved)(map(_as_saved, saved, installed))
    return installed


def _is_dict(value: object) -> TypeGuard[dict[Any, object]]:
    return type(value) in (dict, OrderedDict)


def _is_stateful(value: object) -> TypeGuard[Stateful]:
    return isinstance(value, Stateful) and not isinstance(value, type)


def holds_live(value: object, depth: int = 0) -> TypeGuard[dict[Any, object]]:
    """Whether a nested dict holds something to load into; one of plain values is replaced as a whole."""
    return (
        _is_dict(value)
        and depth <= MAX_DEPTH
        and any(
            isinstance(item, torch.Tensor) or _is_stateful(item) or holds_live(item, depth + 1)
            for item in value.values()
        )
    )
