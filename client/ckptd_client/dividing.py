"""Which rank writes which tensors of a state that all ranks hold alike, so that together they write it once.

Whole tensors, balanced by bytes: the largest first, each to the rank that has least so far (LPT scheduling, at most
4/3 of the best). All ranks come to the same division without a word, from names and sizes alone; `alike` is what they
say about it in their parts, and rank 0 commits only what all say alike.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping

from ckptd.digests import canonical_json
from ckptd_client.state import Flat, TensorSource


class Division:
    """Training thread. Remembers the last division: states rarely change their form."""

    def __init__(self, writers: int) -> None:
        self._writers = writers
        self._form: list[tuple[str, int]] = []
        self._owners: dict[str, int] = {}

    def share(self, flat: Flat, writer: int) -> Flat:
        """What `writer` writes of it. Only writer 0 has the tree."""
        form = [(name, source.nbytes) for name, source in sorted(flat.tensors.items())]
        if form != self._form:
            self._owners, self._form = owners(dict(form), self._writers), form
        mine = {name: source for name, source in flat.tensors.items() if self._owners[name] == writer}
        return Flat(flat.tree if writer == 0 else None, mine)


def owners(sizes: Mapping[str, int], writers: int) -> dict[str, int]:
    """The writer of each tensor. The same for the same names and sizes, in whatever order they come."""
    loads = [(0, writer) for writer in range(writers)]
    found: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, writer = loads[0]
        heapq.heapreplace(loads, (load + size, writer))
        found[name] = writer
    return found


def alike(tensors: Mapping[str, TensorSource]) -> str:
    """A digest of names, dtypes and shapes: of the state's form, not of its values."""
    form = sorted((name, source.dtype, list(source.shape)) for name, source in tensors.items())
    return hashlib.sha256(canonical_json(form)).hexdigest()
