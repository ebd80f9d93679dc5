"""What a call costs does not grow with the log: counted in storage requests, not in seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ckptd import layout, log_snapshots
from ckptd.ledger import Ledger
from ckptd.log import RunLog
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from ckptd.testing.histories import write_history
from tests.core.by_hand import RUN, beginning, live, opening, write_save

SHORT, LONG = 33, 33_333  # records: about 10 and about 10,000 checkpoints
RESTARTS = 1000
COLD_REQUESTS = 70  # of a first look and the calls themselves, without the records behind the snapshot
EVERY = 20  # records


def made(records: int) -> MemoryStorage:
    storage = MemoryStorage()
    write_history(storage, RUN, records=records)
    return storage


@pytest.fixture(scope="module")
def long() -> MemoryStorage:
    """With a snapshot, as its writers leave them."""
    storage = made(LONG)
    state = RunLog(storage, RUN, actor="reader").replay()
    log_snapshots.write(storage, RUN, state)
    return storage


@pytest.fixture(params=["latest", "begin", "join", "commit", "current"])
def call(request: pytest.FixtureRequest) -> Callable[[Ledger], object]:
    attempt = layout.new_attempt()

    def begin(ledger: Ledger) -> object:
        ledger.open(RUN, opening(attempt))
        return ledger.begin(RUN, beginning(attempt))

    def commit(ledger: Ledger) -> None:
        generation = live(ledger, layout.new_attempt())
        ledger.commit(RUN, write_save(ledger.storage, generation, 10**6))

    calls: dict[str, Callable[[Ledger], object]] = {
        "latest": lambda ledger: ledger.latest(RUN),
        "begin": begin,
        "join": lambda ledger: ledger.join(RUN, attempt),
        "commit": commit,
        "current": lambda ledger: ledger.current(RUN),
    }
    return calls[request.param]


def copied(storage: MemoryStorage) -> FaultyStorage:
    copy = MemoryStorage(marked=False)
    copy._objects = dict(storage._objects)
    copy._names = {folder: set(names) for folder, names in storage._names.items()}
    return FaultyStorage(copy)


def requests(storage: FaultyStorage, call: Callable[[], object]) -> int:
    before = len(storage.history)
    call()
    return len(storage.history) - before


def test_a_call_on_a_long_log_costs_what_it_costs_on_a_short_one(
    long: MemoryStorage, call: Callable[[Ledger], object]
) -> None:
    costs = []
    for source in (made(SHORT), long):
        storage = copied(source)
        ledger = Ledger(storage, aside=lambda write: None)
        ledger.latest(RUN)
        costs.append(requests(storage, partial(call, ledger)))
    assert costs[0] == costs[1]


def test_a_first_look_at_a_long_log_is_bounded(long: MemoryStorage, call: Callable[[Ledger], object]) -> None:
    storage = copied(long)
    assert requests(storage, lambda: call(Ledger(storage, aside=lambda write: None))) <= COLD_REQUESTS


def test_a_crash_loop_of_1000_restarts_costs_the_same_at_every_restart() -> None:
    """Every incarnation is a process of its own, that opens its attempt, begins, and dies."""
    storage = FaultyStorage(MemoryStorage())
    ledger = Ledger(storage)
    live(ledger, layout.new_attempt())
    for step in range(1, 6):
        ledger.commit(RUN, write_save(storage, 1, step))

    def restart() -> None:
        attempt = layout.new_attempt()
        mine = Ledger(storage, snapshot_records=EVERY, aside=lambda write: write())
        mine.open(RUN, opening(attempt))
        assert mine.begin(RUN, beginning(attempt)).checkpoint is not None

    costs = [requests(storage, restart) for _ in range(RESTARTS)]
    assert RunLog(storage, RUN, actor="reader").replay().seq > 2 * RESTARTS
    assert max(costs) <= EVERY + COLD_REQUESTS
    assert max(costs[-300:]) <= max(costs[300:600])
    assert max(len(storage.inner.list(folder)) for folder in folders()) <= layout.SEGMENT_SLOTS


def folders() -> list[str]:
    return [layout.log_folder(RUN), layout.segment_folder(RUN, 1), layout.snapshots_folder(RUN)]
