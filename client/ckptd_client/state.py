"""Nested state to a JSON tree plus named tensors, and back: no pickle, no code run while reading.

In the tree null, true, strings, finite floats and ints up to 2**53 stand for themselves, and a list for a list. All
else is an object with one key, its kind: `{"dict": [k, v, k, v]}` (pairs, because order and int keys count),
`{"tuple": [..]}`, `{"tensor": [name, dtype, shape]}` and so on. A name used twice is a tied tensor.
What has no kind is refused when saving, with its path, so a checkpoint never holds a surprise.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from pydantic import JsonValue

from ckptd.errors import Invalid
from ckptd_client import dtypes
from ckptd_client.tree import MAX_DEPTH, VERSION, Path, type_name
from ckptd_client.unflatten import numpy_scalar, unflatten

__all__ = ["Flat", "TensorSource", "flatten", "unflatten"]

EXACT_INT = 2**53  # every JSON reader keeps these exactly
INLINE_BYTES = 256  # longer bytes go to the payload
SUPPORTED = (
    "supported are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, OrderedDict, Counter, "
    "torch.Size, torch.dtype, torch.device, dense torch tensors, numpy arrays and scalars"
)


class TensorSource(NamedTuple):
    """A tensor or array to store, still where the trainer has it. `alignment` is in bytes and divides `nbytes`."""

    data: torch.Tensor | np.ndarray[Any, Any]
    dtype: JsonValue
    shape: tuple[int, ...]
    nbytes: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened state: the JSON tree, and the tensors it names."""

    tree: JsonValue
    tensors: dict[str, TensorSource]


def flatten(state: object, prefix: str, *, root: str = "app_state") -> Flat:
    """Take `state` apart. Called on the training thread; copies no tensor.

    Tensor names start with `prefix`, messages with `root`. `nn.Parameter` is stored, and comes back, as a plain
    tensor; views store their own elements only and come back contiguous. Tensors that are the same memory
    (storage, offset, shape, strides, dtype) are stored once and come back as one object; a list or dict met twice
    comes back as two. `Invalid` with the path for anything unsupported; nothing is pickled.
    """
    flattener = _Flattener(prefix)
    node = flattener.node(state, Path(root))
    return Flat({"version": VERSION, "state": node}, flattener.tensors)


