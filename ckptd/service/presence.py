"""Who was heard of a moment ago, so that two live jobs of one run name do not fence each other in turns.

Politeness only, kept in memory: the log alone decides who counts. One job per run is remembered: the one that
holds the run's current generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.errors import InUse


@dataclass(frozen=True)
class _Heard:
    job: str
    host: str
    at: float


class Presence:
    """Callable from any thread. `clock` counts seconds and never goes back."""

    def __init__(self, *, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[str, _Heard] = {}
        self._hosts: dict[str, tuple[str, str]] = {}  # run -> the job that opened an attempt last, and its host

    def opened(self, run: str, job: str, host: str) -> None:
        """A job wants the run; it does not hold it yet."""
        with self._lock:
            self._hosts[run] = (job, host)

    def heard(self, run: str, job: str, host: str = "") -> None:
        """The job that holds the run is alive. Without `host`, the one it opened its attempt from."""
        with self._lock:
            known_job, known_host = self._hosts.get(run, ("", ""))
            if not host and known_job == job:
                host = known_host
            self._heard[run] = _Heard(job, host, self._clock())

    def last(self, run: str) -> tuple[str, float] | None:
        """The job that holds the run, and how many seconds ago it was heard of; None if it never was."""
        with self._lock:
            heard = self._heard.get(run)
            return (heard.job, self._clock() - heard.at) if heard is not None else None

    def refuse_other(self, run: str, job: str) -> None:
        """`InUse` if another job than `job` holds the run and was heard of within the window."""
        with self._lock:
            last = self._heard.get(run)
            if last is None or last.job == job:
                return
            seconds = self._clock() - last.at
        if seconds < self._window_seconds:
            raise InUse(
                f"run {run} is in use by job {last.job!r} on {last.host or 'an unknown host'},"
                f" heard of {seconds:.0f} s ago",
                run=run,
                job=last.job,
                host=last.host,
                seconds_ago=round(seconds, 1),
            )
