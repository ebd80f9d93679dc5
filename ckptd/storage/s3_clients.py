"""The S3 clients of one process: made one at a time, closed with their storage, made anew after a fork."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.asyn import get_loop
from fsspec.asyn import sync as run_on_loop

from ckptd.errors import Unavailable
from ckptd.storage.s3_settings import S3Settings

_inherited: list[Any] = []
_making = threading.Lock()


def _after_fork() -> None:
    """The thread that held it is not in the child."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Connections:
    """The clients of one storage in one process. They do not survive a fork: a child makes its own, and must not
    close what it inherited, because that would silence the parent's event loop, whose epoll it shares."""

    def __init__(self, settings: S3Settings) -> None:
        self.pid = os.getpid()
        self.loop = get_loop()
        self._settings = settings
        self._client: Any = None
        self.fs: Any = settings.new_filesystem()
        deadline_seconds = settings.deadline_seconds

        async def connect() -> None:
            await asyncio.wait_for(self.fs.set_session(), deadline_seconds)

        run_on_loop(self.loop, connect)
        weakref.finalize(self, _close, self.pid, self.loop, self.fs)

    @property
    def client(self) -> Any:
        """The blocking client, made for the first payload: a process that moves records alone needs none."""
        if self._client is None:
            with one_at_a_time(self._settings):
                if self._client is None:
                    self._client = self._settings.new_client()
        return self._client


@contextmanager
def one_at_a_time(settings: S3Settings) -> Iterator[None]:
    """Clients are made in turn. Making one takes some 40 ms of CPU, most of it on the one event loop of all storages;
    a hundred in a row hold up requests that are already on their way until they seem to have timed out."""
    lock = _making
    if not lock.acquire(timeout=settings.deadline_seconds):
        raise Unavailable(
            f"{settings.url} was not opened: other threads of this process opened S3 storages for "
            f"{settings.deadline_seconds:g} s",
            do="Share one storage between threads.",
            url=settings.url,
        )
    try:
        yield
    finally:
        lock.release()


def _close(pid: int, loop: Any, fs: Any) -> None:
    if os.getpid() != pid:
        _inherited.append(fs)
    elif fs._s3 is not None:
        fs.close_session(loop, fs._s3creator)