class _Flattener:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.tensors: dict[str, TensorSource] = {}
        self._names: Counter[str] = Counter()
        self._tied: dict[object, JsonValue] = {}
        self._open: set[int] = set()
        self._kinds: dict[type, Callable[[Any, Path], JsonValue]] = {
            NoneType: lambda value, path: None,
            bool: lambda value, path: cast(bool, value),
            int: self._int,
            float: self._float,
            complex: lambda value, path: {"complex": [_bits(value.real), _bits(value.imag)]},
            str: self._str,
            bytes: lambda value, path: self._bytes("bytes", value, path),
            bytearray: lambda value, path: self._bytes("bytearray", bytes(value), path),
            list: self._list,
            tuple: lambda value, path: {"tuple": self._list(value, path)},
            torch.Size: lambda value, path: {"size": self._list(value, path)},
            dict: lambda value, path: {"dict": self._pairs(value, path)},
            Counter: lambda value, path: {"counter": self._pairs(value, path)},
            OrderedDict: self._ordered,
            torch.dtype: lambda value, path: {"dtype": str(value).removeprefix("torch.")},
            torch.device: lambda value, path: {"device": str(value)},
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            np.ndarray: self._array,
        }

    def node(self, value: object, path: Path) -> JsonValue:
        encode = self._kinds.get(type(value))
        if encode is not None:
            return encode(value, path)
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        self._refuse(path, f"{type_name(value)} is not supported; {SUPPORTED}")

    def _child(self, value: object, parent: Path, key: str | int) -> JsonValue:
        """`node`, with a short way for the plain values that make up long lists."""
        kind = type(value)
        if kind is int and -EXACT_INT <= cast(int, value) <= EXACT_INT:
            return cast(int, value)
        if kind is str and cast(str, value).isascii():
            return cast(str, value)
        return self.node(value, parent.child(key))

    def _refuse(self, path: Path, reason: str) -> NoReturn:
        raise Invalid(
            f"cannot save {path}: {reason}",
            do="Save a supported form of it, or put the object into app_state itself if it has state_dict().",
            path=str(path),
        )

    def _int(self, value: int, path: Path) -> JsonValue:
        return value if -EXACT_INT <= value <= EXACT_INT else {"int": f"{value:x}"}

    def _float(self, value: float, path: Path) -> JsonValue:
        return value if math.isfinite(value) else {"float": _bits(value)}

    def _str(self, value: str, path: Path) -> str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self._refuse(path, f"the string is not valid Unicode ({error.reason})")
        return value

    def _bytes(self, kind: str, value: bytes, path: Path) -> JsonValue:
        if len(value) <= INLINE_BYTES:
            return {kind: base64.b64encode(value).decode()}
        array = np.frombuffer(value, np.uint8)
        return {kind: [self._store(TensorSource(array, "|u1", array.shape, array.nbytes, 1), path)]}

    def _list(self, values: Iterable[object], path: Path) -> list[JsonValue]:
        self._enter(values, path)
        nodes = [self._child(value, path, index) for index, value in enumerate(values)]
        self._open.discard(id(values))
        return nodes

    def _pairs(self, values: Mapping[Any, object], path: Path) -> list[JsonValue]:
        self._enter(values, path)
        nodes: list[JsonValue] = []
        for key, value in values.items():
            if type(key) is not str and type(key) is not int:
                self._refuse(path, f"its key {repr(key)[:80]} is a {type_name(key)}; keys are str or int")
            nodes += [self.node(key, path.child(key)), self._child(value, path, key)]
        self._open.discard(id(values))
        return nodes

    def _ordered(self, values: OrderedDict[Any, object], path: Path) -> JsonValue:
        extra = vars(values)
        if not extra:
            return {"ordered": self._pairs(values, path)}
        if set(extra) != {"_metadata"}:
            self._refuse(path, f"the OrderedDict has attributes that would be lost: {sorted(extra)}")
        return {"state_dict": [self.node(extra["_metadata"], path.child("_metadata")), *self._pairs(values, path)]}

    def _enter(self, container: object, path: Path) -> None:
        if id(container) in self._open:
            self._refuse(path, f"the {type_name(container)} contains itself")
        if path.depth >= MAX_DEPTH:
            self._refuse(path, f"it is nested more than {MAX_DEPTH} levels deep")
        self._open.add(id(container))

    def _store(self, source: TensorSource, path: Path) -> str:
        name = base = path.name(self.prefix)
        while name in self.tensors:
            self._names[base] += 1
            name = f"{base}~{self._names[base]}"
        self.tensors[name] = source
        return name

    def _tensor(self, value: torch.Tensor, path: Path) -> JsonValue:
        if value.layout != torch.strided:
            self._refuse(path, f"a tensor with layout {value.layout} is not supported; make it dense first")
        if value.is_quantized or value.dtype not in dtypes.TORCH_NAMES:
            self._refuse(
                path, f"a quantized tensor ({value.dtype}) is not supported; save its int_repr and parameters"
            )
        if value.is_meta:
            self._refuse(path, "a meta tensor has no data")
        if value.ndim > dtypes.MAX_DIMENSIONS:
            self._refuse(path, f"a tensor of more than {dtypes.MAX_DIMENSIONS} dimensions is not supported")
        dtype, shape, nbytes = dtypes.TORCH_NAMES[value.dtype], tuple(value.shape), value.nbytes
        key: object = ("object", id(value))
        if nbytes:
            if not value.untyped_storage().nbytes():
                self._refuse(path, "the tensor's memory was freed")
            bits = (value.is_conj(), value.is_neg())
            key = (value.data_ptr(), dtype, shape, value.stride(), bits, None if value.is_cpu else value.device)
        node = self._tied.get(key)
        if node is None:
            source = TensorSource(value.detach(), dtype, shape, nbytes, value.itemsize)
            node = self._tied[key] = {"tensor": [self._store(source, path), dtype, list(shape)]}
        return node

    def _array(self, value: np.ndarray[Any, Any], path: Path) -> JsonValue:
        node = self._tied.get(("object", id(value)))
        if node is None:
            dtype = self._numpy_name(value.dtype, path)
            alignment = math.gcd(value.dtype.alignment, value.itemsize)
            source = TensorSource(value, dtype, value.shape, value.nbytes, alignment)
            node = {"array": [self._store(source, path), dtype, list(value.shape)]}
            self._tied["object", id(value)] = node
        return node

    def _scalar(self, value: np.generic, path: Path) -> JsonValue:
        array = np.asarray(value)
        dtype = self._numpy_name(array.dtype, path)
        back = numpy_scalar(array.tobytes(), array.dtype)
        if np.asarray(back).dtype != array.dtype:  # numpy's own strings drop zeros at their end
            self._refuse(path, f"{type_name(value)} {value!r} would not come back exactly; save it as a plain value")
        return {"scalar": [dtype, array.tobytes().hex()]}

    def _numpy_name(self, dtype: np.dtype[Any], path: Path) -> JsonValue:
        name = dtypes.numpy_name(dtype)
        if name is None:
            self._refuse(
                path, f"numpy dtype {dtype} is not supported; convert it to one of fixed size without objects"
            )
        return name


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()
