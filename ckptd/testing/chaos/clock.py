"""Another time of day for chosen processes: a preloaded library of a few lines, made here by the C compiler.

libfaketime does the same and more, and with it Python's `time.sleep` fails. The monotonic clock is left alone, as it
is when somebody sets a machine's clock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ckptd.errors import Invalid

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *offset;
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *at = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) offset = at;
    close(file);
}
int clock_gettime(clockid_t clock, struct timespec *to) {
    int result = syscall(SYS_clock_gettime, clock, to);
    if (result == 0 && offset && clock == CLOCK_REALTIME) to->tv_sec += *offset;
    return result;
}
int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    if (to) { to->tv_sec = now.tv_sec; to->tv_usec = now.tv_nsec / 1000; }
    return result;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """One clock, for all processes that are started with its `env`, and their children."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file, self._library = folder / f"clock-{name}", folder / f"clock-{name}.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise Invalid("there is no C compiler", do="Install one, or do without jumping clocks.", field="cc")
        self._file.write_bytes(struct.pack("l", 0))
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(self._library)],
            input=SOURCE.encode(),
            check=True,
            capture_output=True,
        )

    @property
    def env(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file)}

    @contextlib.contextmanager
    def jumped(self, seconds: int) -> Iterator[None]:
        """So much later, or earlier, from one moment to the next; and back at the end."""
        self._set(seconds)
        try:
            yield
        finally:
            self._set(0)

    def seen(self) -> int:
        """The time of day in a process under this clock, in seconds."""
        done = subprocess.run(["date", "+%s"], env={**os.environ, **self.env}, capture_output=True, check=True)
        return int(done.stdout)

    def _set(self, seconds: int) -> None:
        with self._file.open("r+b") as stream:
            stream.write(struct.pack("l", seconds))


def clock_if_any(folder: Path, name: str) -> Clock | None:
    """None on a machine without a compiler."""
    try:
        return Clock(folder, name)
    except Invalid:
        return None
