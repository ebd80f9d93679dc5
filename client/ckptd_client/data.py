"""What a training loop needs to go on where it was: the position in its data, and its random numbers.

The order of an epoch is a permutation that depends on (seed, epoch) alone. The position in it counts the samples that
all ranks together have taken. What remains is cut into global batches, and each is dealt to the ranks that exist now.
So every sample is taken exactly once per epoch, also when the world grows or shrinks in the middle of it;
`torch.utils.data.DistributedSampler` cannot do that, because it deals the whole epoch at its start.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptd.errors import Invalid


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step: those of all ranks, and this rank's share, cut into micro batches."""

    epoch: int
    samples: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...]
    """Equally many on every rank. In an epoch's last batch some may be empty: run them with zero weight."""
    ends_epoch: bool


class ResumableSampler:
    """Put it into the checkpointed state; all ranks hold the same one, but for `rank`.

    `next_batch` moves the position when a batch is handed out, so a checkpoint must be taken between two
    optimizer steps: after the batch was trained on, before the next is asked for. `data_digest` names the
    training samples; a checkpoint of other data, another seed or another shuffling is refused, because
    its position would mean other samples.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        rank: int,
        world: int,
        micro_batch: int,
        accumulate: int = 1,
        data_digest: str = "",
    ) -> None:
        counts = {"size": size, "world": world, "micro_batch": micro_batch, "accumulate": accumulate}
        for name, value in counts.items():
            if value < 1:
                raise Invalid(f"sampler: {name} is {value}, expected at least 1", field=name)
        if not 0 <= rank < world:
            raise Invalid(f"sampler: rank is {rank}, expected 0 to {world - 1}", field="rank")
        self.size, self.seed, self.rank, self.world = size, seed, rank, world
        self.micro_batch, self.accumulate, self.data_digest = micro_batch, accumulate, data_digest
        self.epoch = 0
        self.consumed = 0
        """Samples of this epoch that all ranks together have taken; always below `size`."""
        self._order = _permutation(size, seed, 0)

    @property
    def samples_seen(self) -> int:
        """Samples taken since the run began, over all epochs, ranks and incarnations."""
        return self.epoch * self.size + self.consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; in the epoch it is in already, keep the position."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0
            self._order = _permutation(self.size, self.seed, epoch)

    def next_batch(self) -> GlobalBatch:
        """This rank's share of the next optimizer step. After an epoch's last batch, the next epoch begins."""
        block = self.micro_batch * self.world * self.accumulate
        samples = self._order[self.consumed : self.consumed + block]
        longest_share = -(-len(samples) // self.world)
        mine = samples[self.rank :: self.world]
        starts = range(0, longest_share, self.micro_batch)
        micro_batches = tuple(tuple(mine[start : start + self.micro_batch]) for start in starts)
        epoch, end = self.epoch, self.consumed + len(samples)
        if end < self.size:
            self.consumed = end
        else:
            self.set_epoch(epoch + 1)
        return GlobalBatch(epoch, tuple(samples), micro_batches, ends_epoch=end == self.size)

    def __iter__(self) -> Iterator[GlobalBatch]:
        """The rest of the current epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank; the world size is no part of it."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "size": self.size,
            "seed": self.seed,
            "data_digest": self.data_digest,
            "order_digest": _digest(self._order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved position; raises `Invalid` when it belongs to other data or another order."""
        order = _permutation(self.size, self.seed, int(state["epoch"]))
        mine = {
            "size": self.size,
            "seed": self.seed,
            "data_digest": self.data_digest,
            "order_digest": _digest(order),
        }
        for name, value in mine.items():
            if state[name] != value:
                raise Invalid(
                    f"the checkpoint's {name} is {state[name]!r} and this job's is {value!r}: its position in "
                    "the epoch would mean other samples",
                    do="Start with the data, seed and torch version of the run, or under another run name.",
                    field=name,
                )
        self.epoch, self.consumed, self._order = int(state["epoch"]), int(state["consumed"]), order


def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    """On the CPU and from a generator of its own: equal on all hosts, and no other random number moves."""
    mixed = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7]))
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def _digest(order: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, order)).encode()).hexdigest()[:16]


class RngState:
    """The random state of this process, for the `per_rank` part of a checkpoint: Python's, numpy's global one,
    torch's on the CPU and, with a CUDA `device`, on that device. `restore` loads it last; seeding or drawing after
    that undoes it, which `moved` tells right before the first step.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._loaded = ""

    @property
    def moved(self) -> bool:
        """Whether random numbers were drawn or seeded since a state was loaded. False if none was loaded."""
        return self._loaded not in ("", self._digest())

    def state_dict(self) -> dict[str, Any]:
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "cpu": torch.get_rng_state(),
        }
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["cpu"].cpu())
        if self._device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self._device)
        self._loaded = self._digest()

    def _digest(self) -> str:
        state = self.state_dict()
        numbers = [state[name].numpy().tobytes() for name in ("cpu", "cuda") if name in state]
        numpy = {**state["numpy"], "state": {k: np.asarray(v).tolist() for k, v in state["numpy"]["state"].items()}}
        return hashlib.sha256(b"".join([repr((state["python"], numpy)).encode(), *numbers])).hexdigest()


def seed_rank(seed: int, generation: int, rank: int) -> None:
    """Seed this process where no saved random state fits: another stream for each rank and each incarnation.

    `generation` is 0 in a new run, so that a run killed before its first checkpoint begins again as it began; after a
    change of the world size it is the client's, because a rank's old stream belongs to samples it no longer gets.
    """
    mixed = hashlib.sha256(f"{seed}/{generation}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(mixed[:7]))
    random.seed(mixed)
    np.random.seed(int.from_bytes(mixed[:4]))
