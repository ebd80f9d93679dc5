"""One rank of a training whose world size changes between incarnations; started by torchrun.

    torchrun .. world_size_rank.py URL RUN EVENTS UNTIL_STEP

Each rank appends JSON lines to EVENTS: `start` {step}, and for every optimizer step the samples it trained on itself,
the loss of the whole batch, the learning rate, and a random number drawn from its own stream.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptd_client import CheckpointClient
from ckptd_client.data import ResumableSampler, RngState, seed_rank

SIZE, SEED, MICRO_BATCH = 41, 7, 3
LR = 0.05


class Regression:
    """The model, its optimizer and the data: the same on every rank, and in the test's own process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.inputs = torch.randn(SIZE, 4, generator=generator)
        self.targets = self.inputs @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.1
        self.model = torch.nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def loss_sum(self, samples: Sequence[int]) -> torch.Tensor:
        """With a graph also for no samples: a rank whose share is empty takes part all the same."""
        chosen = list(samples)
        output: torch.Tensor = self.model(self.inputs[chosen])
        return (output.squeeze(-1) - self.targets[chosen]).square().sum()


def main() -> None:
    url, run, events, until = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    with CheckpointClient(
        url, run=run, contract={"seed": SEED, "micro_batch": MICRO_BATCH}, strict=("seed",)
    ) as client:
        dist.init_process_group("gloo")
        found = client.latest()
        training = Regression()
        sampler = ResumableSampler(
            SIZE, seed=SEED, rank=client.rank, world=client.world_size, micro_batch=MICRO_BATCH
        )
        rng = RngState()
        state: dict[str, object] = {
            "model": training.model,
            "optimizer": training.optimizer,
            "scheduler": training.scheduler,
            "sampler": sampler,
        }
        seed_rank(SEED, 0, client.rank)
        step = client.restore(state, per_rank={"rng": rng})
        if found is not None and not client.per_rank_restored:
            seed_rank(SEED, client.generation, client.rank)
        tell(events, client, "start", step=step, consumed=sampler.samples_seen, own=client.per_rank_restored)
        while step < until:
            batch = sampler.next_batch()
            mine = [sample for micro in batch.micro_batches for sample in micro]
            loss = training.loss_sum(mine)
            (loss / len(batch.samples)).backward()  # type: ignore[no-untyped-call]
            for parameter in training.model.parameters():
                dist.all_reduce(parameter.grad)
            total = loss.detach().clone()
            dist.all_reduce(total)
            lr = training.optimizer.param_groups[0]["lr"]
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.scheduler.step()
            step += 1
            told = {"loss": float(total) / len(batch.samples), "lr": lr, "drawn": float(torch.rand(()))}
            tell(events, client, "step", step=step, epoch=batch.epoch, samples=mine, **told)
            client.save(state, step=step, per_rank={"rng": rng}, wait=True)
        dist.destroy_process_group()


def tell(events: Path, client: CheckpointClient, event: str, **what: Any) -> None:
    who = {"event": event, "rank": client.rank, "world": client.world_size, "generation": client.generation}
    fd = os.open(events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, json.dumps({**who, **what}).encode() + b"\n")
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
