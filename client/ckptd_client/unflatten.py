"""A state tree plus tensors, back to the nested state. The tree may come from a stranger: its depth is bounded, each
node is built by a fixed table of kinds, and every shape is checked against the bytes there are.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, Protocol, cast

import numpy as np
import torch
from pydantic import JsonValue

from ckptd.errors import Corrupt, Invalid
from ckptd_client import dtypes
from ckptd_client.tree import MAX_DEPTH, VERSION, Path, type_name

_INT = re.compile(r"-?[0-9a-f]+")
_FLOAT = re.compile(r"[0-9a-f]{16}")


class Tensors(Protocol):
    """What a state is put together from, by name. Each is asked for once. `ValueError` when its bytes do not fit;
    `KeyError` for an unknown name."""

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor: ...

    def array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]: ...

    def data(self, name: str) -> bytes: ...


def unflatten(tree: JsonValue, tensors: Mapping[str, torch.Tensor], *, root: str = "app_state") -> object:
    """Put a state together again, on CPU, from a tree that may come from a stranger.

    `tensors[name]` holds the bytes of a tensor (flat uint8); the result is a view of it where its address allows,
    so it must not be used for anything else. `Invalid` for a tree of a younger version, `Corrupt`
    for one that is malformed or does not fit its tensors, both with the path.
    """
    return build(tree, _Views(tensors), root=root)[0]


def build(tree: JsonValue, tensors: Tensors, *, root: str = "app_state") -> tuple[object, Counter[str]]:
    """As `unflatten`, from any `Tensors`; and how often each name is used in the tree."""
    path = Path(root)
    match tree:
        case {"version": version, "state": state} if version == VERSION:
            builder = _Builder(tensors)
            return builder.value(state, path), builder.uses
        case {"version": version}:
            raise Invalid(
                f"cannot read {path}: state tree version {version!r:.40}, this ckptd reads {VERSION}",
                do="Load it with the version of ckptd that saved it, or a younger one.",
                path=root,
            )
    _broken(path, "not a state tree")


def part_of(tree: JsonValue, keys: Collection[str], what: str) -> JsonValue:
    """The tree of some keys of a state alone. `Invalid` if it does not have one of them; `what` says whose it is."""
    match tree:
        case {"version": version, "state": {"dict": list(pairs)}} if len(pairs) % 2 == 0:
            nodes = {key: node for key, node in zip(pairs[::2], pairs[1::2], strict=True) if isinstance(key, str)}
        case _:
            return tree  # `build` says what is wrong with it
    missing = sorted(set(keys) - nodes.keys())
    if missing:
        raise Invalid(
            f"{what} has no {', '.join(map(repr, missing))}", do=f"It has {', '.join(nodes)}.", field="only"
        )
    chosen: list[JsonValue] = [item for key in keys for item in (key, nodes[key])]
    return {"version": version, "state": {"dict": chosen}}


class _Builder:
    def __init__(self, tensors: Tensors) -> None:
        self.uses: Counter[str] = Counter()
        self._tensors = tensors
        self._built: dict[str, tuple[JsonValue, object]] = {}
        self._kinds: dict[str, Callable[[JsonValue, Path], object]] = {
            "int": _int_of,
            "float": _float_of,
            "complex": _complex_of,
            "bytes": self._bytes,
            "bytearray": lambda node, path: bytearray(self._bytes(node, path)),
            "tuple": lambda node, path: tuple(self._list(node, path)),
            "size": self._size,
            "dict": lambda node, path: dict(self._pairs(node, path)),
            "ordered": lambda node, path: OrderedDict(self._pairs(node, path)),
            "counter": self._counter,
            "state_dict": self._state_dict,
            "dtype": _dtype_of,
            "device": _device_of,
            "scalar": _scalar_of,
            "tensor": lambda node, path: self._named("tensor", node, path),
            "array": lambda node, path: self._named("array", node, path),
        }

    def value(self, node: JsonValue, path: Path) -> object:
        if not isinstance(node, dict | list):
            return node
        if path.depth > MAX_DEPTH:
            _broken(path, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, list):
            return self._list(node, path)
        if len(node) != 1:
            _broken(path, f"a node of {len(node)} keys")
        ((kind, content),) = node.items()
        if kind not in self._kinds:
            raise Invalid(
                f"cannot read {path}: unknown kind {kind[:40]!r}",
                do="Load it with the version of ckptd that saved it, or a younger one.",
                path=str(path),
            )
        return self._kinds[kind](content, path)

    def _list(self, node: JsonValue, path: Path) -> list[object]:
        if not isinstance(node, list):
            _broken(path, "a sequence that is not a list")
        return [
            self.value(item, path.child(index)) if isinstance(item, dict | list) else item
            for index, item in enumerate(node)
        ]

    def _size(self, node: JsonValue, path: Path) -> torch.Size:
        try:
            return torch.Size(dtypes.shape_of(node))
        except ValueError as error:
            _broken(path, str(error))

    def _pairs(self, node: JsonValue, path: Path) -> dict[Any, object]:
        if not isinstance(node, list) or len(node) % 2:
            _broken(path, "a mapping that is not a list of pairs")
        found: dict[Any, object] = {}
        for key_node, item in zip(node[::2], node[1::2], strict=True):
            key = self.value(key_node, path.child("key"))
            if type(key) is not str and type(key) is not int:
                _broken(path, f"a key of type {type_name(key)}")
            if key in found:
                _broken(path, f"key {str(key)[:80]!r} twice")
            found[key] = self.value(item, path.child(key))
        return found

    def _counter(self, node: JsonValue, path: Path) -> Counter[Any]:
        counter: Counter[Any] = Counter()
        dict.update(counter, self._pairs(node, path))  # Counter.update would add
        return counter

    def _state_dict(self, node: JsonValue, path: Path) -> OrderedDict[Any, object]:
        if not isinstance(node, list) or not node:
            _broken(path, "a state dict without its metadata")
        values = OrderedDict(self._pairs(node[1:], path))
        values._metadata = self.value(node[0], path.child("_metadata"))  # type: ignore[attr-defined]
        return values

    def _bytes(self, node: JsonValue, path: Path) -> bytes:
        match node:
            case [str(name)]:
                self.uses[name] += 1
                try:
                    return self._tensors.data(name)
                except KeyError:
                    _broken(path, f"the payload has no tensor {name[:200]!r}")
            case str(text):
                try:
                    return base64.b64decode(text, validate=True)
                except ValueError as error:
                    _broken(path, f"bytes that are not base64 ({error})")
        _broken(path, "bytes in an unknown form")

    def _named(self, kind: str, node: JsonValue, path: Path) -> object:
        match node:
            case [str(name), dtype, shape]:
                described: JsonValue = [kind, dtype, shape]
            case _:
                _broken(path, f"a {kind} in an unknown form")
        self.uses[name] += 1
        if name in self._built:
            known, built = self._built[name]
            if known != described:
                _broken(path, f"tensor {name[:200]!r} is used with two dtypes or shapes")
            return built
        value: object
        try:
            if kind == "tensor":
                value = self._tensors.tensor(name, _torch_dtype(dtype), dtypes.shape_of(shape))
            else:
                value = self._tensors.array(name, dtypes.numpy_dtype(dtype), dtypes.shape_of(shape))
        except KeyError:
            _broken(path, f"the payload has no tensor {name[:200]!r}")
        except (ValueError, TypeError, RuntimeError) as error:
            _broken(path, str(error))
        self._built[name] = (described, value)
        return value


class _Views:
    """Views of flat bytes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        raw = self._raw(name)
        check_length(shape, dtype.itemsize, raw.numel())
        if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(shape)

    def array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        raw = self._raw(name)
        check_length(shape, dtype.itemsize, raw.numel())
        if not raw.numel():
            return np.empty(shape, dtype)
        array = np.ndarray(shape, dtype, buffer=raw.numpy().data)
        return array if array.flags.aligned else array.copy()

    def data(self, name: str) -> bytes:
        return self._raw(name).numpy().tobytes()

    def _raw(self, name: str) -> torch.Tensor:
        raw = self._tensors[name]
        return raw if raw.dtype == torch.uint8 and raw.ndim == 1 else raw.detach().reshape(-1).view(torch.uint8)


