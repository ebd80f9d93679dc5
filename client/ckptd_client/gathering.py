"""What one rank puts into a save, gathered on the training thread. No tensor is copied here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptd_client.bounded import uncollected
from ckptd_client.contract import Contract
from ckptd_client.dividing import Division, alike
from ckptd_client.handle import Job
from ckptd_client.snapshot import HostSnapshot
from ckptd_client.state import Flat, flatten
from ckptd_client.stateful import collect
from ckptd_client.suspicion import optimizer_warnings, tell, weight_names
from ckptd_client.unchanged import Unchanged

State = Mapping[str, object]


class Gatherer:
    """Keeps the host buffer of this rank. With `divided` the ranks hold the shared state alike and each writes a part
    of it; without, rank 0 writes it alone. `unchanged` says what need not be written again."""

    def __init__(self, contract: Contract, *, divided: bool, incremental: bool) -> None:
        self.divided = divided
        self.unchanged = Unchanged(on=incremental)
        self._contract = contract
        self._snapshot = HostSnapshot()
        self._division: Division | None = None

    def room(self, app_state: State, per_rank: State | None, rank: int, world: int) -> int:
        """Make the buffer as large as a save of these needs, and touch it. Returns the bytes."""
        with uncollected():
            shared = flatten(collect(app_state), "shared") if rank == 0 or self._divides(world) else None
            return self._snapshot.reserve(_present(self._share(shared, rank, world), _own_flat(per_rank)))

    def gather(self, job: Job, app_state: State, per_rank: State | None) -> Job:
        """`job` with what it saves: the trees, and a place in the buffer for each tensor, to be filled. What looks
        wrong about the shared state goes to the handle's warnings, on rank 0."""
        whole: Flat | None = None
        divides = self._divides(job.world)
        with uncollected():
            if job.rank == 0 or divides:
                state = collect(app_state)
                whole = flatten(state, "shared")
                if job.rank == 0:
                    step = job.handle.step
                    job.handle.warnings += tell(optimizer_warnings(app_state, state, step), step)
            shared, own = self._share(whole, job.rank, job.world), _own_flat(per_rank)
            flats = _present(shared, own)
            return replace(
                job,
                shared=shared.tree if shared is not None else None,
                per_rank=own.tree if own is not None else None,
                form=alike(whole.tensors) if divides and whole is not None else "",
                contract=self._contract.fields(app_state, per_rank, job.world) if job.rank == 0 else {},
                weights=() if divides else weight_names(app_state, "shared"),
                # Last: whatever fails before takes no buffer.
                captured=self._snapshot.begin(flats, last=self.unchanged.last) if flats else None,
            )

    def _divides(self, world: int) -> bool:
        return self.divided and world > 1

    def _share(self, whole: Flat | None, rank: int, world: int) -> Flat | None:
        """What this rank writes of the shared state."""
        if whole is None or not self._divides(world):
            return whole
        self._division = self._division or Division(world)
        return self._division.share(whole, rank)


def _own_flat(per_rank: State | None) -> Flat | None:
    return flatten(collect(per_rank, "per_rank"), "rank", root="per_rank") if per_rank is not None else None


def _present(*flats: Flat | None) -> list[Flat]:
    return [flat for flat in flats if flat is not None]
