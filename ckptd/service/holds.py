"""Which readers of checkpoints are still there. Kept in memory; the holds themselves, and their ends, are records."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckptd.state import RunState

# A reader may refresh its hold through another service, which this one hears nothing of.
UNHEARD_FACTOR = 12


class Holds:
    """Callable from any thread. After a restart of the service every silence begins anew.

    A reader that this service heard of is silent after `silent_seconds`; one that it knows from the log alone after
    UNHEARD_FACTOR times as long.
    """

    def __init__(self, *, silent_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.silent_seconds = silent_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[tuple[str, str, str], float] = {}
        self._seen: dict[tuple[str, str, str, int], float] = {}

    def heard(self, run: str, save: str, who: str) -> None:
        """`who` reads `save`, and said so now."""
        with self._lock:
            self._heard[run, save, who] = self._clock()

    def silent(self, run: str, state: RunState) -> list[tuple[str, str, int]]:
        """The holds of a run, by save, reader and turn, whose readers seem to be gone. Forgets those that ended."""
        held = [(save, who) for save, readers in state.held.items() for who in sorted(readers)]
        turns = {(run, save, who, state.turns.get(f"hold:{save}:{who}", 0)) for save, who in held}
        with self._lock:
            now = self._clock()
            self._heard = {key: at for key, at in self._heard.items() if key[0] != run or key[1:] in held}
            self._seen = {key: at for key, at in self._seen.items() if key[0] != run or key in turns}
            for key in turns:
                self._seen.setdefault(key, now)
            return [key[1:] for key in sorted(turns) if self._left(key, now) <= 0]

    def _left(self, key: tuple[str, str, str, int], now: float) -> float:
        heard = self._heard.get(key[:3])
        if heard is not None:
            return heard + self.silent_seconds - now
        return self._seen[key] + self.silent_seconds * UNHEARD_FACTOR - now
