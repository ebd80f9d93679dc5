"""Requests that wait for something to happen in a run, without holding a thread each.

All requests that ask one question of one run (has this attempt begun? what became of this save?) share one look
at the storage at a time. The next look comes at once when this service appended something to the run, and every
`relook_seconds` anyway, because other services and direct clients append there without telling.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ckptd.errors import Unavailable
from ckptd.service.threads import Threads

T = TypeVar("T")
Question = tuple[str | int | None, ...]
LOOK_THREADS = 8


@dataclass(eq=False)
class _Waiter(Generic[T]):
    """`looks` is how many looks had begun when it came: only a later one is recent enough for it."""

    answer: asyncio.Future[T]
    until: float
    looks: int


@dataclass(eq=False)
class _Asked(Generic[T]):
    """One question, while somebody waits for its answer."""

    look: Callable[[], T]
    settled: Callable[[T], bool]
    loop: asyncio.AbstractEventLoop
    looks: int = 0
    waiters: list[_Waiter[T]] = field(default_factory=list)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def tell(self, value: T, *, now: float) -> None:
        """Answer everybody if the question is settled, else those whose time is up."""
        settled = self.settled(value)
        for waiter in self._take(lambda w: settled or (w.looks < self.looks and w.until <= now)):
            waiter.answer.set_result(value)

    def fail(self, error: BaseException) -> None:
        for waiter in self._take(lambda w: w.looks < self.looks):
            waiter.answer.set_exception(error)

    def _take(self, chosen: Callable[[_Waiter[T]], bool]) -> list[_Waiter[T]]:
        taken = [waiter for waiter in self.waiters if chosen(waiter)]
        self.waiters = [waiter for waiter in self.waiters if waiter not in taken]
        return [waiter for waiter in taken if not waiter.answer.done()]


class Lookout:
    """One per service. `ask` belongs to the event loop, `wake` and `close` may come from any thread."""

    def __init__(self, *, relook_seconds: float, look_deadline_seconds: float) -> None:
        self._relook_seconds = relook_seconds
        self._look_deadline_seconds = look_deadline_seconds
        self._threads = Threads("look", LOOK_THREADS)
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, Question], _Asked[Any]] = {}
        self._closing = False

    async def ask(
        self,
        run: str,
        question: Question,
        look: Callable[[], T],
        settled: Callable[[T], bool],
        wait_seconds: float,
    ) -> T:
        """What `look` (blocking, in a thread) says once that is `settled`, or at the end of the wait.

        The answer is never from before the request came, unless it is settled. Errors of `look` are raised as
        they are; `Unavailable` when it hangs.
        """
        loop = asyncio.get_running_loop()
        asked = self._find(loop, (run, question), look, settled)
        waiter = _Waiter(loop.create_future(), loop.time() + wait_seconds, asked.looks)
        asked.waiters.append(waiter)
        asked.woken.set()
        try:
            return await asyncio.wait_for(waiter.answer, wait_seconds + self._look_deadline_seconds)
        except TimeoutError as error:
            raise Unavailable(
                f"run {run}: the storage did not answer within {self._look_deadline_seconds:g} s", run=run
            ) from error
        finally:
            if waiter in asked.waiters:
                asked.waiters.remove(waiter)

    def wake(self, run: str) -> None:
        """Something may have changed in `run`: look again now."""
        with self._lock:
            affected = [asked for (name, _), asked in self._asked.items() if name == run]
        for asked in affected:
            asked.loop.call_soon_threadsafe(asked.woken.set)

    def close(self) -> None:
        """Let everybody go with what there is after one more look; nobody waits from now on."""
        self._closing = True
        with self._lock:
            affected = list(self._asked.values())
        for asked in affected:
            asked.loop.call_soon_threadsafe(asked.woken.set)

    def stop(self) -> None:
        """Give up the threads, after the last request."""
        self._threads.close()

    def _find(
        self,
        loop: asyncio.AbstractEventLoop,
        key: tuple[str, Question],
        look: Callable[[], T],
        settled: Callable[[T], bool],
    ) -> _Asked[T]:
        with self._lock:
            asked: _Asked[T] | None = self._asked.get(key)
            if asked is None:
                asked = self._asked[key] = _Asked(look, settled, loop)
                asked.task = loop.create_task(self._watch(key, asked))
            return asked

    async def _watch(self, key: tuple[str, Question], asked: _Asked[Any]) -> None:
        """Look again and again while somebody waits."""
        try:
            while asked.waiters:
                asked.woken.clear()
                asked.looks += 1
                look = self._threads.run(asked.look)
                await asyncio.wait([look])
                error = look.exception()
                now = float("inf") if self._closing else asked.loop.time()
                if error is not None:
                    asked.fail(error)
                else:
                    asked.tell(look.result(), now=now)
                ends = [waiter.until for waiter in asked.waiters]
                if ends:
                    pause = max(0.0, min(self._relook_seconds, min(ends) - asked.loop.time()))
                    with suppress(TimeoutError):
                        await asyncio.wait_for(asked.woken.wait(), pause)
        finally:
            with self._lock:
                del self._asked[key]
