"""One rank of `benchmarks.restart`: a small model, gradients averaged over gloo, a line for each step from rank 0.

With CKPTD_URL it restores and saves; without, ckptd is not even imported, as in a job that does not know it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SAVE_EVERY = 3
PACE_SECONDS = 0.02


def main() -> None:
    events, pause = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    client = _client()
    dist.init_process_group("gloo")
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    step = client.restore(state) if client is not None else 0
    while True:
        while dist.get_rank() == 0 and pause.exists():
            time.sleep(PACE_SECONDS)
        model(torch.randn(8, 256)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            with events.open("a") as file:
                file.write(json.dumps({"step": step, "pid": os.getpid(), "time": time.time()}) + "\n")
        if client is not None and step % SAVE_EVERY == 0:
            client.save(state, step=step)
        time.sleep(PACE_SECONDS)


def _client() -> Any:
    if not os.environ.get("CKPTD_URL"):
        return None
    from ckptd_client import CheckpointClient

    return CheckpointClient.from_env()


if __name__ == "__main__":
    main()
