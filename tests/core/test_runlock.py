"""Calls about a run whose storage hangs: they end, and take no thread for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from ckptd.errors import Unavailable
from ckptd.ledger import Ledger
from ckptd.runlock import RunLock
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from tests.core.by_hand import RUN, live

DEADLINE_SECONDS = 30.0


@contextmanager
def held(lock: RunLock) -> Iterator[None]:
    """Another thread has it for the time of the block."""
    taken, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            assert let_go.wait(DEADLINE_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert taken.wait(DEADLINE_SECONDS)
        try:
            yield
        finally:
            let_go.set()
        holding.result(DEADLINE_SECONDS)


def test_it_is_taken_again_by_its_holder_and_then_by_another() -> None:
    lock = RunLock("r", 0.01)
    with lock, lock:
        pass
    with held(lock):
        pass
    with lock:
        pass


def test_whoever_waits_too_long_is_told_what_to_look_at() -> None:
    lock = RunLock("en-it", 0.01)
    with held(lock):
        for _ in range(2):
            with (
                pytest.raises(Unavailable, match="run en-it: another call about it has been waiting") as caught,
                lock,
            ):
                raise AssertionError("it was given to two")
        assert "mount" in caught.value.do


def test_a_holder_that_has_it_for_too_long_is_waited_for_no_more() -> None:
    """The deadline of whoever comes later is over as soon as that of the holder is."""
    lock = RunLock("r", 3600.0)
    with held(lock):
        lock._since -= 3600.0
        with pytest.raises(Unavailable), lock:
            raise AssertionError("it was given to two")


def test_a_holder_that_lets_go_is_followed_by_those_who_wait() -> None:
    lock = RunLock("r", DEADLINE_SECONDS)
    order: list[str] = []

    def wait(name: str) -> None:
        with lock:
            order.append(name)

    with ThreadPoolExecutor(3) as pool:
        with held(lock):
            waiting = [pool.submit(wait, name) for name in "abc"]
        for future in waiting:
            future.result(DEADLINE_SECONDS)
    assert sorted(order) == ["a", "b", "c"]


def test_on_a_hung_mount_the_calls_of_a_run_do_not_pile_up() -> None:
    """The storage blocks in the middle of a read; the calls behind it are answered, and all is well afterwards."""
    storage = FaultyStorage(MemoryStorage())
    ledger = Ledger(storage, deadline_seconds=0.05)
    live(ledger)
    hang = storage.pause("list", lambda key: "/log" in key)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(ledger.current, RUN)
        assert hang.arrived.wait(DEADLINE_SECONDS)
        others = [pool.submit(ledger.current, RUN) for _ in range(8)]
        errors = [other.exception(DEADLINE_SECONDS) for other in others]
        assert all(isinstance(error, Unavailable) and "another call about it" in str(error) for error in errors)
        assert not first.done()
        hang.resume.set()
        assert first.result(DEADLINE_SECONDS).generation == 1
    assert ledger.current(RUN).generation == 1
