"""Waiting requests: one look for all of them, woken by appends, never answered from the past."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptd.errors import Fenced, Unavailable
from ckptd.service.lookout import Lookout

NEVER = 3600.0


class Look:
    """A look that can be held up: each one waits for a `release`, then says `value` as of its begin."""

    def __init__(self, value: Any = None, *, held: bool = False) -> None:
        self.value = value
        self.count = 0
        self.began = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)
        self._held = held

    def __call__(self) -> Any:
        self.count += 1
        value = self.value
        self.began.release()
        if self._held:
            self._gate.acquire()
        if isinstance(value, Exception):
            raise value
        return value

    def release(self) -> None:
        self._gate.release()

    async def wait_begun(self) -> None:
        await asyncio.to_thread(self.began.acquire)


def found(value: Any) -> bool:
    return value is not None


def make(**settings: float) -> Lookout:
    return Lookout(**{"relook_seconds": NEVER, "look_deadline_seconds": 60.0, **settings})


def ask(lookout: Lookout, look: Callable[[], Any], wait_seconds: float = NEVER) -> asyncio.Task[Any]:
    return asyncio.create_task(lookout.ask("run", ("q",), look, found, wait_seconds))


async def settle() -> None:
    """Let every task that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_all_who_wait_share_one_look() -> None:
    async def scenario() -> None:
        lookout, look = make(), Look("yes", held=True)
        tasks = [ask(lookout, look)]
        await look.wait_begun()
        tasks += [ask(lookout, look) for _ in range(20)]
        await settle()
        look.release()
        assert await asyncio.gather(*tasks) == ["yes"] * 21
        assert look.count == 1

    asyncio.run(scenario())


def test_one_who_came_during_a_look_gets_the_next_one() -> None:
    async def scenario() -> None:
        lookout, look = make(), Look(None, held=True)
        first = ask(lookout, look, 0.0)
        await look.wait_begun()
        look.value = "since then"
        second = ask(lookout, look, 0.0)
        await settle()
        look.release()
        assert await first is None
        look.release()
        assert await second == "since then"

    asyncio.run(scenario())


def test_an_append_wakes_and_another_run_does_not() -> None:
    async def scenario() -> None:
        lookout, look = make(), Look(None)
        task = ask(lookout, look)
        await look.wait_begun()
        look.value = "new"
        lookout.wake("another run")
        await settle()
        assert not task.done()
        await asyncio.to_thread(lookout.wake, "run")
        assert await task == "new"

    asyncio.run(scenario())


def test_what_others_append_is_found_by_looking_again() -> None:
    async def scenario() -> None:
        lookout, look = make(relook_seconds=0.001), Look(None)
        task = ask(lookout, look)
        await look.wait_begun()
        look.value = "by a direct client"
        assert await task == "by a direct client"

    asyncio.run(scenario())


def test_the_end_of_the_wait_gives_what_there_is() -> None:
    async def scenario() -> None:
        assert await ask(make(), Look(None), 0.01) is None

    asyncio.run(scenario())


def test_an_error_reaches_all_who_wait() -> None:
    async def scenario() -> None:
        lookout, look = make(), Look(Fenced("younger one"), held=True)
        tasks = [ask(lookout, look), ask(lookout, look)]
        await look.wait_begun()
        look.release()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Fenced, Fenced]

    asyncio.run(scenario())


def test_a_look_that_hangs_is_unavailable() -> None:
    async def scenario() -> None:
        look = Look(None, held=True)
        with pytest.raises(Unavailable, match=r"within 0\.01 s"):
            await ask(make(look_deadline_seconds=0.01), look, 0.0)
        look.release()

    asyncio.run(scenario())


def test_closing_lets_everybody_go() -> None:
    async def scenario() -> None:
        lookout, look = make(), Look(None)
        task = ask(lookout, look)
        await look.wait_begun()
        await asyncio.to_thread(lookout.close)
        assert await task is None
        assert await ask(lookout, look) is None  # and holds nobody who comes later
        lookout.stop()

    asyncio.run(scenario())


def test_nothing_is_left_of_those_who_gave_up() -> None:
    async def scenario() -> None:
        lookout, look = make(relook_seconds=0.001), Look(None)
        task = ask(lookout, look)
        await look.wait_begun()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while lookout._asked:
            await asyncio.sleep(0)
        assert await ask(lookout, Look("fresh")) == "fresh"

    asyncio.run(scenario())
