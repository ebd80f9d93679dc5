"""What the surroundings say about this process: its rank, the number of ranks, the job's name."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from ckptd.errors import Invalid


def place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the number of ranks: as given, else as the process group or torchrun say."""
    group = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
    here = (_environment_number("RANK", 0), _environment_number("WORLD_SIZE", 1))
    given = (here[0] if rank is None else rank, here[1] if world_size is None else world_size)
    if group is not None and (rank, world_size) == (None, None):
        return group
    if group is not None and group != given:
        raise Invalid(
            f"rank {given[0]} of {given[1]} was assumed, the process group says rank {group[0]} of {group[1]}",
            do="Make the client with rank= and world_size= if it is made before the process group without torchrun.",
            field="rank",
        )
    if not 0 <= given[0] < given[1]:
        raise Invalid(f"rank {given[0]} of {given[1]} ranks: expected 0 <= rank < world_size", field="rank")
    return given


def job_name() -> str:
    """What tells two jobs apart while both live. For politeness only; it need not be unique."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    named = os.environ.get("CKPTD_JOB") or os.environ.get("SLURM_JOB_ID") or (elastic if elastic != "none" else "")
    return (named or f"{socket.gethostname()}:{os.getppid()}")[:200]


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError as error:
        raise Invalid(f"{name}={text!r} in the environment: expected a number", field=name) from error


def with_environment(options: dict[str, Any]) -> dict[str, Any]:
    """The client's options, with CKPTD_URL and CKPTD_RUN for those that are not given. `Invalid` without either."""
    names = {"url": "CKPTD_URL", "run": "CKPTD_RUN"}
    found = {name: os.environ[variable] for name, variable in names.items() if os.environ.get(variable)}
    settings = {**found, **options}
    missing = [names[name] for name in ("url", "run") if name not in settings]
    if missing:
        raise Invalid(
            f"{' and '.join(missing)} is not set",
            do="Set CKPTD_URL to the service or the storage, and CKPTD_RUN to the run's name.",
            field=missing[0],
        )
    return settings
