"""Storage on any fsspec store: the contract on a real server, what goes wrong there, and stores that are refused."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem

from ckptd import layout
from ckptd.errors import AlreadyExists, CkptdError, Corrupt, Invalid, NotFound, NotInitialised, Unavailable, Unfit
from ckptd.storage import Storage, init_root, open_storage
from ckptd.storage.findings import lasting
from ckptd.storage.fsspec_calls import Call, as_ckptd, within
from ckptd.storage.fsspec_store import MIB, FsspecStorage
from ckptd.storage.probe import probe, refuse_unfit
from ckptd.storage.s3 import S3Storage
from ckptd.testing.proxy import Proxy
from ckptd.testing.seaweed import BUCKET, SeaweedProcess
from ckptd.testing.storage_contract import KEY, LIMIT, RUN, StorageContract, put, together

BLOCK = 5 * MIB  # what S3 allows but for the last one
PAYLOAD = f"{RUN}/data/g00000001/s/0-0123456789abcdef.safetensors"
WAIT_SECONDS = 60.0


def on_s3fs(server: SeaweedProcess, *, endpoint: str = "", bucket: str = BUCKET, **more: Any) -> FsspecStorage:
    """The storage at a fresh prefix, not initialised, as if s3fs was a library like any other."""
    env = server.env

    def connect() -> S3FileSystem:
        return S3FileSystem(
            key=more.get("key", env["AWS_ACCESS_KEY_ID"]),
            secret=env["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=endpoint or server.endpoint,
            client_kwargs={"region_name": env["AWS_REGION"]},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    root = f"{bucket}/fsspec/{layout.new_nonce()}"
    return FsspecStorage(
        f"fsspec://{root}", root, connect, deadline_seconds=more.get("deadline_seconds", 60), block_bytes=BLOCK
    )


@pytest.fixture
def storage(seaweed: SeaweedProcess) -> FsspecStorage:
    made = on_s3fs(seaweed)
    made.initialise()
    return made


class TestFsspec(StorageContract):
    @pytest.fixture
    def storage(self, seaweed: SeaweedProcess) -> Storage:
        made = on_s3fs(seaweed)
        made.initialise()
        return made


def some_bytes(size: int) -> bytes:
    return hashlib.shake_128(b"fsspec").digest(size)


def read_all(storage: Storage, key: str) -> bytes:
    with storage.reader(key) as reader:
        buffer = bytearray(reader.size)
        reader.read_into(0, memoryview(buffer))
    return bytes(buffer)


def unfinished(storage: FsspecStorage, server: SeaweedProcess) -> list[str]:
    client = S3Storage(f"s3://{BUCKET}/x", env=server.env).settings.new_client()
    prefix = storage.url.partition(f"{BUCKET}/")[2]
    found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    return [upload["Key"] for upload in found.get("Uploads", [])]


# Payload in blocks


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK + 12_345])
def test_payload_of_many_blocks_is_read_back(storage: FsspecStorage, size: int) -> None:
    data = some_bytes(size)
    cuts = [0, 1, 1, 4 * MIB, BLOCK + 7, size]
    chunks = [memoryview(data)[min(a, size) : min(b, size)] for a, b in pairwise(cuts)]
    storage.put(PAYLOAD, chunks, size)
    assert storage.size(PAYLOAD) == size
    assert read_all(storage, PAYLOAD) == data


def test_one_object_takes_the_memory_of_a_few_blocks(storage: FsspecStorage) -> None:
    chunk = bytes(MIB)
    put(storage, KEY, b"the connection and all code are there")
    tracemalloc.start()
    try:
        storage.put(PAYLOAD, (chunk for _ in range(60)), 60 * MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * BLOCK


def test_T2_payload_never_replaces_an_object(storage: FsspecStorage) -> None:
    put(storage, PAYLOAD, b"first")
    with pytest.raises(AlreadyExists):
        storage.put(PAYLOAD, [bytes(2 * BLOCK)], 2 * BLOCK)
    assert storage.get(PAYLOAD, LIMIT) == b"first"


def test_T1_payload_that_breaks_off_leaves_nothing(storage: FsspecStorage, seaweed: SeaweedProcess) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(2 * BLOCK)
        raise FileExistsError("the source is gone")

    with pytest.raises(FileExistsError, match="the source is gone"):
        storage.put(PAYLOAD, chunks(), 4 * BLOCK)
    for size in (2 * BLOCK - 1, 2 * BLOCK + 1):
        with pytest.raises(Invalid, match="do not add up"):
            storage.put(PAYLOAD, [bytes(2 * BLOCK)], size)
    gc.collect()  # a file that is finalised must not make the object after all
    StorageContract.assert_absent(storage, PAYLOAD)
    assert unfinished(storage, seaweed) == []
    put(storage, PAYLOAD, b"free")


# Names and roots


def test_T4_racing_inits_end_with_one_uuid(seaweed: SeaweedProcess) -> None:
    made = on_s3fs(seaweed)
    uuids: list[str] = []
    assert together([lambda: uuids.append(made.initialise())] * 8) == [None] * 8
    assert set(uuids) == {made.check_root()}
    assert len(uuids) == 8


def test_T3_a_root_without_marker_gives_no_answers(seaweed: SeaweedProcess) -> None:
    made = on_s3fs(seaweed)
    calls: list[Callable[[], object]] = [
        made.check_root,
        lambda: put(made, KEY, b"x"),
        lambda: made.get(KEY, LIMIT),
        lambda: made.size(KEY),
        lambda: made.list(RUN),
        lambda: made.delete(KEY),
    ]
    for call in calls:
        with pytest.raises(NotInitialised):
            call()


def test_no_bucket_is_made(seaweed: SeaweedProcess) -> None:
    for bucket in ("no-such-bucket", "no-such-bucket-too"):
        with pytest.raises(CkptdError) as caught:
            on_s3fs(seaweed, bucket=bucket).initialise()
        assert not isinstance(caught.value, AlreadyExists)
    client = S3Storage(f"s3://{BUCKET}/x", env=seaweed.env_of("admin")).settings.new_client()
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == [BUCKET]


def test_another_instance_sees_at_once_what_it_was_told_is_absent(
    storage: FsspecStorage, seaweed: SeaweedProcess
) -> None:
    other = FsspecStorage(storage.url, storage._root, storage._connect)
    for number in range(5):
        key = f"{RUN}/log/{number}"
        with pytest.raises(NotFound):
            other.get(key, LIMIT)
        assert str(number) not in other.list(f"{RUN}/log")
        put(storage, key, b"new")
        assert other.get(key, LIMIT) == b"new"
        assert str(number) in other.list(f"{RUN}/log")
        assert other.size(key) == 3
    storage.delete(f"{RUN}/log/0")
    assert "0" not in other.list(f"{RUN}/log")


def test_an_object_that_vanishes_under_a_reader_is_not_found(storage: FsspecStorage) -> None:
    put(storage, KEY, b"12345")
    with storage.reader(KEY) as reader:
        storage.delete(KEY)
        with pytest.raises(NotFound):
            reader.read_into(0, memoryview(bytearray(5)))


def test_an_object_that_shrinks_under_a_reader_is_corrupt(storage: FsspecStorage) -> None:
    put(storage, KEY, b"12345")
    with storage.reader(KEY) as reader:
        storage.delete(KEY)
        put(storage, KEY, b"123")
        with pytest.raises(Corrupt, match="expected 5 bytes, found 3"):
            reader.read_into(0, memoryview(bytearray(5)))


def _in_child(storage: FsspecStorage, answers: Any) -> None:
    try:
        put(storage, f"{RUN}/log/child", b"child")
        gc.collect()  # must not reach what belongs to the parent
        answers.put(storage.get(KEY, LIMIT))
    except CkptdError as error:
        answers.put(error)


def test_it_works_on_after_a_fork(storage: FsspecStorage) -> None:
    put(storage, KEY, b"parent")
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    child = context.Process(target=_in_child, args=(storage, answers))
    child.start()
    assert answers.get(timeout=WAIT_SECONDS) == b"parent"
    child.join(WAIT_SECONDS)
    assert child.exitcode == 0
    assert storage.get(f"{RUN}/log/child", LIMIT) == b"child"


# Errors


def test_a_server_that_does_not_answer_is_given_up_at_the_deadline(seaweed: SeaweedProcess) -> None:
    with Proxy(seaweed.endpoint) as proxy:
        stalled = on_s3fs(seaweed, endpoint=proxy.url, deadline_seconds=0.5)
        proxy.black_hole()
        with pytest.raises(Unavailable, match=r"no answer within 0\.5 s"):
            stalled.check_root()
        proxy.assert_all_fired()


def test_payload_that_stalls_is_given_up_at_the_deadline(seaweed: SeaweedProcess) -> None:
    with Proxy(seaweed.endpoint) as proxy:
        stalled = on_s3fs(seaweed, endpoint=proxy.url)
        stalled.initialise()
        stalled._deadline_seconds = 1
        proxy.stall("POST", ".safetensors", times=None)
        with pytest.raises(Unavailable, match=r"no answer within 6 s"):  # and one second for each MiB of a block
            stalled.put(PAYLOAD, [bytes(2 * BLOCK)], 2 * BLOCK)
        proxy.assert_all_fired()


def test_a_lost_answer_is_no_second_object(seaweed: SeaweedProcess) -> None:
    with Proxy(seaweed.endpoint) as proxy:
        made = on_s3fs(seaweed, endpoint=proxy.url)
        made.initialise()
        proxy.lose_answer("PUT", "0000000000000001.json")
        with pytest.raises((AlreadyExists, Unavailable)):  # the library may have asked again
            put(made, KEY, b"mine")
        assert made.get(KEY, LIMIT) == b"mine"
        proxy.assert_all_fired()


def test_refused_credentials_are_not_absence(seaweed: SeaweedProcess) -> None:
    with pytest.raises(Unavailable, match="credentials are refused") as caught:
        on_s3fs(seaweed, key="nobody-key").check_root()
    assert lasting(caught.value), "the probe calls it unfit, not busy"


class _Answered(Exception):
    """As Azure's and Google's libraries have them: no OSError, with a status."""

    def __init__(self, **fields: object) -> None:
        super().__init__(f"answered {fields}")
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    ("error", "operation", "kind", "status"),
    [
        (FileExistsError("k"), "put", AlreadyExists, None),
        (FileExistsError("k"), "get", Unavailable, 0),
        (FileNotFoundError("k"), "get", NotFound, None),
        (FileNotFoundError("k"), "put", NotInitialised, 0),
        (_Answered(status_code=404), "look at", NotFound, None),
        (_Answered(status_code=404), "put", NotInitialised, 404),
        (_Answered(status_code=403), "put", Unavailable, 403),
        (_Answered(code="401"), "get", Unavailable, 401),
        (_Answered(code=503), "put", Unavailable, 503),
        (_Answered(code=412), "get", Unavailable, 412),
        (_Answered(code=412), "put", AlreadyExists, None),
        (_Answered(response={"ResponseMetadata": {"HTTPStatusCode": 412}}), "put", AlreadyExists, None),
        (PermissionError("no"), "get", Unavailable, 403),
        (OSError("Forbidden: https://storage/b/o"), "get", Unavailable, 403),
        (OSError("connection reset"), "put", Unavailable, 0),
        (RuntimeError("Failed to upload block"), "put", Unavailable, 0),
        (TimeoutError(), "put", Unavailable, 0),
    ],
)
def test_only_clear_answers_are_facts(
    error: Exception, operation: str, kind: type[CkptdError], status: int | None
) -> None:
    found = as_ckptd(error, Call(operation, KEY, "gs://b/p", "b/p"), 60)
    assert type(found) is kind
    assert KEY in found.message
    assert found.fields.get("status") == status
    if kind is Unavailable:
        assert (str(error) or "no answer within 60 s") in found.message


def test_work_past_its_deadline_is_left_alone() -> None:
    go_on, went_on = threading.Event(), threading.Event()

    def work() -> None:
        assert go_on.wait(WAIT_SECONDS)
        went_on.set()

    with pytest.raises(Unavailable, match=r"no answer within 0\.05 s"):
        within(0.05, Call("put", KEY, "gs://b/p", "b/p"), work)
    go_on.set()
    assert went_on.wait(WAIT_SECONDS)


# Stores that do not create atomically


class Overwrites(MemoryFileSystem):  # type: ignore[misc]
    """As a file system that does not know the mode: it writes."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        super().pipe_file(path, value)


