"""A found checkpoint, and how its bytes become state again, each one verified on the way."""

from __future__ import annotations

import time
from collections.abc import Collection

from pydantic import JsonValue

from ckptd.errors import CkptdError, Corrupt, describe
from ckptd.manifest import Manifest
from ckptd.reading import damage_of, read_manifest
from ckptd.second import this_process
from ckptd.wire import Answer, CheckpointInfo, DamageReport
from ckptd_client.blank import Blank
from ckptd_client.bounded import uncollected, within
from ckptd_client.filling import Chunk, fill
from ckptd_client.patience import patiently
from ckptd_client.sources import Names, Sources
from ckptd_client.transport import Transport
from ckptd_client.unflatten import part_of

State = dict[str, object]


class Found:
    """The checkpoint that all ranks of this incarnation resume from."""

    def __init__(
        self,
        answer: Answer,
        checkpoint: CheckpointInfo,
        transport: Transport,
        rank: int,
        *,
        deadline_seconds: float = 600.0,
    ) -> None:
        self.answer = answer
        self.checkpoint = checkpoint
        self.deadline_seconds = deadline_seconds
        self._transport = transport
        self._rank = rank
        self._manifest: Manifest | None = None

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def save(self) -> str:
        return self.checkpoint.save

    @property
    def metrics(self) -> dict[str, float]:
        return self.checkpoint.metrics

    @property
    def manifest(self) -> Manifest:
        """What the checkpoint consists of. Read once; `Corrupt` if its bytes are not what was committed."""
        if self._manifest is None:
            ref = self.checkpoint.manifest
            give_up_at = time.monotonic() + self.deadline_seconds
            self._manifest = within(give_up_at, ref.key, lambda: read_manifest(self._transport.storage, ref))
        return self._manifest

    @property
    def same_world(self) -> bool:
        """Whether it was saved by as many ranks as there are now."""
        return self.manifest.world == self.answer.world

    def load(self, only: str | Collection[str] | None = None) -> State:
        """The shared state as nested values on the CPU, every byte verified. Any rank, any thread.

        `only` names one key of app_state, or several: the result has these alone, and little more than their bytes is
        read. `Unreachable` if the storage does not give them within the start deadline.

        `Corrupt` names the damaged object. Then the ledger reads it again in another process, and if that confirms,
        the next start goes to the checkpoint before this one.
        """
        try:
            return self.read_shared(only)
        except Corrupt as error:
            damage = damage_of(error)
            if damage is not None:
                report = DamageReport(save=self.save, damage=damage, reader=this_process())
                try:
                    told = self._transport.report_damage(report).detail
                except CkptdError as second:
                    told = f"it could not be made: {describe(second)}"
                error.add_note(f"second reading: {told}")
            raise

    def read_shared(self, only: str | Collection[str] | None = None) -> State:
        """As `load`, without telling anyone about damage."""
        give_up_at = time.monotonic() + self.deadline_seconds
        keys = [only] if isinstance(only, str) else only
        with uncollected():
            load = patiently(lambda: Load(self, give_up_at, only=keys), self.deadline_seconds)
            load.arrange()
        fill(load.storage, load.shared_chunks, give_up_at)
        return load.shared.finished()

    def begin(self, give_up_at: float, *, per_rank: bool) -> Load:
        """The shared state before its bytes are read, and with `per_rank` this rank's own. For `fitting`."""
        return Load(self, give_up_at, rank=self._rank if per_rank else None)


class Load:
    """What one rank is about to read of a checkpoint. Only headers are read so far.

    `shared` is the shared state, `own` that of `rank`: None if it asked for none, none was saved, or it was saved by
    another number of ranks. `shared_chunks` are the same on every rank, `own_chunks` are what this one needs besides.
    """

    def __init__(
        self, found: Found, give_up_at: float, *, rank: int | None = None, only: Collection[str] | None = None
    ) -> None:
        parts = found.manifest.parts
        self.storage = found._transport.storage
        self._sources = Sources(self.storage, give_up_at)
        self._names = Names(self._sources, parts)
        tree: JsonValue = parts[0].shared
        if only is not None:
            tree = part_of(tree, only, f"the checkpoint of step {found.step}")
        self.shared = Blank(tree, self._names.size_of)
        self.shared_chunks: list[Chunk] = self._sources.chunks()
        self.own: Blank | None = None
        self.own_chunks: list[Chunk] = []
        if rank is None or not found.same_world or rank >= len(parts) or parts[rank].per_rank is None:
            return
        self._own_names = Names(self._sources, [parts[rank]])
        self.own = Blank(parts[rank].per_rank, self._own_names.size_of, root="per_rank")
        read = {(item.ref.key, index) for item, index in self.shared_chunks}
        self.own_chunks = [chunk for chunk in self._sources.chunks() if (chunk[0].ref.key, chunk[1]) not in read]

    def arrange(self) -> None:
        """Called before anything is read, when all live tensors are in their places."""
        self._names.put(self.shared.places())
        if self.own is not None:
            self._own_names.put(self.own.places())
        self._sources.arrange()
