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
REST = 4  # times as long as a look took, before the next one for nothing but newcomers
MAX_REST_SECONDS = 0.05


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
    looking: bool = False
    rested_at: float = 0.0  # when to look again for nothing but newcomers
    waiters: dict[_Waiter[T], None] = field(default_factory=dict)  # in the order they came
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    newcomers: asyncio.TimerHandle | None = None

    def came(self, waiter: _Waiter[T]) -> None:
        """There is somebody new, and a look for them soon: one for all who come by then."""
        self.waiters[waiter] = None
        if not self.looking:
            self.look_for_newcomers()

    def look_for_newcomers(self) -> None:
        if self.newcomers is None:
            self.newcomers = self.loop.call_at(self.rested_at, self.woken.set)

    def begin(self) -> None:
        """A look begins, and sees what is there for all who have come."""
        self.woken.clear()
        if self.newcomers is not None:
            self.newcomers.cancel()
            self.newcomers = None
        self.looks += 1
        self.looking = True

    def end(self, began: float) -> None:
        """A look is over and everybody told who is to be."""
        self.looking = False
        spent = self.loop.time() - began
        self.rested_at = self.loop.time() + min(REST * spent, MAX_REST_SECONDS)
        if self.waiters and next(reversed(self.waiters)).looks == self.looks:
            self.look_for_newcomers()  # they came during the look

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
        for waiter in taken:
            del self.waiters[waiter]
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
        asked.came(waiter)
        try:
            return await asyncio.wait_for(waiter.answer, wait_seconds + self._look_deadline_seconds)
        except TimeoutError as error:
            raise Unavailable(
                f"run {run}: the storage did not answer within {self._look_deadline_seconds:g} s", run=run
            ) from error
        finally:
            asked.waiters.pop(waiter, None)

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
                began = asked.loop.time()
                asked.begin()
                look = self._threads.run(asked.look)
                await asyncio.wait([look])
                error = look.exception()
                now = float("inf") if self._closing else asked.loop.time()
                if error is not None:
                    asked.fail(error)
                else:
                    asked.tell(look.result(), now=now)
                asked.end(began)
                ends = [waiter.until for waiter in asked.waiters]
                if ends:
                    pause = max(0.0, min(self._relook_seconds, min(ends) - asked.loop.time()))
                    with suppress(TimeoutError):
                        await asyncio.wait_for(asked.woken.wait(), pause)
        finally:
            if asked.newcomers is not None:
                asked.newcomers.cancel()
            with self._lock:
                del self._asked[key]
