"""The dtypes a checkpoint can hold: their names in the state tree and in the safetensors format.

A torch dtype is named as torch names it ("bfloat16"), a numpy dtype by its type string ("<f8") or, for a
structured one, by the list of its fields. The two never meet: a type string starts with its byte order.
A name read back is matched against a table or a pattern before numpy or torch sees it.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from pydantic import JsonValue

MAX_DIMENSIONS = 64
MAX_SIZE = 2**63
MAX_FIELD_DEPTH = 8

# Every dtype this torch has, by name. `torch.float` and the like are second names of the same dtype.
ALL_TORCH: dict[str, torch.dtype] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}
# Quantised tensors keep scale and zero point beside their bytes, so bytes alone do not bring them back.
TORCH = {name: dtype for name, dtype in ALL_TORCH.items() if not re.match("qu?int", name)}
TORCH_NAMES = {dtype: name for name, dtype in TORCH.items()}

# What the public readers of the format know by name. All other dtypes are stored as plain bytes (U8).
_SAFETENSORS = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16",),
    "F8_E4M3": ("float8_e4m3fn",),
    "F8_E5M2": ("float8_e5m2",),
    "C64": ("complex64", "<c8"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "|i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "|u1"),
    "BOOL": ("bool", "|b1"),
}
_FILE_NAMES = {name: file_name for file_name, names in _SAFETENSORS.items() for name in names}
FILE_ITEM_BYTES = {file_name: TORCH[names[0]].itemsize for file_name, names in _SAFETENSORS.items()}

_TYPE_STRING = re.compile(
    r"[<>|](?:[biufc][0-9]{1,2}|[SUV][0-9]{1,10}|[mM]8(?:\[[0-9]{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)


def file_dtype(name: JsonValue) -> str | None:
    """The safetensors name of a dtype, None for one the format has no name for."""
    return _FILE_NAMES.get(name) if isinstance(name, str) else None


def numpy_name(dtype: np.dtype[Any]) -> JsonValue:
    """The name of a numpy dtype, None when its bytes alone would not bring it back."""
    return _plain_numpy_name(dtype) if dtype.names is None else _checked_name(dtype)


@lru_cache(maxsize=256)
def _plain_numpy_name(dtype: np.dtype[Any]) -> str | None:
    name = _checked_name(dtype)
    return name if isinstance(name, str) else None


def _checked_name(dtype: np.dtype[Any]) -> JsonValue:
    if dtype.hasobject or dtype.kind not in "biufcmMSUV" or (dtype.kind == "V" and dtype.type is not np.void):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns where it cannot describe one; the comparison finds that
        name = _as_json(np.lib.format.dtype_to_descr(dtype))
    try:
        return name if numpy_dtype(name) == dtype else None
    except ValueError:
        return None


def _as_json(descr: Any) -> JsonValue:
    return [_as_json(item) for item in descr] if isinstance(descr, list | tuple) else descr


def numpy_dtype(name: JsonValue) -> np.dtype[Any]:
    """The dtype of a name that may come from a stranger. `ValueError` for anything but a fixed-size one."""
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_descr(name, 0))
    except (TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"no such dtype: {str(name)[:80]}") from error
    if dtype.itemsize == 0 or dtype.hasobject:
        raise ValueError(f"not a fixed-size dtype: {str(name)[:80]}")
    return dtype


def _descr(name: JsonValue, depth: int) -> Any:
    if isinstance(name, str) and _TYPE_STRING.fullmatch(name):
        return name
    if isinstance(name, list) and name and depth < MAX_FIELD_DEPTH:
        return [_field(field, depth) for field in name]
    raise ValueError(f"no such dtype: {str(name)[:80]}")


def _field(field: JsonValue, depth: int) -> tuple[Any, ...]:
    match field:
        case [str(label), kind]:
            return label, _descr(kind, depth + 1)
        case [str(label), kind, list(shape)]:
            return label, _descr(kind, depth + 1), shape_of(shape)
    raise ValueError(f"no such field: {str(field)[:80]}")


def shape_of(shape: JsonValue) -> tuple[int, ...]:
    """A shape that may come from a stranger. `ValueError` for anything but a list of sizes."""
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"not a shape: {str(shape)[:80]}")
    for n in shape:  # a loop, as there may be a hundred thousand shapes
        if type(n) is not int or not 0 <= n < MAX_SIZE:
            raise ValueError(f"not a shape: {str(shape)[:80]}")
    return tuple(cast("list[int]", shape))
