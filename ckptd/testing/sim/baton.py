"""One thread runs at a time, and a seed says which: deterministic interleaving under a virtual clock.

Every actor has a thread of its own, so the product's code runs as it is. A thread runs only while it holds the baton,
and gives it away at each storage call and pause (`Baton.step`, `Baton.pause`); the thread that gives it away draws
the next one. So there is no race here, and the same seed takes the same course.
"""

from __future__ import annotations

import _thread
import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

NEVER = float("inf")
HUNG_SECONDS = 600.0  # of real time: only a broken simulator takes so long


class Killed(BaseException):
    """The process of this task is dead: nothing it does from here on has an effect."""


class Process:
    """What dies as a whole, or stops and wakes up late. `asleep_until` is virtual time in seconds."""

    def __init__(self, name: str, *, mortal: bool = True) -> None:
        self.name = name
        self.mortal = mortal
        self.dead = False
        self.asleep_until = 0.0


class Task:
    """One thread of a process. It may run once its time has come, or what it waits for is there."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self.process = process
        self.work = work
        self.wake_at = 0.0
        self.ready: Callable[[], bool] | None = None
        self.done = False
        self.error: BaseException | None = None
        self.turn = _thread.allocate_lock()
        self.turn.acquire()

    def due(self) -> float:
        """From when on it may run."""
        if self.process.dead:
            return 0.0
        woken = self.ready is not None and self.ready()
        return max(0.0 if woken else self.wake_at, self.process.asleep_until)


class Baton:
    """The scheduler. Its methods are for the thread that holds the baton; `run` is for the one that owns all others.

    `sticky` is the chance that a task goes on by itself; otherwise the next is drawn from all that may run.
    """

    def __init__(self, rng: random.Random, sticky: float) -> None:
        self.now = 0.0
        self.process = Process("main", mortal=False)
        self.failed = False
        self._rng = rng
        self._sticky = sticky
        self._main = Task(self.process, lambda: None)
        self._tasks: list[Task] = []
        self._current = self._main
        self._stop: Callable[[], bool] = lambda: False

    def clock(self) -> float:
        """Virtual time in seconds."""
        return self.now

    def start(self, process: Process, work: Callable[[], None]) -> Task:
        """A new thread of `process`; it runs when it is drawn."""
        task = Task(process, work)
        self._tasks.append(task)
        _thread.start_new_thread(self._live, (task,))
        return task

    def run(self, stop: Callable[[], bool]) -> None:
        """Let the tasks run until `stop` says so, or none is left. Raises what a task died of, if that is a fault of
        the simulator or the product."""
        self._let_run(stop)
        for task in self._tasks:
            if task.error is not None:
                raise task.error
        self._tasks = [task for task in self._tasks if not task.done]

    def end(self) -> None:
        """Kill what is left and let its threads end. What they raise on the way out is of dead processes."""
        for task in self._tasks:
            task.process.dead = True
        while self._tasks:
            self.failed = False
            self._let_run(lambda: False)
            self._tasks = [task for task in self._tasks if not task.done]
        self.failed = False

    def step(self, seconds: float) -> None:
        """A place where another task may go on. The caller's own time passes by `seconds`."""
        self.now += seconds
        self._give_away()

    def pause(self, seconds: float) -> None:
        """Sleep, in virtual time."""
        self._current.wake_at = self.now + max(seconds, 0.0)
        self._give_away()

    def wait(self, ready: Callable[[], bool], until: float = NEVER) -> bool:
        """Until `ready`, which only looks, or virtual time `until`; whether it is ready."""
        task = self._current
        while not ready() and self.now < until:
            task.ready, task.wake_at = ready, until
            self._give_away()
        return ready()

    @property
    def current(self) -> Task:
        return self._current

    def _let_run(self, stop: Callable[[], bool]) -> None:
        self._stop = stop
        self._current = self._main
        self._hand_over(self._main)

    def _give_away(self) -> None:
        task = self._current
        if task.process.dead:
            raise Killed
        self._hand_over(task)
        task.ready, task.wake_at = None, 0.0
        if task.process.dead:
            raise Killed

    def _live(self, task: Task) -> None:
        task.turn.acquire()
        self._current = task
        try:
            if not task.process.dead:
                task.work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in the thread that asked for it
            task.error = error
            self.failed = True
        task.done = True
        self._next().turn.release()

    def _hand_over(self, task: Task) -> None:
        chosen = self._next()
        if chosen is not task:
            chosen.turn.release()
            if not task.turn.acquire(timeout=HUNG_SECONDS if task is self._main else -1):
                raise AssertionError(f"the baton did not come back within {HUNG_SECONDS:.0f} s of real time")
        self._current = task

    def _next(self) -> Task:
        if self.failed or self._stop():
            return self._main
        if len(self._tasks) > 8:
            self._tasks = [task for task in self._tasks if not task.done]
        waiting = [(task.due(), task) for task in self._tasks if not task.done]
        if not waiting:
            return self._main
        current = self._current
        now = self.now
        runnable = [task for due, task in waiting if due <= now]
        if not runnable:
            self.now = now = min(due for due, _ in waiting)
            if now == NEVER:
                raise AssertionError("every task waits for another one")
            runnable = [task for due, task in waiting if due <= now]
        if len(runnable) > 1 and current in runnable and self._rng.random() < self._sticky:
            return current
        return runnable[int(self._rng.random() * len(runnable))]


class BatonLock:
    """A re-entrant lock for tasks that share an object: who waits for it gives the baton away."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._owner: Task | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        me = self._baton.current
        if self._owner is not me:
            self._baton.wait(lambda: self._owner is None)
            self._owner = me
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
