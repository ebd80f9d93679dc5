"""Who writes snapshots of a run's state, and when: whoever appended and has read many records since the last one.

Never in the way of an answer or a commit: afterwards, on a thread of its own, from a copy. What goes wrong is logged
and counted, and tried again after as many records more.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from ckptd import layout, log_snapshots
from ckptd.errors import CkptdError
from ckptd.log import RunLog

Aside = Callable[[Callable[[], None]], None]
_log = logging.getLogger("ckptd.snapshots")


def on_a_thread(call: Callable[[], None]) -> None:
    """A daemon: the end of the process does not wait for a snapshot."""
    threading.Thread(target=call, name="ckptd-snapshot", daemon=True).start()


class Snapshotter:
    """One of a ledger. `tally` counts what was `written`, was there already (`other`), and `failed`."""

    def __init__(self, aside: Aside = on_a_thread) -> None:
        self.tally: Counter[str] = Counter()
        self._aside = aside
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    def after(self, log: RunLog) -> None:
        """Any thread, after an append to `log`. Returns at once."""
        if not log.snapshot_is_due(log.state.seq):
            return
        with self._lock:
            if log.run in self._busy:
                return
            self._busy.add(log.run)
        self._aside(lambda: self._try(log))

    def _try(self, log: RunLog) -> None:
        try:
            self._write(log)
        except CkptdError as error:
            self.tally["failed"] += 1
            log.snapshot_seq = log.state.seq
            _log.warning("run %s: no snapshot was written, the log is as good: %s", log.run, error.message)
        finally:
            with self._lock:
                self._busy.discard(log.run)

    def _write(self, log: RunLog) -> None:
        with log.lock:
            state = log.state.snapshot()
        for name in log_snapshots.listed(log.storage, log.run):
            found = layout.snapshot_of(name)
            if found is not None and log.snapshot_seq < found[0] <= state.seq:
                log.snapshot_seq = found[0]
                break
        if not log.snapshot_is_due(state.seq):
            self.tally["other"] += 1
            return
        name = log_snapshots.write(log.storage, log.run, state)
        log.snapshot_seq = state.seq
        self.tally["written"] += 1
        _log.info("run %s: snapshot %s", log.run, name)
