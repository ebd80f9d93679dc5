"""One rank with a spool as a process of its own, which does what its standard input says and answers in JSON lines.

    python spooling_rank.py URL RUN SPOOL PATIENCE_SECONDS

`save` trains a step and saves it, `wait` waits until everything is durable, `look` tells what became of the saves,
`close` ends it. The first line tells the step it resumed from.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from ckptd_client import CheckpointClient, SaveHandle
from tests.client.ranks import Trained


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(url: str, run: str, spool: str, patience: str) -> None:
    torch.set_num_threads(1)
    trained, handles = Trained(), list[SaveHandle]()
    with CheckpointClient(
        url, run, spool=spool, spool_patience_seconds=float(patience), save_deadline_seconds=120.0
    ) as client:
        step = client.restore(trained.app)
        tell(step=step, epoch=trained.app["epoch"], digest=[part.hex() for part in trained.digest()])
        for line in sys.stdin:
            match line.strip():
                case "save":
                    trained, step = Trained(updates=step + 1), step + 1
                    began = time.monotonic()
                    handles.append(client.save(trained.app, step=step))
                    tell(step=step, seconds=time.monotonic() - began)
                case "wait":
                    client.wait()
                    tell(durable_step=client.durable_step)
                case "look":
                    tell(
                        statuses={handle.step: handle.status for handle in handles},
                        spooled=[handle.step for handle in handles if handle.spooled],
                        counts=client.counts,
                        durable_step=client.durable_step,
                    )
                case "close":
                    break
    tell(closed=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