class LooksThenWrites(MemoryFileSystem):  # type: ignore[misc]
    """As fsspec's own fallback: two writers of one key both see that it is free, and both write."""

    cachable = False
    looked = threading.Barrier(2)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        if "/race-" in path:
            self.looked.wait(WAIT_SECONDS)
        super().pipe_file(path, value)


def over(kind: type[MemoryFileSystem], root: str) -> FsspecStorage:
    made = FsspecStorage(f"gs://{root}", root, lambda: AsyncFileSystemWrapper(kind(), asynchronous=False))
    made.initialise()
    return made


def test_a_store_that_overwrites_is_refused_at_the_start() -> None:
    with pytest.raises(Unfit, match="a taken key was created again"):
        refuse_unfit(over(Overwrites, f"bucket/{layout.new_nonce()}"))


def test_a_store_that_looks_and_then_writes_is_found_out_by_the_race() -> None:
    root = f"bucket/{layout.new_nonce()}"
    refuse_unfit(over(LooksThenWrites, root))  # one writer alone sees nothing wrong
    report = probe(f"gs://{root}", racers=2, rounds=1, large_bytes=0, open_one=partial(over, LooksThenWrites, root))
    assert [finding.name for finding in report.unfit] == ["race of threads"]
    assert "2 of 2 writers of one key were told that they created it" in report.unfit[0].detail
    assert report.tier == "conditional put"


