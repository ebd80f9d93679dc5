"""One rank of the job that `make chaos` disturbs: a small network with dropout, AdamW, a schedule, a sampler.

    torchrun .. chaos_rank RUN CONTROL

CONTROL is a JSON file that the harness replaces: `limit` (the step to wait at), `orders` (failpoints), `url`,
`harness` (its process id: without it the rank ends), `end`, `again` (save a step once more whose save failed),
`parallel` (all ranks write a part of the shared state), `group_seconds` (the process group's own timeout). Each rank
appends JSON lines to the file that CHAOS_EVENTS names: `start`, `step` with the loss to the last bit, `queued`,
`durable`, `failed`, `fenced`, `gate`, `end`.
Losses depend on the seed and the step alone, never on how often the job was started.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptd.errors import CkptdError, Conflict, Fenced, Unavailable
from ckptd.failpoints import VARIABLE
from ckptd.testing.chaos.stub import tell
from ckptd_client import CheckpointClient, SaveHandle
from ckptd_client.data import ResumableSampler, RngState, seed_rank

SIZE, WIDTH, MICRO_BATCH, FROZEN = 999, 64, 4, 500
LOOK_SECONDS = 0.02
SAVE_SECONDS, START_SECONDS = 20.0, 150.0


class Network:
    """Model, optimizer, schedule and data: the same on every rank, whatever incarnation."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.frozen = torch.randn(FROZEN, WIDTH, generator=generator)  # never trained: saves borrow it
        self.inputs = torch.randn(SIZE, WIDTH, generator=generator)
        self.targets = torch.tanh(self.inputs @ torch.randn(WIDTH, 1, generator=generator))
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1)
        )
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9999)

    def step(self, samples: list[int], count: int) -> float:
        """One optimizer step of all ranks; the loss of the whole batch. Plain sums over the ranks, not DDP, whose
        buckets change their layout in the first steps of a process."""
        output: torch.Tensor = self.model(self.inputs[samples])
        loss = (output - self.targets[samples]).square().sum() + self.frozen.sum() / SIZE
        (loss / count).backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return float(total) / count


class Rank:
    """The loop, and what it says."""

    def __init__(self, run: str, control: Path) -> None:
        self.run, self._path = run, control
        self._handle: SaveHandle | None = None
        self._gate = -1
        self.control = self.look()

    def look(self) -> dict[str, Any]:
        """What the harness wants now. Ends the process if there is no harness any more."""
        self.control = json.loads(self._path.read_text())
        os.environ[VARIABLE] = self.control["orders"]
        if not Path(f"/proc/{self.control['harness']}").exists():
            raise SystemExit(9)
        return self.control

    def train(self) -> None:
        seed = int(self.control["seed"])
        with CheckpointClient(
            self.control["url"],
            run=self.run,
            contract={"seed": seed},
            strict=("seed",),
            start_deadline_seconds=START_SECONDS,
            save_deadline_seconds=SAVE_SECONDS,
            parallel=self.control["parallel"],
        ) as client:
            dist.init_process_group("gloo", timeout=timedelta(seconds=self.control["group_seconds"]))
            client.latest()  # before anything else, as a rank does that wraps its model
            network = Network(seed)
            sampler = ResumableSampler(
                SIZE, seed=seed, rank=client.rank, world=client.world_size, micro_batch=MICRO_BATCH
            )
            rng = RngState()
            state: dict[str, object] = {
                "model": network.model,
                "frozen": network.frozen,
                "optimizer": network.optimizer,
                "schedule": network.schedule,
                "sampler": sampler,
            }
            seed_rank(seed, 0, client.rank)
            step = client.restore(state, per_rank={"rng": rng})
            found = client.latest()  # once more: `restore` may have gone to the checkpoint before, with all ranks
            who = {"generation": client.generation, "pid": os.getpid(), "node": os.environ["CHAOS_NODE"]}
            tell("start", step=step, save=found.save if found else None, url=self.control["url"], **who)
            while not (self.look()["end"] and step >= self.control["limit"]):
                if step >= self.control["limit"]:
                    if not self.wait_at(step, client.generation) and self.control["again"]:
                        self.save(client, state, step, rng)
                    continue
                began = time.monotonic()
                batch = sampler.next_batch()
                mine = [sample for micro in batch.micro_batches for sample in micro]
                loss = network.step(mine, len(batch.samples))
                step += 1
                seconds, crc = time.monotonic() - began, zlib.crc32(repr(mine).encode())
                tell("step", step=step, generation=client.generation, loss=loss.hex(), crc=crc, seconds=seconds)
                if step % self.control["save_every"] == 0:
                    self.settle(client.generation)
                    self.save(client, state, step, rng)
                time.sleep(self.control["pause"])  # the time an accelerator would take
            self.settle(client.generation)
            dist.destroy_process_group()

    def save(self, client: CheckpointClient, state: dict[str, object], step: int, rng: RngState) -> None:
        self._handle = client.save(state, step=step, per_rank={"rng": rng})
        tell("queued", step=step, save=self._handle.save, generation=client.generation)

    def settle(self, generation: int) -> bool:
        """What became of the last save. One that failed costs its checkpoint and not the training."""
        handle, self._handle = self._handle, None
        if handle is None:
            return True
        who = {"step": handle.step, "save": handle.save, "generation": generation}
        try:
            handle.wait(2 * SAVE_SECONDS + 60.0)
        except (Unavailable, Conflict) as error:
            tell("failed", reason=str(error), kind=type(error).__name__, **who)
            return False
        except Fenced as error:
            tell("fenced", reason=str(error), **who)
            raise
        tell("durable", **who)
        return True

    def wait_at(self, step: int, generation: int) -> bool:
        """Whether the last save is durable."""
        durable = self.settle(generation)
        if self._gate != step:
            self._gate = step
            tell("gate", step=step, generation=generation)
        time.sleep(LOOK_SECONDS)
        return durable


def main() -> int:
    torch.set_num_threads(1)
    try:
        Rank(sys.argv[1], Path(sys.argv[2])).train()
    except (CkptdError, RuntimeError) as error:
        tell("end", error=type(error).__name__, reason=str(error)[:500])
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return 3 if isinstance(error, Fenced) else 4
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # taking down a forked interpreter with torch in it costs seconds, and nothing is left to do
