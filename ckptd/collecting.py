"""Deleting what nothing needs any more: the bytes of retired checkpoints, and what ended generations left behind.

Of a generation that ended nothing can be committed any more, so what it did not commit is nobody's; no ages and no
clocks. What a process of it writes later is found by the next pass. The objects of a retired checkpoint stay while
one that is not retired borrows from it: nobody can begin to, so whoever sees none may delete. `Keeper` calls this.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ckptd import layout
from ckptd.ledger import Ledger
from ckptd.lineage import borrowers, first_open
from ckptd.manifest import Frozen, SaveId
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.upkeep import as_next
from ckptd.upkeep_records import MAX_RETIRED, CheckpointsPurged

MAX_TOLD = 100


class Lent(Frozen):
    """A retired checkpoint whose bytes stay for the sake of others: the newest ones of those that borrow from it."""

    save: SaveId
    needed_by: tuple[SaveId, ...]


class Collected(Frozen):
    """Objects that were deleted, the saves that were purged by that, and those that stay for the sake of others."""

    objects: int
    purged: tuple[SaveId, ...]
    lent: Annotated[tuple[Lent, ...], Field(max_length=MAX_TOLD)] = ()


def collect(ledger: Ledger, run: str) -> Collected:
    """One pass over one run. Killed anywhere, the next one goes on."""
    state, storage = ledger.state(run), ledger.storage
    needed = borrowers(state)
    given_up = [save for save in state.retired if save not in state.purged]
    retired = [save for save in given_up if save not in needed][:MAX_RETIRED]
    objects = 0
    folders = _unnamed(storage, run, state)
    for save in [*retired, *_leftovers(storage, run, state)]:
        folders += [layout.manifest_folder(run, save), layout.payload_folder(run, save)]
    for folder in folders:
        for name in storage.list(folder):
            storage.delete(f"{folder}/{name}")
            objects += 1
    if retired:
        body = as_next(state, CheckpointsPurged(saves=tuple(retired)))
        ledger.append(run, lambda state: body)
    lent = [Lent(save=save, needed_by=tuple(needed[save][-5:])) for save in given_up if save in needed]
    return Collected(objects=objects, purged=tuple(retired), lent=tuple(lent[:MAX_TOLD]))


def _leftovers(storage: Storage, run: str, state: RunState) -> list[str]:
    """Saves of ended generations that have files and no commit, and purged ones that have files again: a listing was
    old, or a write came late."""
    names, first = set(storage.list(layout.manifests_folder(run))), first_open(state)
    for folder in storage.list(layout.data_folder(run)):
        if layout.generation_of_folder(folder) is not None:
            names.update(storage.list(f"{layout.data_folder(run)}/{folder}"))
    return sorted(
        save
        for save in filter(layout.SAVE_ID.fullmatch, names)
        if save in state.purged or (layout.generation_of(save) < first and save not in state.checkpoints)
    )


def _unnamed(storage: Storage, run: str, state: RunState) -> list[str]:
    """The folders of what writers were killed over: of ended generations, and of full segments of the log, where
    no writer can want a slot."""
    folder, first, next_slot = layout.unnamed_folder(run), first_open(state), state.seq + 1
    found = []
    for name in storage.list(folder):
        generation, segment = layout.generation_of_folder(name), layout.segment_of(name)
        ended = generation is not None and generation < first
        if ended or (segment is not None and (segment + 1) * layout.SEGMENT_SLOTS <= next_slot):
            found.append(f"{folder}/{name}")
    return found
