"""Blocking calls from async code, each kind on a few threads of its own, so that none starves the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ckptd.errors import Unavailable

T = TypeVar("T")


class Threads:
    """`count` threads for one kind of call. Made anywhere; `run` and `run_shared` are called on one event loop."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=f"ckptd-{name}")
        self._shared: dict[Hashable, asyncio.Future[Any]] = {}

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start `call` as soon as a thread is free."""
        return asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def run_shared(self, key: Hashable, call: Callable[[], T], *, deadline_seconds: float) -> T:
        """The outcome of `call`, or of the one that runs under the same key already.

        `Unavailable` past the deadline; the call itself goes on, as a thread cannot be stopped, and the next
        one who asks under this key waits for it too, instead of losing another thread to it.
        """
        future = self._shared.get(key)
        if future is None:
            future = self._shared[key] = self.run(call)
            future.add_done_callback(lambda done: self._forget(key, done))
        done, _ = await asyncio.wait([future], timeout=deadline_seconds)
        if not done:
            raise Unavailable(f"the storage did not answer within {deadline_seconds:g} s")
        outcome: T = future.result()
        return outcome

    def close(self) -> None:
        """Take no more calls. Those that run go on; nobody waits for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _forget(self, key: Hashable, future: asyncio.Future[Any]) -> None:
        if self._shared.get(key) is future:
            del self._shared[key]
        if not future.cancelled():
            future.exception()  # seen: whoever waited got it from `result`
