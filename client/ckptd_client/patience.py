"""Trying again: what is worth it, how long, and how often that is said."""

from __future__ import annotations

import logging
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


def again(call: Callable[[], T], *, seconds: float, tries: int | None = None, level: int = logging.INFO) -> T:
    """Call until it does not raise `Unavailable`, at most for `seconds` and at most `tries` times; then its error.
    Waiting is logged at `level`."""
    stop = (
        stop_before_delay(seconds)
        if tries is None
        else stop_any(stop_before_delay(seconds), stop_after_attempt(tries))
    )
    wait = wait_exponential_jitter(multiplier=FIRST_SECONDS, max=LAST_SECONDS, jitter=JITTER_SECONDS)
    retrying = Retrying(
        retry=retry_if_exception(_passes),
        stop=stop,
        wait=wait,
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


def _passes(error: BaseException) -> bool:
    """Whether waiting may help. A root without its marker is for a person to look at."""
    return isinstance(error, Unavailable) and not isinstance(error, NotInitialised)


def _now_and_then(level: int, state: RetryCallState) -> None:
    """Tell at the first, second, fourth, eighth .. try: an outage of an hour needs no thousand lines."""
    error = state.outcome.exception() if state.outcome is not None else None
    number = state.attempt_number
    if error is not None and number & (number - 1) == 0:
        log.log(level, "%s; trying again (%d so far)", describe(error), number)
