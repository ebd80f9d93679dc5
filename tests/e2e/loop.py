"""A small training loop, run as a real process by the end-to-end tests: alone, or on several ranks by torchrun.

    python loop.py URL RUN EVENTS [--steps N] [--save-every N] [--hold-at STEP FILE] [--no-direct]

It appends JSON lines to EVENTS: `start` {step, generation}, `saved` {step}, `done` {step, weights}. `--hold-at` makes
it wait before that step until FILE exists. Exit codes: 0, 3 for Fenced, 4 for Unavailable, 5 for another ckptd error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptd_client import CheckpointClient, CkptdError, Fenced, Unavailable

HOLD_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("run")
    parser.add_argument("events", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--hold-at", nargs=2, default=None)
    parser.add_argument("--no-direct", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        train(args)
    except CkptdError as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, Fenced) else 4 if isinstance(error, Unavailable) else 5
    return 0


def train(args: argparse.Namespace) -> None:
    with CheckpointClient(args.url, run=args.run, direct=not args.no_direct) as client:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        torch.manual_seed(client.rank)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        state: dict[str, object] = {"model": model, "optimizer": optimizer, "seen": 0}
        own: dict[str, object] = {"rng": torch.get_rng_state()}
        step = client.restore(state, per_rank=own)
        rng = own["rng"]
        assert isinstance(rng, torch.Tensor)
        torch.set_rng_state(rng)
        tell(args, client, "start", step=step, world=client.world_size, seen=state["seen"])
        while step < args.steps:
            hold(args, step + 1)
            loss = model(torch.randn(4, 64)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                if dist.is_initialized():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            state["seen"] = step * 4
            if step % args.save_every == 0:
                own = {"rng": torch.get_rng_state()}
                client.save(state, step=step, metrics={"loss": loss.item()}, per_rank=own, wait=True)
                tell(args, client, "saved", step=step)
        weights = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
        tell(args, client, "done", step=step, weights=weights)


def hold(args: argparse.Namespace, step: int) -> None:
    """The test decides when training goes on."""
    if args.hold_at is None or step != int(args.hold_at[0]):
        return
    give_up_at = time.monotonic() + HOLD_SECONDS
    while not Path(args.hold_at[1]).exists():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{args.hold_at[1]} did not come")
        time.sleep(0.02)


def tell(args: argparse.Namespace, client: CheckpointClient, event: str, **what: Any) -> None:
    line = json.dumps({"event": event, "rank": client.rank, "generation": client.generation, **what})
    fd = os.open(args.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
