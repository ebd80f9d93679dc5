"""Which readers of checkpoints are still there. Kept in memory; the holds themselves, and their ends, are records.

A reader may say that it is there through any of several services. One that hears it says so in the log now and then,
which the others see. So no rule reads a clock, and each service measures silence by its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckptd.state import RunState

Hold = tuple[str, str, str]  # run, save, reader


class Holds:
    """Callable from any thread. After a restart of the service every silence begins anew.

    A reader is silent when this service heard nothing of it for `silent_seconds`: not from itself, and not by a
    record of its hold.
    """

    def __init__(self, *, silent_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.silent_seconds = silent_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[Hold, float] = {}
        self._wrote: dict[Hold, float] = {}  # when this service wrote a record of it last
        self._seen: dict[Hold, tuple[int, float]] = {}  # its turn in the log, and when that was seen first

    def heard(self, run: str, save: str, who: str) -> bool:
        """`who` reads `save`, and said so now. Whether to say so in the log, too, for the other services: when the
        reader comes to this one first, and then often enough that it is never silent for them."""
        with self._lock:
            now = self._heard[run, save, who] = self._clock()
            last = self._wrote.get((run, save, who))
            return last is None or now - last >= self.silent_seconds / 2

    def wrote(self, run: str, save: str, who: str, turn: int) -> None:
        """This service wrote the record of that turn of the hold now."""
        with self._lock:
            now = self._wrote[run, save, who] = self._clock()
            self._seen[run, save, who] = (turn + 1, now)

    def silent(self, run: str, state: RunState) -> list[tuple[str, str, int]]:
        """The holds of a run, by save, reader and turn, whose readers seem to be gone. Forgets those that ended."""
        turns = {
            (run, save, who): state.turns.get(f"hold:{save}:{who}", 0)
            for save, readers in state.held.items()
            for who in readers
        }
        with self._lock:
            now = self._clock()
            for known in (self._heard, self._wrote, self._seen):
                for key in [key for key in known if key[0] == run and key not in turns]:
                    del known[key]
            for key, turn in turns.items():
                if self._seen.get(key, (-1, now))[0] != turn:
                    self._seen[key] = (turn, now)
            return [(*key[1:], turns[key]) for key in sorted(turns) if now - self._last(key) >= self.silent_seconds]

    def _last(self, key: Hold) -> float:
        return max(self._heard.get(key, self._seen[key][1]), self._seen[key][1])