# URLs


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if gcsfs was installed, with its buckets in memory."""
    module = ModuleType("gcsfs.core")
    made = partial(AsyncFileSystemWrapper, MemoryFileSystem(), asynchronous=False)
    module.GCSFileSystem = lambda **options: made()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gcsfs.core", module)


@pytest.mark.usefixtures("google")
@pytest.mark.parametrize("query", ["", "?deadline_seconds=5"])
def test_a_url_says_where_the_objects_are(query: str) -> None:
    place = f"bucket/{layout.new_nonce()}/runs"
    uuid = init_root(f"gs://{place}/{query}")
    found = open_storage(f"gs://{place}{query}")
    assert (found.url, found.check_root()) == (f"gs://{place}{query}", uuid)
    put(found, KEY, b"there")
    assert MemoryFileSystem().cat_file(f"/{place}/{KEY}") == b"there"
    assert open_storage(found.url).get(KEY, LIMIT) == b"there"


@pytest.mark.parametrize(("scheme", "module", "extra"), [
    ("gs", "gcsfs.core", "gcs"), ("abfs", "adlfs", "azure"), ("az", "adlfs", "azure"),
])  # fmt: skip
def test_without_its_extra_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, scheme: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for call in (open_storage, init_root):
        with pytest.raises(Invalid, match=f"needs the extra '{extra}'") as caught:
            call(f"{scheme}://bucket/prefix")
        assert caught.value.do == f"Run: pip install 'ckptd[{extra}]'"
