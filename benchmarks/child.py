"""One job in a process of its own: `python -m benchmarks.child JOB_AS_JSON FOLDER`.

Its standard output belongs to the parent: a JSON line for each thing it does, and the result as the last one. What
libraries print goes to standard error, which the parent keeps in a log.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from benchmarks.jobs import GROUPS, Job
from benchmarks.results import Part


def main() -> None:
    job, folder = Job.model_validate_json(sys.argv[1]), Path(sys.argv[2])
    if job.group not in GROUPS:
        raise ValueError(f"there is no group {job.group}")
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    part: Part = importlib.import_module(f"benchmarks.{job.group}").measure(
        job, folder, lambda doing: _say(said, {"doing": doing})
    )
    _say(said, {"part": part.model_dump(mode="json")})


def _say(stream: TextIO, what: object) -> None:
    stream.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main()
