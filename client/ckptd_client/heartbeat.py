"""Rank 0's heartbeat to the service: politeness towards other jobs, and early news of being fenced.

No rule depends on it. A beat that fails is no event: the next one tells the same.
"""

from __future__ import annotations

import logging
import threading

from ckptd.errors import CkptdError, Fenced, describe
from ckptd.wire import Heartbeat
from ckptd_client.transport import Transport

log = logging.getLogger("ckptd")
BEAT_SECONDS = 5.0


class Heart:
    """A background thread from construction to `stop`. `check` is for the training thread."""

    def __init__(self, transport: Transport, beat: Heartbeat, *, beat_seconds: float = BEAT_SECONDS) -> None:
        self._transport = transport
        self._beat = beat
        self._beat_seconds = beat_seconds
        self._stopped = threading.Event()
        self._fenced: Fenced | None = None
        self._thread = threading.Thread(target=self._run, name="ckptd-heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `Fenced` if the service told that a younger incarnation took over, or of a roll-back."""
        if self._fenced is not None:
            raise self._fenced

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._beat_seconds):
            try:
                answer = self._transport.heartbeat(self._beat)
            except CkptdError as error:
                log.info("heartbeat not delivered: %s", describe(error))
                continue
            if answer is None:
                return
            if answer.attempt != self._beat.attempt:
                self._fenced = Fenced(
                    f"run {self._transport.run}: generation {answer.generation} belongs to another incarnation",
                    run=self._transport.run,
                )
                return
            if answer.ended:
                closed = answer.ended == "closed"
                self._fenced = Fenced(
                    f"run {self._transport.run} was {answer.ended}, which ended generation {answer.generation}:"
                    " nothing that this process saves counts any more",
                    do="Stop this process; `ckptd reopen` lets the run go on."
                    if closed
                    else "Stop this process; its restart resumes from the checkpoint that was chosen.",
                    run=self._transport.run,
                )
                return
