"""Payload on S3: objects of many parts, sent in parallel from bounded memory. `s3_reader` reads them back.

The parts go through botocore's blocking client, from threads: it sends and receives outside of Python's lock,
and takes endpoint, credentials and certificates from where s3fs takes them. docs/adr/0004-s3-libraries.md has the
numbers.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from ckptd import layout
from ckptd.errors import AlreadyExists, Invalid
from ckptd.storage.base import Buffer
from ckptd.storage.files import flat
from ckptd.storage.s3_errors import FAILURES, Call, as_ckptd, code_and_status, is_taken

T = TypeVar("T")
MIB = 1 << 20
PART_BYTES = 16 * MIB
MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
MEMORY_BYTES = 256 * MIB  # for the parts of one object on their way; one of 5 TB takes two parts of 525 MiB
ATTEMPTS = 3
SLICE_BYTES = MIB  # moved by one system call, each with the connection's own time limit
WRITER = "ckptd-put"  # metadata that tells our own upload from another writer's
_log = logging.getLogger("ckptd.storage")


@dataclass(frozen=True)
class Target:
    """One object in its bucket, and the client to reach it. Parts and ranges may be asked for more than once, as
    that changes nothing; each try ends after `deadline_seconds` and a second for every MiB."""

    client: Any
    bucket: str
    key: str  # in the bucket
    call: Call  # for messages
    deadline_seconds: float

    def attempts(self, operation: str, call: Callable[[], T]) -> T:
        """The result of `call`, tried again while that can help; the error names the first cause."""
        give_up_at = time.monotonic() + self.deadline_seconds
        first: BaseException | None = None
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except FAILURES as error:
                first = first or error
                if attempt == ATTEMPTS - 1 or not _passing(error) or time.monotonic() >= give_up_at:
                    raise as_ckptd(first, replace(self.call, operation=operation)) from first
                time.sleep(0.1 * 4**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable")

    def until(self, size: int) -> float:
        return time.monotonic() + self.deadline_seconds + size / MIB


def _passing(error: BaseException) -> bool:
    code, status, _ = code_and_status(error)
    return status in (0, 429) or status >= 500 or code in ("RequestTimeout", "BadDigest")


def part_bytes_for(size: int, part_bytes: int = PART_BYTES) -> int:
    """The size of a part, so that S3's limit of 10,000 parts holds the object."""
    needed = -(-size // MAX_PARTS)
    return part_bytes if needed <= part_bytes else -(-needed // MIB) * MIB


class _Body(io.RawIOBase):
    """A part as the file the client wants: slices of the caller's chunks, without a copy. Sends no longer than
    until `give_up_at`."""

    def __init__(self, pieces: Sequence[memoryview], give_up_at: float) -> None:
        self._pieces, self._at, self._give_up_at = pieces, 0, give_up_at
        self._ends = list(accumulate(piece.nbytes for piece in pieces))

    def read(self, size: int = -1) -> memoryview:
        if time.monotonic() > self._give_up_at:
            raise TimeoutError(f"only {self._at} of {len(self)} bytes were taken in time")
        index = bisect_right(self._ends, self._at)
        if index == len(self._ends):
            return memoryview(b"")
        start = self._at - (self._ends[index] - self._pieces[index].nbytes)
        piece = self._pieces[index][start : start + max(size, SLICE_BYTES)]
        self._at += piece.nbytes
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self)}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def __len__(self) -> int:
        return self._ends[-1]


def put_parts(target: Target, chunks: Iterable[Buffer], size: int, part_bytes: int) -> None:
    """Create an object of many parts; the caller has seen that its key is free. Errors as `Storage.put`.

    The condition on the last request is a second line only: stores do not decide it atomically. That is enough
    because such keys hold a nonce, which no two writers share. On any failure the upload is aborted.
    """
    writer = layout.new_nonce()
    started = target.attempts(
        "put",
        lambda: target.client.create_multipart_upload(
            Bucket=target.bucket, Key=target.key, ChecksumAlgorithm="SHA256", Metadata={WRITER: writer}
        ),
    )
    upload = _Upload(target, str(started["UploadId"]), writer)
    try:
        upload.finish(upload.send(chunks, size, part_bytes))
    except BaseException:
        upload.abort()
        raise


