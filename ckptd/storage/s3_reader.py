"""Ranged reads of objects on S3, straight into the caller's buffer."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ckptd.errors import CkptdError, Corrupt, Invalid, NotFound, Unavailable
from ckptd.storage.files import flat
from ckptd.storage.s3_errors import Call
from ckptd.storage.s3_payload import SLICE_BYTES, Target


class S3Reader:
    """Ranged reads of one object, one request each, from any number of threads. `target` gives a client of this
    process; `check_root` is asked before the object is called absent."""

    def __init__(self, target: Callable[[], Target], size: int, check_root: Callable[[], str]) -> None:
        self._target: Callable[[], Target] | None = target
        self._check_root = check_root
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._target is None:
            raise Invalid("the reader is closed", do="Open a new one.", field="reader")
        target = self._target()
        key = target.call.key
        if offset < 0:
            raise Invalid(f"offset {offset} of {key} is negative", field="offset")
        view = flat(buffer)
        if view.readonly and view.nbytes:
            raise Invalid(f"the buffer to read {key} into is read-only", field="buffer")
        if offset + view.nbytes > self.size:
            raise _too_short(key, offset + view.nbytes, self.size)
        if not view.nbytes:
            return
        try:
            target.attempts("get", lambda: _read_range(target, offset, view, self.size))
        except NotFound:
            self._check_root()
            raise
        except CkptdError as error:
            if error.fields.get("s3_code") == "InvalidRange":
                raise _too_short(key, offset + view.nbytes, offset) from error
            raise

    def paged(self) -> bool:
        return False

    def close(self) -> None:
        self._target = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_range(target: Target, offset: int, view: memoryview, size: int) -> None:
    """One ranged request straight into `view`. A connection that ends too early raises, and is tried again."""
    end = offset + view.nbytes
    answer = target.client.get_object(Bucket=target.bucket, Key=target.key, Range=f"bytes={offset}-{end - 1}")
    give_up_at, done = target.until(view.nbytes), 0
    with answer["Body"] as body:
        _check_range(target.call, answer, offset, end, size)
        while done < view.nbytes:
            got = body.readinto(view[done : done + SLICE_BYTES])
            if not got:
                raise ConnectionError(f"the answer ended after {done} of {view.nbytes} bytes")
            done += got
            if time.monotonic() > give_up_at and done < view.nbytes:
                raise TimeoutError(f"only {done} of {view.nbytes} bytes came in time")


def _check_range(call: Call, answer: dict[str, Any], offset: int, end: int, size: int) -> None:
    length, span = answer.get("ContentLength"), answer.get("ContentRange")
    if span is None and offset == 0 and end == size and length == size:
        return  # the whole object was asked for and given
    total = str(span).rpartition("/")[2]
    if total.isdigit() and int(total) != size:
        raise _too_short(call.key, size, int(total))
    if length != end - offset or not str(span).startswith(f"bytes {offset}-{end - 1}/"):
        raise Unavailable(
            f"get {call.key} in {call.url} failed: expected bytes {offset}-{end - 1}, was answered {span} "
            f"with {length} bytes",
            do="The store, or a proxy before it, does not answer ranged reads: use one that ckptd doctor finds fit.",
            key=call.key,
        )


def _too_short(key: str, expected: int, found: int) -> Corrupt:
    return Corrupt(
        f"{key} has another size than it should: expected {expected} bytes, found {found}",
        key=key,
        expected=expected,
        found=found,
    )
