"""One process of a soak: does to a few runs what trainers, people, readers and retention do, and what must not be.

`python -m ckptd.testing.soak_worker`, with its orders as JSON on standard input; `ckptd.testing.soak` starts it, and
may kill it at any moment. It ends by itself after its number of operations, or at SIGTERM. What it was told it writes
into its journal, and it says there at once what contradicts what it was told before.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path

from ckptd.errors import InUse, Unavailable
from ckptd.testing.soak_hand import Hand, Orders
from ckptd.testing.soak_journal import Journal, operations_in
from ckptd.testing.soak_keeping import Keeping
from ckptd.testing.soak_training import Training

TRAINING = {
    "start": 7, "save": 45, "repeat": 7, "abort": 5, "latest": 10, "join": 6, "late": 3, "crash": 1
}  # fmt: skip
KEEPING = {
    "verify": 5, "retain": 3, "retire": 4, "collect": 4, "pin": 4, "unpin": 3, "hold": 4, "release": 3,
    "quarantine": 2, "reinstate": 2, "rollback": 1, "damage": 2,
}  # fmt: skip


class Worker:
    """One thread. What it does next is chosen by lot."""

    def __init__(self, orders: Orders, journal: Journal) -> None:
        self._journal = journal
        self._hand = Hand(orders, journal)
        training, keeping = Training(self._hand), Keeping(self._hand)
        self._calls = {name: getattr(training, name) for name in TRAINING}
        self._calls |= {name: getattr(keeping, name) for name in KEEPING}
        self._weights = [*TRAINING.values(), *KEEPING.values()]

    def operate(self) -> None:
        """One operation. What may happen to anybody ends it; what must not comes through."""
        name = self._hand.random.choices(list(self._calls), weights=self._weights)[0]
        self._journal.operation(name)
        try:
            self._calls[name]()
        except Unavailable:
            self._journal.event("gave up")
        except InUse:
            self._journal.event("in use")
        time.sleep(self._hand.random.random() * 0.02)  # the pace of the load; nothing waits for it


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    for noisy in ("httpx", "ckptd.ledger"):  # of a checkpoint in doubt the ledger warns; here that is wanted
        logging.getLogger(noisy).setLevel(logging.ERROR)
    orders = Orders.model_validate_json(sys.stdin.buffer.read())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    path = Path(orders.journal)
    done = operations_in(path)
    with Journal(path) as journal:
        worker = Worker(orders, journal)
        while not stop.is_set() and (orders.operations is None or done < orders.operations):
            worker.operate()
            done += 1


if __name__ == "__main__":
    main()
