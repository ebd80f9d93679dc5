"""A prefix of an S3 bucket as storage: AWS, SeaweedFS, MinIO, Ceph, R2, and others with create-if-absent.

What the protocol lives on (log, manifests, marker, listings) are single requests through s3fs, past all its caches,
with a deadline of our own and without retries. Objects of more than one part are in `s3_payload`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from fsspec.asyn import sync as run_on_loop

from ckptd import layout
from ckptd.errors import AlreadyExists, Corrupt, NotFound, NotInitialised, Unavailable
from ckptd.storage.base import Buffer
from ckptd.storage.files import flat
from ckptd.storage.keys import check_key
from ckptd.storage.marker import MAX_MARKER_BYTES, new_marker, no_marker, other_storage, parse_marker
from ckptd.storage.s3_clients import Connections, one_at_a_time
from ckptd.storage.s3_errors import FAILURES, Call, as_ckptd, code_and_status
from ckptd.storage.s3_facts import bucket_facts
from ckptd.storage.s3_payload import PART_BYTES, Target, part_bytes_for, put_parts, wrong_sum
from ckptd.storage.s3_reader import S3Reader
from ckptd.storage.s3_settings import read_settings

T = TypeVar("T")
_log = logging.getLogger("ckptd.storage")


class S3Storage:
    """Objects below `s3://bucket/prefix`. Callable from any thread, and after a fork. See `Storage`.

    Endpoint and credentials come from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_PROFILE,
    AWS_CA_BUNDLE, ...), or from `env` in its place. `?deadline_seconds=` bounds each request. The bucket must exist.
    """

    def __init__(self, url: str, *, env: Mapping[str, str] | None = None, part_bytes: int = PART_BYTES) -> None:
        self.settings = read_settings(url, env)
        self.url = self.settings.url
        self._part_bytes = part_bytes
        self._uuid: str | None = None
        self._connections: Connections | None = None

    # The contract

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        """One request with If-None-Match, or parallel parts for an object of more than one. Parts are sent from the
        chunks themselves: a chunk must stay as it is until `put` returns."""
        self.settings.key(key)
        self.check_root()
        part_bytes = part_bytes_for(size, self._part_bytes)
        if size > part_bytes:
            if self._exists(key):
                raise AlreadyExists(f"{key} exists already in {self.url}", key=key, url=self.url)
            return put_parts(self._target(key), chunks, size, part_bytes)
        data = bytearray()
        total = 0
        for chunk in chunks:
            view = flat(chunk)
            total += view.nbytes
            if total > size:
                break
            data += view
        if total != size:
            raise wrong_sum(size, total)
        self._create(key, bytes(data))

    def get(self, key: str, max_bytes: int) -> bytes:
        try:
            return self._get(key, max_bytes)
        except NotFound:
            self.check_root()
            raise

    def reader(self, key: str, *, fresh: bool = False) -> S3Reader:
        """`fresh` changes nothing: there is no cache between us and the store."""
        size = self.size(key)
        return S3Reader(lambda: self._target(key), size, self.check_root)

    def size(self, key: str) -> int:
        found = self._size(key)
        if found is None:
            self.check_root()
            raise NotFound(f"{key} does not exist in {self.url}", key=key, url=self.url)
        return found

    def list(self, folder: str) -> list[str]:
        names = self._names(folder)
        if not names:
            self.check_root()
        return sorted(names)  # stores do not agree on an order

    def sync(self, key: str) -> None:
        """A store answers a put when it keeps the object: what is there is durable."""
        self.size(key)

    def delete(self, key: str) -> None:
        full = self.settings.key(key)
        self.check_root()
        self._ask("delete", key, lambda fs: fs._call_s3("delete_object", Bucket=self.settings.bucket, Key=full))

    def check_root(self) -> str:
        try:
            found = parse_marker(self._get(layout.ROOT_MARKER, MAX_MARKER_BYTES), self.url)
        except NotFound as error:
            raise no_marker(self.url, f"bucket {self.settings.bucket} is there") from error
        if self._uuid is None:
            self._uuid = found
        if found != self._uuid:
            raise other_storage(self.url, self._uuid, found)
        return found

    def initialise(self) -> str:
        """Write the marker unless it is there; the uuid. `NotInitialised` if there is no such bucket: none is made.
        `ckptd init` calls it. Racing callers all get the uuid of the one marker."""
        try:
            return self.check_root()
        except NotInitialised as error:
            if error.fields.get("s3_code"):  # the bucket itself is missing
                raise
        try:
            self._create(layout.ROOT_MARKER, new_marker())
        except AlreadyExists:
            _log.debug("another process initialised %s at the same time", self.url)
        return self.check_root()

    def facts(self) -> dict[str, str]:
        """See `ProbeFacts`. A dozen requests; `ckptd doctor` calls it, no start does."""
        return bucket_facts(self._target(layout.probe_key(layout.new_nonce(), "facts")))

    # Requests

    def _create(self, key: str, data: bytes) -> None:
        """One PUT that the store takes only if the key is free and the bytes are those that were sent."""
        full = self.settings.key(key)
        self._ask(
            "put",
            key,
            lambda fs: fs._call_s3(
                "put_object",
                Bucket=self.settings.bucket,
                Key=full,
                Body=data,
                IfNoneMatch="*",
                ChecksumSHA256=b64encode(hashlib.sha256(data).digest()).decode(),
            ),
        )

    def _get(self, key: str, max_bytes: int, *, byte_range: str | None = None) -> bytes:
        full = self.settings.key(key)
        more = {"Range": byte_range} if byte_range else {}

        async def get(fs: Any) -> tuple[int | None, bytes]:
            answer = await fs._call_s3("get_object", Bucket=self.settings.bucket, Key=full, **more)
            async with answer["Body"] as body:
                length = answer.get("ContentLength")
                if length is not None and length > max_bytes:
                    return length, b""
                return length, await body.read()

        length, data = self._ask("get", key, get)
        found = len(data) if length is None else length
        if found > max_bytes:
            raise Corrupt(
                f"{key} is too long: expected at most {max_bytes} bytes, found {found}",
                key=key,
                expected=max_bytes,
                found=found,
            )
        if found != len(data):
            raise Unavailable(
                f"get {key} in {self.url} failed: the answer ended after {len(data)} of {found} bytes", key=key
            )
        return data

    def _size(self, key: str) -> int | None:
        """Bytes of an object; None if the store says with authority that it is not there."""
        full = self.settings.key(key)
        try:
            answer = self._ask(
                "look at", key, lambda fs: fs._call_s3("head_object", Bucket=self.settings.bucket, Key=full)
            )
            return int(answer["ContentLength"])
        except Unavailable as error:
            if error.fields.get("status") != 404:
                raise
            unclear = error
        # The answer to a HEAD has no text: a missing object, a missing bucket or some proxy. A GET tells.
        try:
            self._get(key, 1 << 40, byte_range="bytes=0-0")
        except NotFound:
            return None
        except Unavailable as error:
            if error.fields.get("s3_code") != "InvalidRange":  # an empty object has no first byte
                raise
        raise unclear

    def _exists(self, key: str) -> bool:
        return self._size(key) is not None

    def _names(self, folder: str) -> set[str]:
        check_key(folder)
        prefix = f"{self.settings.key(folder)}/"
        names: set[str] = set()
        token: str | None = None
        while True:
            more = {"ContinuationToken": token} if token else {}

            def page(fs: Any, more: dict[str, str] = more) -> Awaitable[dict[str, Any]]:
                answer: Awaitable[dict[str, Any]] = fs._call_s3(
                    "list_objects_v2", Bucket=self.settings.bucket, Prefix=prefix, Delimiter="/", **more
                )
                return answer

            found = self._ask("list", folder, page)
            names.update(item["Prefix"][len(prefix) :].rstrip("/") for item in found.get("CommonPrefixes") or ())
            names.update(item["Key"][len(prefix) :] for item in found.get("Contents") or ())
            if not found.get("IsTruncated"):
                return names - {""}  # the folder's own entry, which some tools make
            before, token = token, found.get("NextContinuationToken")
            if not token or token == before:
                raise Unavailable(
                    f"list {folder} in {self.url} failed: the store cut the list and gave no way to go on", key=folder
                )

    def _ask(self, operation: str, key: str, request: Callable[[Any], Awaitable[T]]) -> T:
        """The answer to one request through s3fs, within the deadline; our error if there is none."""
        call = self._call(operation, key)
        try:
            here = self._connected()
            deadline_seconds = self.settings.deadline_seconds

            async def bounded() -> T:
                # Cancels the request, so nothing of it goes on after the deadline.
                return await asyncio.wait_for(request(here.fs), deadline_seconds)

            answer: T = run_on_loop(here.loop, bounded)
            return answer
        except FAILURES as error:
            if isinstance(error, TimeoutError) and not code_and_status(error)[1]:
                raise Unavailable(
                    f"{call} failed: no answer within {self.settings.deadline_seconds:g} s",
                    do="Check that the endpoint is up and reachable (AWS_ENDPOINT_URL), then retry.",
                    key=key,
                    url=self.url,
                ) from error
            raise as_ckptd(error, call) from error

    def _connected(self) -> Connections:
        found = self._connections
        if found is None or found.pid != os.getpid():
            with one_at_a_time(self.settings):
                found = self._connections
                if found is None or found.pid != os.getpid():
                    found = self._connections = Connections(self.settings)
        return found

    def _target(self, key: str) -> Target:
        return Target(
            client=self._connected().client,
            bucket=self.settings.bucket,
            key=self.settings.key(key),
            call=self._call("put", key),
            deadline_seconds=self.settings.deadline_seconds,
        )

    def _call(self, operation: str, key: str) -> Call:
        return Call(operation, key, self.url, self.settings.bucket)
