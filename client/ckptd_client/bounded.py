"""Work that may never come back, on threads of its own: whoever waits for it goes on at a deadline.

A read on a drive that hangs is blocked in the kernel, where nothing ends it. So it runs on a daemon thread, and the
caller stops waiting. Such a thread may still write where it was told to, if the drive ever answers: the process must
end.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ckptd.errors import Unreachable

T = TypeVar("T")


class Work:
    """Functions that run side by side. `stop` is set when one of them raises, for the others to end soon, too."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._changed = threading.Condition()
        self._running = 0
        self._errors: list[BaseException] = []
        self._now: dict[str, str] = {}

    def doing(self, what: str) -> None:
        """Called by a function: what it is at, to be told if it does not come back."""
        self._now[threading.current_thread().name] = what

    def run(self, functions: Sequence[Callable[[], None]], give_up_at: float) -> None:
        """Return when all have; raise the first error when all have ended. `Unreachable` at `give_up_at`, in seconds
        of `time.monotonic`, with what they are at; those threads may still be running then."""
        self._running = len(functions)
        for index, function in enumerate(functions):
            threading.Thread(target=self._one, args=(function,), name=f"ckptd-load-{index}", daemon=True).start()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, max(give_up_at - time.monotonic(), 0.001)):
                self.stop.set()
                raise Unreachable(
                    f"not read in time: {', '.join(sorted(set(self._now.values()))) or 'nothing began'}",
                    do="The storage hangs. End this process: a read that comes back late may still write into what "
                    "was to be loaded.",
                )
        if self._errors:
            raise self._errors[0]

    def _one(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._errors.append(error)
            self.stop.set()
        finally:
            with self._changed:
                self._now.pop(threading.current_thread().name, None)
                self._running -= 1
                self._changed.notify_all()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in the block: a hundred thousand tensors are as many new objects, none of them garbage,
    and looking through them again and again takes as long as making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def within(give_up_at: float, what: str, call: Callable[[], T]) -> T:
    """The result of one call that reads `what`, or its error. `Unreachable` at `give_up_at`."""
    found: list[T] = []
    work = Work()

    def run() -> None:
        work.doing(what)
        found.append(call())

    work.run([run], give_up_at)
    return found[0]
