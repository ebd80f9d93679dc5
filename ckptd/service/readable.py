"""What can still be read of a run whose log is damaged: for people who look at it, never for a decision."""

from __future__ import annotations

from typing import Any

from ckptd import answers
from ckptd.errors import Corrupt
from ckptd.log import RunLog
from ckptd.storage.base import Storage

MAX_READABLE = 1000


def tell_readable(storage: Storage, run: str, error: Corrupt) -> Corrupt:
    """`error` with the newest checkpoints before the damage in its field `readable`."""
    log = RunLog(storage, run, actor="reader")
    try:
        log.replay()
    except Corrupt as again:
        error = again
    found = [answers.checkpoint_info(log.state, c) for c in log.state.checkpoints.values()][-MAX_READABLE:]
    fields: dict[str, Any] = {**error.fields, "readable": [info.model_dump(mode="json") for info in found]}
    return Corrupt(error.message, do=error.do, **fields)
