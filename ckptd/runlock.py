"""The lock of one run's log, which nobody waits for without an end.

Whoever holds it reads the storage, and a dead mount never answers. Without a bound every call about the run would
wait behind the first one, each with a thread of the service.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

from ckptd.errors import Unavailable


class RunLock:
    """Reentrant, as the log's own methods take it again. `Unavailable` for whoever waited `deadline_seconds`, and for
    everybody as soon as one holder has had it for so long."""

    def __init__(self, run: str, deadline_seconds: float) -> None:
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._lock = threading.RLock()
        self._depth = 0
        self._since = 0.0  # when the holder took it

    def __enter__(self) -> None:
        give_up_at = time.monotonic() + self._deadline_seconds
        while not self._lock.acquire(timeout=self._patience_seconds(give_up_at)):
            if self._patience_seconds(give_up_at) == 0.0:
                raise Unavailable(
                    f"run {self._run}: another call about it has been waiting for the storage for"
                    f" {time.monotonic() - self._since:.0f} s",
                    do="Retry; if it stays, the storage hangs: look at its mount.",
                    run=self._run,
                )
        if self._depth == 0:
            self._since = time.monotonic()  # before `_depth`, by which others see that it is held
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        self._lock.release()

    def _patience_seconds(self, give_up_at: float) -> float:
        """How long to wait for this holder; for the next one, if it lets go meanwhile, anew."""
        until = min(give_up_at, self._since + self._deadline_seconds) if self._depth else give_up_at
        return max(0.0, until - time.monotonic())
