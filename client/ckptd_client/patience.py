"""Trying again: what is worth it, how long, and how often that is said."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_any,
    stop_before_delay,
    wait_exponential_jitter,
)

from ckptd.errors import NotInitialised, Unavailable, Unreachable, describe

log = logging.getLogger("ckptd")
T = TypeVar("T")
FIRST_SECONDS, LAST_SECONDS, JITTER_SECONDS = 0.1, 2.0, 0.1
MAX_RETRY_AFTER_SECONDS = 30.0


def again(call: Callable[[], T], *, seconds: float, tries: int | None = None, level: int = logging.INFO) -> T:
    """Call until it does not raise `Unavailable`, at most for `seconds` and at most `tries` times; then its error.
    Waiting is logged at `level`."""
    stop = (
        stop_before_delay(seconds)
        if tries is None
        else stop_any(stop_before_delay(seconds), stop_after_attempt(tries))
    )
    retrying = Retrying(
        retry=retry_if_exception(_passes),
        stop=stop,
        wait=_pause,
        before_sleep=partial(_now_and_then, level),
        reraise=True,
    )
    return retrying(call)


def patiently(call: Callable[[], T], deadline_seconds: float) -> T:
    """At the start there is time: an outage is waited out until the deadline, then it is `Unreachable`."""
    try:
        return again(call, seconds=deadline_seconds, level=logging.WARNING)
    except (NotInitialised, Unreachable):
        raise
    except Unavailable as error:
        raise Unreachable(error.message, **error.fields) from error


_own_pause = wait_exponential_jitter(multiplier=FIRST_SECONDS, max=LAST_SECONDS, jitter=JITTER_SECONDS)


def _pause(state: RetryCallState) -> float:
    """As long as the service asked for, and up to as long again, for it asks that of thousands of ranks at once."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.fields.get("retry_after_seconds", 0) if isinstance(error, Unavailable) else 0
    if asked:
        return min(float(asked), MAX_RETRY_AFTER_SECONDS) * random.uniform(1.0, 2.0)
    return _own_pause(state)


def _passes(error: BaseException) -> bool:
    """Whether waiting may help. A root without its marker is for a person to look at."""
    return isinstance(error, Unavailable) and not isinstance(error, NotInitialised)


def _now_and_then(level: int, state: RetryCallState) -> None:
    """Tell at the first, second, fourth, eighth .. try: an outage of an hour needs no thousand lines."""
    error = state.outcome.exception() if state.outcome is not None else None
    number = state.attempt_number
    if error is not None and number & (number - 1) == 0:
        log.log(level, "%s; trying again (%d so far)", describe(error), number)
