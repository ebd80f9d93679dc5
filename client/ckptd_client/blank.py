"""A state before its bytes are there: real tensors with nothing in them yet, of the sizes that the payload says.

They can be compared with live objects before anything is read, and are what is read into where no live tensor takes
their place. Memory that is never touched costs next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from pydantic import JsonValue

from ckptd_client.places import Place, memory_of
from ckptd_client.unflatten import build, check_length

Value = torch.Tensor | np.ndarray[Any, Any]


class Blank:
    """A state as its tree describes it. `size_of` gives the bytes that the payload has under a name, or `KeyError`.

    Tensors in `state` may be replaced by live ones, which `put_live` is told. `places` says where the bytes of each
    name go. Once they are there, `finished` is the state.
    """

    def __init__(self, tree: JsonValue, size_of: Callable[[str], int], *, root: str = "app_state") -> None:
        self._tree, self._size_of, self._root = tree, size_of, root
        self._values: dict[str, Value] = {}
        self._blobs: dict[str, bytearray] = {}
        state, uses = build(tree, self, root=root)
        self.state = cast("dict[str, object]", state)
        self.uses: Counter[str] = uses
        self.live: dict[str, Place] = {}
        self._names = {id(value): name for name, value in self._values.items()}

    def places(self) -> dict[str, Place]:
        """Where each name's bytes go, live or new."""
        new = {name: memory_of(v) for name, v in self._values.items() if name not in self.live and v.nbytes}
        return new | {name: memory_of(blob) for name, blob in self._blobs.items()} | self.live

    def name_of(self, value: object) -> str | None:
        """The name of a tensor in `state`; None for anything else."""
        return self._names.get(id(value))

    def put_live(self, name: str, value: torch.Tensor, place: Place) -> None:
        """The bytes of `name` go to a live tensor."""
        self._names.pop(id(self._values[name]), None)  # another object may get this id
        self._values[name] = value
        self.live[name] = place

    def finished(self) -> dict[str, object]:
        """The state, when the bytes are where they belong. Long byte strings are made only now."""
        if self._blobs:
            self.state = cast("dict[str, object]", build(self._tree, _Filled(self._values, self._blobs))[0])
        return self.state

    def owned(self) -> dict[int, object] | None:
        """The tensors, by id, that nobody else uses and nothing else in the state: they can be given away as they
        are. None if all can."""
        tied = {name for name, count in self.uses.items() if count > 1}
        if not tied:
            return None
        return {id(value): value for name, value in self._values.items() if name not in tied}

    # What `build` asks for.

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        check_length(shape, dtype.itemsize, self._size_of(name))
        value = self._values[name] = torch.empty(shape, dtype=dtype)
        return value

    def array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        check_length(shape, dtype.itemsize, self._size_of(name))
        value = self._values[name] = np.empty(shape, dtype)
        return value

    def data(self, name: str) -> bytes:
        if name not in self._blobs:
            self._blobs[name] = bytearray(self._size_of(name))
        return b""


class _Filled:
    """What was blank, and is no longer."""

    def __init__(self, values: dict[str, Value], blobs: dict[str, bytearray]) -> None:
        self._values, self._blobs = values, blobs

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return cast(torch.Tensor, self._values[name])

    def array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return cast("np.ndarray[Any, Any]", self._values[name])

    def data(self, name: str) -> bytes:
        return bytes(self._blobs[name])