def _torch_dtype(name: JsonValue) -> torch.dtype:
    dtype = dtypes.TORCH.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"this torch has no dtype {str(name)[:40]!r}")
    return dtype


def check_length(shape: tuple[int, ...], item_bytes: int, found: int) -> None:
    """`ValueError` unless a tensor of this shape takes the bytes there are."""
    expected = math.prod(shape) * item_bytes
    if found != expected:
        raise ValueError(f"shape {list(shape)[:16]} takes {expected} bytes, the payload has {found}")


def numpy_scalar(data: bytes, dtype: np.dtype[Any]) -> Any:
    """The numpy scalar whose bytes these are. `ValueError` or `TypeError` where they do not fit."""
    if dtype.kind == "U" and np.frombuffer(data, f"{dtype.byteorder}u4").max() > sys.maxunicode:
        raise ValueError("not Unicode")
    return np.ndarray((), dtype, buffer=bytearray(data))[()]


def _scalar_of(node: JsonValue, path: Path) -> object:
    match node:
        case [dtype, str(text)]:
            try:
                return numpy_scalar(bytes.fromhex(text), dtypes.numpy_dtype(dtype))
            except (ValueError, TypeError) as error:
                _broken(path, f"a numpy scalar that does not fit its dtype ({error})")
    _broken(path, "a numpy scalar in an unknown form")


def _dtype_of(node: JsonValue, path: Path) -> torch.dtype:
    if not isinstance(node, str) or node not in dtypes.ALL_TORCH:
        _broken(path, f"this torch has no dtype {str(node)[:40]!r}")
    return dtypes.ALL_TORCH[node]


def _device_of(node: JsonValue, path: Path) -> torch.device:
    if not isinstance(node, str):
        _broken(path, "a device that is not a string")
    try:
        return torch.device(node)
    except RuntimeError as error:
        _broken(path, f"not a device: {str(error).splitlines()[0][:200]}")


def _float_of(node: JsonValue, path: Path) -> float:
    if not isinstance(node, str) or not _FLOAT.fullmatch(node):
        _broken(path, "a float that is not 64 bits in hexadecimal")
    return cast(float, struct.unpack(">d", bytes.fromhex(node))[0])


def _complex_of(node: JsonValue, path: Path) -> complex:
    if not isinstance(node, list) or len(node) != 2:
        _broken(path, "a complex number that is not a pair")
    return complex(_float_of(node[0], path), _float_of(node[1], path))


def _int_of(node: JsonValue, path: Path) -> int:
    if not isinstance(node, str) or not _INT.fullmatch(node):
        _broken(path, "an int that is not hexadecimal")
    return int(node, 16)


def _broken(path: Path, reason: str) -> NoReturn:
    raise Corrupt(f"cannot read {path}: {reason}", path=str(path))
