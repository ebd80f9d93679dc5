"""One payload object read the way a load reads it, without a checkpoint around it."""

from __future__ import annotations

import time

import torch

from ckptd.manifest import ObjectRef
from ckptd.storage.base import Storage
from ckptd_client.chunks import Object, open_object
from ckptd_client.filling import Chunk, fill
from ckptd_client.places import memory_of

DEADLINE_SECONDS = 60.0


def object_with_places(storage: Storage, ref: ObjectRef) -> tuple[Object, dict[str, torch.Tensor]]:
    """The object with all its tensors wanted, and the flat uint8 tensors that they go to."""
    item = open_object(storage, ref)
    tensors = {name: torch.empty(end - begin, dtype=torch.uint8) for name, (begin, end) in item.spans.items()}
    item.wanted = set(tensors)
    item.places = {name: memory_of(tensor) for name, tensor in tensors.items()}
    item.arrange()
    return item, tensors


def read_back(storage: Storage, ref: ObjectRef) -> dict[str, torch.Tensor]:
    """The bytes of every tensor, each flat uint8, for `unflatten`."""
    item, tensors = object_with_places(storage, ref)
    chunks: list[Chunk] = [(item, index) for index in item.needed()]
    fill(storage, chunks, time.monotonic() + DEADLINE_SECONDS)
    return tensors
