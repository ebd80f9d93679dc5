"""S3 storage when the server dies, stalls or answers with an error."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from moto.server import ThreadedMotoServer

from ckptd.errors import AlreadyExists, CkptdError, Invalid, NotFound, NotInitialised, Unavailable
from ckptd.storage.s3 import S3Storage
from ckptd.storage.s3_errors import Call, as_ckptd
from ckptd.storage.s3_payload import MIB
from ckptd.testing.seaweed import SeaweedProcess
from ckptd.testing.storage_contract import KEY, LIMIT, RUN, put

PART = 5 * MIB
PAYLOAD = f"{RUN}/data/g00000001/s/0-0123456789abcdef.safetensors"


def keys(**more: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", **more}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SeaweedProcess]:
    with SeaweedProcess(tmp_path) as started:
        yield started


def test_a_server_killed_in_mid_upload_leaves_no_object(server: SeaweedProcess) -> None:
    url = f"{server.url('p')}?deadline_seconds=3"
    storage = S3Storage(url, env=server.env, part_bytes=PART)
    uuid = storage.initialise()
    put(storage, KEY, b"before")

    def chunks() -> Iterator[bytes]:
        yield bytes(3 * PART)
        server.kill()
        yield bytes(PART)

    with pytest.raises(Unavailable, match="0-0123456789abcdef"):
        storage.put(PAYLOAD, chunks(), 4 * PART)
    with pytest.raises(Unavailable, match="without an answer"):
        put(storage, f"{RUN}/log/2", b"during")
    with pytest.raises(Unavailable):
        storage.list(f"{RUN}/log")

    server.start()
    assert storage.check_root() == uuid
    assert storage.get(KEY, LIMIT) == b"before"
    with pytest.raises(NotFound):
        storage.size(PAYLOAD)
    # What became of the other put is open: it is found out by sending the same bytes again.
    try:
        put(storage, f"{RUN}/log/2", b"during")
    except AlreadyExists:
        assert storage.get(f"{RUN}/log/2", LIMIT) == b"during"
    assert storage.get(f"{RUN}/log/2", LIMIT) == b"during"
    storage.put(PAYLOAD, [b"x" * PART, b"y" * PART], 2 * PART)
    assert storage.size(PAYLOAD) == 2 * PART


def test_a_server_that_stalls_is_given_up_at_the_deadline(server: SeaweedProcess) -> None:
    storage = S3Storage(f"{server.url('p')}?deadline_seconds=0.5", env=server.env, part_bytes=PART)
    patient = S3Storage(server.url("p"), env=server.env, part_bytes=PART)
    patient.initialise()
    patient.put(PAYLOAD, [bytes(PART + 1)], PART + 1)
    storage.check_root()
    reader = storage.reader(PAYLOAD)

    def chunks() -> Iterator[bytes]:
        os.kill(server.pid, signal.SIGSTOP)
        yield bytes(2 * PART)

    try:
        with pytest.raises(Unavailable, match=r"put part [12] of"):
            storage.put(f"{PAYLOAD}2", chunks(), 2 * PART)
        calls: list[Callable[[], object]] = [
            lambda: storage.get(KEY, LIMIT),
            lambda: storage.list("runs"),
            lambda: put(storage, KEY, b"x"),
            lambda: reader.read_into(0, memoryview(bytearray(100))),
        ]
        for call in calls:
            with pytest.raises(Unavailable, match=r"(?i)time|no answer within"):
                call()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert patient.size(PAYLOAD) == PART + 1


@pytest.mark.parametrize("accepts", [True, False])
def test_T6_an_endpoint_that_never_answers_is_no_absence(accepts: bool) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if accepts:
            hole.listen(64)
        env = keys(AWS_ENDPOINT_URL=f"http://127.0.0.1:{hole.getsockname()[1]}")
        storage = S3Storage("s3://bucket/p?deadline_seconds=0.3", env=env)
        calls: list[Callable[[], object]] = [
            storage.check_root,
            storage.initialise,
            lambda: storage.list("runs"),
            lambda: storage.get(KEY, LIMIT),
            lambda: storage.size(KEY),
            lambda: storage.delete(KEY),
            lambda: put(storage, KEY, b"x"),
        ]
        for call in calls:
            with pytest.raises(Unavailable) as caught:
                call()
            assert type(caught.value) is Unavailable
            assert "AWS_ENDPOINT_URL" in caught.value.do


def test_another_server_s_way_to_say_taken() -> None:
    # Where the condition is named, s3fs raises FileExistsError; where it is not, some other OSError.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        env = keys(AWS_ENDPOINT_URL=f"http://{host}:{port}")
        storage = S3Storage("s3://bucket/p", env=env, part_bytes=PART)
        with pytest.raises(NotInitialised, match="bucket"):
            storage.initialise()
        storage.settings.new_client().create_bucket(Bucket="bucket")
        storage.initialise()
        put(storage, KEY, b"first")
        with pytest.raises(AlreadyExists) as caught:
            put(storage, KEY, b"second")
        assert isinstance(caught.value.__cause__, FileExistsError)
        assert storage.get(KEY, LIMIT) == b"first"
        storage.put(PAYLOAD, [bytes(PART + 1)], PART + 1)
        with pytest.raises(AlreadyExists):
            storage.put(PAYLOAD, [bytes(PART + 1)], PART + 1)
        assert storage.list(RUN) == ["data", "log"]
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (412, "PreconditionFailed", AlreadyExists, "exists already"),
        (409, "ConditionalRequestConflict", Unavailable, "ConditionalRequestConflict"),
        (404, "NoSuchKey", NotFound, "does not exist"),
        (404, "NoSuchBucket", NotInitialised, "no bucket the-bucket"),
        (404, "404", Unavailable, "404"),
        (404, "NoSuchUpload", Unavailable, "NoSuchUpload"),
        (403, "AccessDenied", Unavailable, "s3:PutObject on runs/x"),
        (400, "ExpiredToken", Unavailable, "credentials are refused"),
        (403, "RequestTimeTooSkewed", Unavailable, "Set this machine's clock"),
        (400, "RequestTimeout", Unavailable, "RequestTimeout"),
        (400, "BadDigest", Unavailable, "nothing was stored"),
        (500, "InternalError", Unavailable, "InternalError"),
        (503, "SlowDown", Unavailable, "SlowDown"),
        (501, "NotImplemented", Invalid, "cannot do it"),
        (301, "PermanentRedirect", Unavailable, "AWS_REGION"),
    ],
)
def test_T6_what_an_answer_means(status: int, code: str, kind: type[CkptdError], says: str) -> None:
    answer = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    cause = ClientError(answer, "PutObject")
    wrapped = OSError(22, "some wording")
    wrapped.__cause__ = cause
    for error in (cause, wrapped):
        found = as_ckptd(error, Call("put", "runs/x", "s3://the-bucket/p", "the-bucket"))
        assert type(found) is kind
        assert says in str(found)


def test_no_answer_keeps_its_cause() -> None:
    error = EndpointConnectionError(endpoint_url="http://nowhere:1")
    found = as_ckptd(error, Call("list", "runs", "s3://b/p", "b"))
    assert type(found) is Unavailable
    assert "list runs in s3://b/p" in found.message
    assert "http://nowhere:1" in found.message
