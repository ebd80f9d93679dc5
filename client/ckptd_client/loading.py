"""A found checkpoint, and how its bytes become state again, each one verified on the way."""

from __future__ import annotations

from typing import cast

from pydantic import JsonValue

from ckptd.errors import CkptdError, Corrupt, Invalid, describe
from ckptd.manifest import Manifest, Part
from ckptd.reading import damage_of, read_manifest
from ckptd.second import this_process
from ckptd.wire import Answer, CheckpointInfo, DamageReport
from ckptd_client import payload
from ckptd_client.transport import Transport
from ckptd_client.unflatten import unflatten

State = dict[str, object]


class Found:
    """The checkpoint that all ranks of this incarnation resume from."""

    def __init__(self, answer: Answer, checkpoint: CheckpointInfo, transport: Transport, rank: int) -> None:
        self.answer = answer
        self.checkpoint = checkpoint
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
            self._manifest = read_manifest(self._transport.storage, self.checkpoint.manifest)
        return self._manifest

    @property
    def same_world(self) -> bool:
        """Whether it was saved by as many ranks as there are now."""
        return self.manifest.world == self.answer.world

    def load(self) -> State:
        """The shared state as nested values on the CPU, every byte verified. Any rank, any thread.

        `Corrupt` names the damaged object. Then the ledger reads it again in another process, and if that confirms,
        the next start goes to the checkpoint before this one.
        """
        try:
            return self.read_shared()
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

    def read_shared(self) -> State:
        """As `load`, without telling anyone about damage."""
        part = self.manifest.parts[0]
        return self._read(part, part.shared)

    def read_per_rank(self) -> State | None:
        """This rank's own state. None if none was saved, or if it was saved by another number of ranks."""
        if not self.same_world or self._rank >= len(self.manifest.parts):
            return None
        part = self.manifest.parts[self._rank]
        return self._read(part, part.per_rank) if part.per_rank is not None else None

    def _read(self, part: Part, tree: JsonValue) -> State:
        if part.payload is None:
            raise Invalid(f"part {part.writer} of save {part.save} has no payload")
        tensors = payload.read(self._transport.storage, part.payload)
        return cast(State, unflatten(tree, tensors))
