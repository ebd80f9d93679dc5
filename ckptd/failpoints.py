"""Named places where a test makes this process die, stop or fail. Without orders they do nothing.

The environment gives orders: `CKPTD_FAILPOINTS="before-commit?step=6&generation=1:kill"`, several with `;`.
Actions: `kill` (SIGKILL to this process), `stop` (SIGSTOP), `fail` (raises `Unavailable`). A test in the same process
hangs a function on a name with `hooked`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl

from ckptd.errors import Invalid, Unavailable

VARIABLE = "CKPTD_FAILPOINTS"
_hooks: dict[str, Callable[[], None]] = {}


def failpoint(name: str, **context: int) -> None:
    """A place called `name`; `context` (rank, step, generation) is what an order can ask for."""
    hook = _hooks.get(name)
    if hook is not None:
        hook()
    for order in filter(None, os.environ.get(VARIABLE, "").split(";")):
        condition, _, action = order.partition(":")
        wanted, _, query = condition.partition("?")
        if wanted == name and all(str(context.get(key)) == value for key, value in parse_qsl(query)):
            _carry_out(action, name)


@contextmanager
def hooked(name: str, function: Callable[[], None]) -> Iterator[None]:
    """Call `function` whenever this process passes `name`."""
    _hooks[name] = function
    try:
        yield
    finally:
        del _hooks[name]


def _carry_out(action: str, name: str) -> None:
    match action:
        # To this thread, not to the process: the kernel may hand a process's signal to another thread, and this one
        # would get past the place before all are stopped.
        case "kill":
            signal.pthread_kill(threading.get_ident(), signal.SIGKILL)
        case "stop":
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "fail":
            raise Unavailable(f"failpoint {name} failed as ordered by {VARIABLE}")
        case _:
            raise Invalid(f"{VARIABLE} orders {action!r} at {name}; expected kill, stop or fail")