class _Upload:
    def __init__(self, target: Target, upload_id: str, writer: str) -> None:
        self._target, self._writer = target, writer
        self._names = {"Bucket": target.bucket, "Key": target.key, "UploadId": upload_id}

    def send(self, chunks: Iterable[Buffer], size: int, part_bytes: int) -> list[dict[str, Any]]:
        """All parts, in the order of the chunks. Asks for the chunks of one part more than are on their way."""
        at_once = max(1, min(PARTS_AT_ONCE, MEMORY_BYTES // part_bytes - 1))
        room = threading.Semaphore(at_once + 1)
        sent: list[Future[dict[str, Any]]] = []

        def send(number: int, pieces: list[memoryview]) -> dict[str, Any]:
            try:
                return self._send_part(number, pieces)
            finally:
                pieces.clear()
                room.release()

        with ThreadPoolExecutor(at_once, "ckptd-put") as pool:
            try:
                for pieces in _parts(chunks, size, part_bytes, room):
                    for part in sent:
                        if part.done():
                            part.result()  # raises what stopped an earlier part
                    sent.append(pool.submit(send, len(sent) + 1, pieces))
                return [part.result() for part in sent]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _send_part(self, number: int, pieces: list[memoryview]) -> dict[str, Any]:
        digest, length = hashlib.sha256(), sum(piece.nbytes for piece in pieces)
        for piece in pieces:
            digest.update(piece)
        checksum = base64.b64encode(digest.digest()).decode()

        def call() -> Any:
            body = _Body(pieces, self._target.until(length))
            return self._target.client.upload_part(
                **self._names, PartNumber=number, Body=body, ChecksumSHA256=checksum
            )

        answer = self._target.attempts(f"put part {number} of", call)
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

    def finish(self, parts: list[dict[str, Any]]) -> None:
        """Make the object of its parts. An answer that did not come is found out by looking at the object."""
        first: BaseException | None = None
        for attempt in range(ATTEMPTS):
            try:
                self._target.client.complete_multipart_upload(
                    **self._names, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
                )
                return
            except FAILURES as error:
                first = first or error
                found = self._writer_of_what_is_there()
                if found == self._writer:
                    return
                if is_taken(error) or found is not None:
                    call = self._target.call
                    raise AlreadyExists(
                        f"{call.key} exists already in {call.url}", key=call.key, url=call.url
                    ) from error
                if attempt == ATTEMPTS - 1 or not _passing(error):
                    raise as_ckptd(first, self._target.call) from first
                time.sleep(0.1 * 4**attempt)

    def _writer_of_what_is_there(self) -> str | None:
        """Who wrote the object at the key, "" for somebody else; None if none was found."""
        try:
            answer = self._target.client.head_object(Bucket=self._target.bucket, Key=self._target.key)
        except FAILURES as error:
            _log.debug("after a failed completion %s was not found: %s", self._target.key, error)
            return None
        return str((answer.get("Metadata") or {}).get(WRITER, ""))

    def abort(self) -> None:
        try:
            self._target.client.abort_multipart_upload(**self._names)
        except FAILURES as error:
            _log.warning(
                "the parts of %s (upload %s) stay behind until the bucket's rule for incomplete uploads removes "
                "them: %s",
                self._target.key,
                self._names["UploadId"],
                error,
            )


def _parts(
    chunks: Iterable[Buffer], size: int, part_bytes: int, room: threading.Semaphore
) -> Iterator[list[memoryview]]:
    """The chunks cut to parts of `part_bytes`, the last one smaller; each waits for room first. `Invalid` unless they
    are `size` bytes in all; then the last part was not given out."""
    pieces: list[memoryview] = []
    filled = total = 0
    room.acquire()
    for chunk in chunks:
        view = flat(chunk)
        total += view.nbytes
        if total > size:
            break
        while view.nbytes:
            if filled == part_bytes:
                yield pieces
                room.acquire()
                pieces, filled = [], 0
            piece = view[: part_bytes - filled]
            pieces.append(piece)
            filled, view = filled + piece.nbytes, view[piece.nbytes :]
    if total != size:
        raise wrong_sum(size, total)
    yield pieces


def wrong_sum(expected: int, found: int) -> Invalid:
    return Invalid(
        f"the chunks do not add up: expected {expected} bytes, found {found}",
        do="Pass the size of all chunks together.",
        expected=expected,
        found=found,
    )
