"""One call to an fsspec file system: its deadline, and what its error means: taken, absent, or no answer at all.

Each library has its own errors. Facts are only FileExistsError or the status 412 to a create, and FileNotFoundError
or 404. Everything else is `Unavailable` with its first cause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from ckptd.errors import AlreadyExists, CkptdError, NotFound, NotInitialised, Unavailable, describe

T = TypeVar("T")
_DO = "Check that the store can be reached, and the credentials in this process's environment."


@dataclass(frozen=True)
class Call:
    """What was asked for, for the message: operation in words, key, storage, and its bucket with its prefix."""

    operation: str
    key: str
    url: str
    root: str

    def __str__(self) -> str:
        return f"{self.operation} {self.key} in {self.url}"


def as_ckptd(error: Exception, call: Call, seconds: float) -> CkptdError:
    """Our error for a failed call, which had `seconds`; the caller raises it `from error`."""
    if isinstance(error, CkptdError):
        return error
    status = _status(error)
    fields: dict[str, Any] = {"key": call.key, "url": call.url, "operation": call.operation, "status": status}
    if (isinstance(error, FileExistsError) or status == 412) and call.operation == "put":
        return AlreadyExists(f"{call.key} exists already in {call.url}", key=call.key, url=call.url)
    if isinstance(error, FileNotFoundError) or status == 404:
        if call.operation != "put":
            return NotFound(f"{call.key} does not exist in {call.url}", key=call.key, url=call.url)
        bucket = call.root.partition("/")[0]
        return NotInitialised(
            f"{call} failed: there is no bucket or container {bucket} ({describe(error)})",
            do=f"Check the URL and the account, or create {bucket} yourself: ckptd never creates one.",
            **fields,
        )
    if isinstance(error, TimeoutError) and not str(error):
        return Unavailable(f"{call} failed: no answer within {seconds:g} s", do=_DO, **fields)
    if status in (401, 403):
        return Unavailable(
            f"{call} failed: the credentials are refused, or lack a permission ({describe(error)})",
            do="Check the credentials of this process and what they may do in the bucket or container.",
            **fields,
        )
    return Unavailable(f"{call} failed: {describe(error)}", do=_DO, **fields)


def _status(error: BaseException) -> int:
    """The HTTP status of the answer; 0 if there is none to be seen."""
    seen: BaseException | None = error
    while seen is not None:
        for name in ("status_code", "status", "code"):
            found = getattr(seen, name, None)
            if str(found).isdigit():
                return int(str(found))
        answer = getattr(seen, "response", None)
        if isinstance(answer, dict):  # botocore's
            return int((answer.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
        if isinstance(seen, PermissionError) or str(seen).startswith("Forbidden"):  # gcsfs: a plain OSError
            return 403
        seen = seen.__cause__
    return 0


def within(seconds: float, call: Call, work: Callable[[], T]) -> T:
    """The result of blocking work of a library that knows no deadline; its error as ours. Past the deadline the work
    goes on in its own thread, which nobody waits for, not even the end of the process: what lands late must have a
    name that nobody else uses."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except Exception as error:  # noqa: BLE001 - handed on
            ended.set_exception(error)

    threading.Thread(target=run, name="ckptd-put", daemon=True).start()
    try:
        return ended.result(seconds)
    except Exception as error:
        raise as_ckptd(error, call, seconds) from error
