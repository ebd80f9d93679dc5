"""What a piece of work costs this process: seconds, CPU, bytes on the disk, memory. Linux only."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


class Meter:
    """`meter = Meter()`, work, `meter.read()`. CPU counts all threads of this process, system time included."""

    def __init__(self) -> None:
        self._io, self._cpu, self._at = io(), _cpu(), time.perf_counter()

    def read(self) -> dict[str, float]:
        at, cpu, now = time.perf_counter(), _cpu(), io()
        return {
            "seconds": at - self._at,
            "cpu_seconds": cpu - self._cpu,
            "disk_read_bytes": float(now["read_bytes"] - self._io["read_bytes"]),
            "disk_written_bytes": float(now["write_bytes"] - self._io["write_bytes"]),
        }


def io() -> dict[str, int]:
    """The counters of /proc/self/io. `rchar` counts what read calls returned, from whatever cache; sockets do not
    count, and neither does mapped memory."""
    pairs = (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(number) for name, number in pairs}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory_bytes(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Resident memory of a process; `VmHWM` is its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/{pid}/status")


def forget_peak() -> None:
    """From here on `VmHWM` counts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def family_bytes() -> int:
    """Memory of this process and its descendants, each shared page counted once among them."""
    total, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def alone(work: Callable[[], object]) -> dict[str, float]:
    """The costs of `work` the first time, in a fork of this process; `peak_bytes` is the peak of its memory beyond
    what was there before. Call it before anything started a thread. What it raises is a RuntimeError here."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        _in_fork(work, sender)
    os.close(sender)
    with os.fdopen(receiver, "rb") as stream:
        said = stream.read()
    status = os.waitpid(pid, 0)[1]
    if status or not said:
        raise RuntimeError(f"it ended with status {status}; its traceback is in the log")
    found: dict[str, float] = json.loads(said)
    return found


def _in_fork(work: Callable[[], object], sender: int) -> None:
    code = 1
    try:
        forget_peak()
        before, meter = memory_bytes(), Meter()
        work()
        found = meter.read() | {"peak_bytes": float(memory_bytes(field="VmHWM") - before)}
        os.write(sender, json.dumps(found).encode())
        code = 0
    except BaseException:  # noqa: BLE001 - told in the log, and by the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
