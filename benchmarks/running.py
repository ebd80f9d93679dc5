"""Jobs as processes: started one after the other, followed, and always ended; what they wrote is deleted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.jobs import Job
from benchmarks.results import Part

END_SECONDS = 30.0
GIGABYTE = 10**9
# The state once for every peer that keeps a file of it, and room for what is about to be deleted.
MOST_COPIES, SPARE_BYTES = 7, 4 * GIGABYTE


class JobFailed(Exception):
    """A job did not give its result."""


def run_job(job: Job, output: Path, tell: Callable[[str], None]) -> Part:
    """Run one job in a process of its own, with a new folder in `output` that is gone afterwards."""
    _check_space(job, output)
    scratch = Path(tempfile.mkdtemp(prefix=f"{job.group}-", dir=output))
    try:
        return _follow(job, scratch, output / "bench.log", tell)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_space(job: Job, output: Path) -> None:
    needed = min(MOST_COPIES * job.gigabytes * GIGABYTE, 12 * GIGABYTE) + SPARE_BYTES
    free = shutil.disk_usage(output).free
    if free < needed:
        raise JobFailed(f"{output} has {free / GIGABYTE:.0f} GB free, this job needs {needed / GIGABYTE:.0f} GB")


def _follow(job: Job, scratch: Path, log: Path, tell: Callable[[str], None]) -> Part:
    command = [sys.executable, "-m", "benchmarks.child", job.model_dump_json(), str(scratch)]
    with log.open("ab") as stream:
        stream.write(f"\n== {job.model_dump_json()}\n".encode())
        stream.flush()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, start_new_session=True)
    late = threading.Event()

    def end_late() -> None:
        late.set()
        _end(process)

    timer = threading.Timer(job.deadline_seconds, end_late)
    timer.daemon = True
    timer.start()
    part: Part | None = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            if "part" in said:
                part = Part.model_validate_json(json.dumps(said["part"]))
            else:
                tell(said["doing"])
        code = process.wait()
    finally:
        timer.cancel()
        _end(process)
    if late.is_set():
        raise JobFailed(f"it took more than {job.deadline_seconds:g} s and was ended")
    if part is None or code != 0:
        raise JobFailed(f"it ended with {code}; its traceback is in {log}")
    return part


def _end(process: subprocess.Popen[bytes]) -> None:
    """First in order, so that it ends what it started; then its whole session."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
