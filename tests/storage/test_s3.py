"""S3 storage on a real server: the contract, and what bites with S3 in particular."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from ckptd import layout
from ckptd.errors import AlreadyExists, CkptdError, Corrupt, Invalid, NotFound, NotInitialised, Unavailable
from ckptd.storage import Storage, init_root, open_storage, s3_settings
from ckptd.storage.s3 import S3Storage
from ckptd.storage.s3_clients import one_at_a_time
from ckptd.storage.s3_payload import MAX_PARTS, MIB, WRITER, part_bytes_for
from ckptd.testing.proxy import Proxy
from ckptd.testing.seaweed import SeaweedProcess
from ckptd.testing.storage_contract import KEY, LIMIT, RUN, StorageContract, put, together

SMALLEST_PART = 5 * MIB  # what S3 allows but for the last one
PAYLOAD = f"{RUN}/data/g00000001/s/0-0123456789abcdef.safetensors"


@pytest.fixture
def storage(s3_url: str) -> S3Storage:
    init_root(s3_url)
    return S3Storage(s3_url, part_bytes=SMALLEST_PART)


class TestS3(StorageContract):
    @pytest.fixture
    def storage(self, s3_url: str) -> Storage:
        init_root(s3_url)
        return open_storage(s3_url)


def some_bytes(size: int, seed: int = 0) -> bytes:
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size)


def uploads_below(storage: S3Storage) -> list[str]:
    """The keys of unfinished uploads under the prefix."""
    found = client_of(storage).list_multipart_uploads(Bucket=storage.settings.bucket, Prefix=storage.settings.prefix)
    return [upload["Key"] for upload in found.get("Uploads", [])]


def client_of(storage: S3Storage) -> Any:
    return storage.settings.new_client()


def read_all(storage: Storage, key: str) -> bytes:
    with storage.reader(key) as reader:
        buffer = bytearray(reader.size)
        reader.read_into(0, memoryview(buffer))
    return bytes(buffer)


# Payload in parts


@pytest.mark.parametrize("size", [SMALLEST_PART, SMALLEST_PART + 1, 2 * SMALLEST_PART, 3 * SMALLEST_PART + 12_345])
def test_payload_of_many_parts_is_read_back(storage: S3Storage, size: int) -> None:
    data = some_bytes(size)
    cuts = [0, 1, 4 * MIB, 4 * MIB, SMALLEST_PART + 7, size]
    chunks = [memoryview(data)[min(a, size) : min(b, size)] for a, b in pairwise(cuts)]
    storage.put(PAYLOAD, chunks, size)
    assert storage.size(PAYLOAD) == size
    with storage.reader(PAYLOAD) as reader, ThreadPoolExecutor(4) as pool:
        buffer = bytearray(size)
        step = MIB + 1
        starts = range(0, size, step)
        list(pool.map(lambda at: reader.read_into(at, memoryview(buffer)[at : at + step]), starts))
    assert buffer == data
    assert uploads_below(storage) == []


def test_T2_a_taken_key_is_not_overwritten_by_parts(storage: S3Storage) -> None:
    put(storage, PAYLOAD, b"first")
    asked = []

    def chunks() -> Iterator[bytes]:
        asked.append(1)
        yield bytes(SMALLEST_PART + 1)

    with pytest.raises(AlreadyExists):
        storage.put(PAYLOAD, chunks(), SMALLEST_PART + 1)
    assert asked == []
    assert storage.get(PAYLOAD, LIMIT) == b"first"


def test_T2_a_key_taken_while_parts_are_sent_is_not_overwritten(storage: S3Storage) -> None:
    data = some_bytes(SMALLEST_PART + 1)

    def chunks() -> Iterator[bytes]:
        yield data[:10]
        put(storage, PAYLOAD, b"quick")
        yield data[10:]

    with pytest.raises(AlreadyExists):
        storage.put(PAYLOAD, chunks(), len(data))
    assert storage.get(PAYLOAD, LIMIT) == b"quick"
    assert uploads_below(storage) == []


@pytest.mark.parametrize("size", [SMALLEST_PART + 2, 3 * SMALLEST_PART])
def test_wrong_size_of_many_parts_leaves_nothing(storage: S3Storage, size: int) -> None:
    with pytest.raises(Invalid) as caught:
        storage.put(PAYLOAD, [bytes(SMALLEST_PART), bytes(size - SMALLEST_PART + 1)], size)
    assert (caught.value.fields["expected"], caught.value.fields["found"]) == (size, size + 1)
    with pytest.raises(NotFound):
        storage.size(PAYLOAD)
    assert uploads_below(storage) == []


def test_T1_an_iterator_that_fails_between_parts_leaves_nothing(storage: S3Storage) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(2 * SMALLEST_PART)
        raise FileExistsError("the source is gone")

    with pytest.raises(FileExistsError, match="the source is gone"):
        storage.put(PAYLOAD, chunks(), 3 * SMALLEST_PART)
    with pytest.raises(NotFound):
        storage.size(PAYLOAD)
    assert uploads_below(storage) == []


@pytest.mark.parametrize("size", [1, 16 * MIB, 160_000 * MIB, 160_000 * MIB + 1, 5 * 10**12])
def test_any_size_fits_ten_thousand_parts(size: int) -> None:
    part = part_bytes_for(size)
    assert part >= 16 * MIB
    assert -(-size // part) <= MAX_PARTS
    assert part <= 512 * MIB


def on_upload(storage: S3Storage, act: Callable[[Any], None]) -> None:
    """Call `act` with each request that carries a part, just before it is sent."""
    storage._connected().client.meta.events.register("before-send.s3.UploadPart", lambda request, **_: act(request))


def test_parts_changed_on_their_way_are_refused_and_sent_again(storage: S3Storage) -> None:
    data = some_bytes(2 * SMALLEST_PART)
    seen: list[str] = []

    def flip(request: Any) -> None:
        seen.append(request.url)
        if len(seen) == 1:
            body = bytearray(b"".join(iter(lambda: bytes(request.body.read()), b"")))
            body[1000] ^= 1
            request.body = body

    on_upload(storage, flip)
    storage.put(PAYLOAD, [data], len(data))
    assert len(seen) == 3
    assert read_all(storage, PAYLOAD) == data


def test_the_first_cause_of_a_part_is_in_the_message(storage: S3Storage) -> None:
    causes = iter(["the cable was cut", "second", "third"])

    def fail(request: Any) -> None:
        if "partNumber=2" in request.url:
            raise ConnectionResetError(next(causes))

    on_upload(storage, fail)
    with pytest.raises(Unavailable, match=f"put part 2 of {PAYLOAD}.*the cable was cut"):
        storage.put(PAYLOAD, [bytes(2 * SMALLEST_PART)], 2 * SMALLEST_PART)
    assert next(causes, None) is None  # it was tried three times
    assert uploads_below(storage) == []


@pytest.mark.parametrize("landed", [True, False])
def test_a_completion_whose_answer_is_lost_is_found_out(storage: S3Storage, landed: bool) -> None:
    data = some_bytes(2 * SMALLEST_PART)
    lost: list[str] = []

    def lose(request: Any = None, **_: Any) -> None:
        if not lost:
            lost.append("")
            raise ConnectionResetError("the answer was lost")

    event = "after-call.s3.CompleteMultipartUpload" if landed else "before-send.s3.CompleteMultipartUpload"
    storage._connected().client.meta.events.register(event, lose)
    storage.put(PAYLOAD, [data], len(data))
    assert lost
    assert read_all(storage, PAYLOAD) == data
    head = client_of(storage).head_object(Bucket=storage.settings.bucket, Key=storage.settings.key(PAYLOAD))
    assert head["Metadata"][WRITER]


# Reading


def test_an_object_cut_short_after_it_was_opened_is_corrupt(storage: S3Storage) -> None:
    put(storage, PAYLOAD, b"0123456789")
    with storage.reader(PAYLOAD) as reader:
        client = client_of(storage)
        client.put_object(Bucket=storage.settings.bucket, Key=storage.settings.key(PAYLOAD), Body=b"01234")
        for offset in (0, 3, 7):
            with pytest.raises(Corrupt):
                reader.read_into(offset, memoryview(bytearray(3)))


def test_an_object_gone_after_it_was_opened_is_not_found(storage: S3Storage) -> None:
    put(storage, PAYLOAD, b"0123456789")
    with storage.reader(PAYLOAD) as reader:
        storage.delete(PAYLOAD)
        with pytest.raises(NotFound):
            reader.read_into(0, memoryview(bytearray(3)))


# Listings


def test_a_listing_has_more_than_one_page(storage: S3Storage) -> None:
    names = sorted(f"{number:016d}.json" for number in range(1005))
    client, bucket = client_of(storage), storage.settings.bucket

    def write(name: str) -> None:
        client.put_object(Bucket=bucket, Key=storage.settings.key(f"{RUN}/log/{name}"), Body=b"x")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, names))
    assert storage.list(f"{RUN}/log") == names
    put(storage, f"{RUN}/data/x/y", b"x")
    assert storage.list(RUN) == ["data", "log"]


def test_names_are_sorted_as_bytes_and_given_once(storage: S3Storage) -> None:
    for key in ("runs/a/b/1", "runs/a-b/1", "runs/a.b", "runs/a/c"):
        put(storage, key, b"x")
    assert storage.list("runs") == ["a", "a-b", "a.b"]
    assert storage.list("runs/a") == ["b", "c"]


def test_the_entry_some_tools_make_for_a_folder_is_no_name(storage: S3Storage) -> None:
    client_of(storage).put_object(Bucket=storage.settings.bucket, Key=storage.settings.key(f"{RUN}/log") + "/")
    put(storage, KEY, b"x")
    assert storage.list(f"{RUN}/log") == [KEY.rpartition("/")[2]]


def test_nothing_is_remembered_between_two_looks(s3_url: str) -> None:
    init_root(s3_url)
    one, two = S3Storage(s3_url), S3Storage(s3_url)
    assert two.list(f"{RUN}/log") == []
    with pytest.raises(NotFound):
        two.get(KEY, LIMIT)
    put(one, KEY, b"x")
    assert two.list(f"{RUN}/log") == [KEY.rpartition("/")[2]]
    assert (two.get(KEY, LIMIT), two.size(KEY)) == (b"x", 1)
    one.delete(KEY)
    assert two.list(f"{RUN}/log") == []
    with pytest.raises(NotFound):
        two.size(KEY)


# Put-if-absent


def test_T2_an_empty_object_does_not_overwrite(storage: S3Storage) -> None:
    put(storage, KEY, b"full")
    with pytest.raises(AlreadyExists):
        storage.put(KEY, [], 0)
    assert storage.get(KEY, LIMIT) == b"full"


def test_a_put_whose_answer_is_lost_is_sent_once_and_open(storage: S3Storage) -> None:
    # A repeat by the SDK would be answered "taken" to our own success.
    sent: list[str] = []
    storage.check_root()
    client = storage._connected().fs._s3

    def lose(**_: Any) -> None:
        sent.append("")
        raise ConnectionResetError("the answer was lost")

    client.meta.events.register("after-call.s3.PutObject", lose)
    with pytest.raises(Unavailable, match="the answer was lost") as caught:
        put(storage, KEY, b"mine")
    assert type(caught.value) is Unavailable
    assert len(sent) == 1
    assert storage.get(KEY, LIMIT) == b"mine"


def test_a_put_on_a_kept_connection_that_breaks_is_sent_once(seaweed: SeaweedProcess, storage: S3Storage) -> None:
    # Below s3fs, aiohttp repeats a PUT by itself unless it is told not to.
    with Proxy(seaweed.endpoint) as proxy:
        wired = S3Storage(storage.url, env={**seaweed.env, "AWS_ENDPOINT_URL": proxy.url})
        put(wired, f"{RUN}/log/before", b"x")  # the connection is kept
        proxy.lose_answer("PUT", KEY)
        with pytest.raises(Unavailable, match="without an answer") as caught:
            put(wired, KEY, b"mine")
        assert type(caught.value) is Unavailable
        assert [method for method, path in proxy.requests if path.endswith(KEY)] == ["PUT"]
        assert storage.get(KEY, LIMIT) == b"mine"
        put(wired, f"{RUN}/log/after", b"x")
        proxy.assert_all_fired()


@pytest.mark.parametrize("missing", ["aiohttp", "aiobotocore"])
def test_libraries_that_cannot_be_told_to_send_once_are_refused(
    storage: S3Storage, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "aiohttp":
        monkeypatch.setattr("aiohttp.ClientSession.ATTRS", frozenset())
    else:
        monkeypatch.setattr(s3_settings, "AioConfig", lambda **options: options)
    s3_settings.check_sdk.cache_clear()
    with pytest.raises(Invalid, match="may send a put twice"):
        storage.settings.new_filesystem()
    monkeypatch.undo()
    s3_settings.check_sdk()


def test_bytes_changed_on_their_way_are_not_stored(storage: S3Storage) -> None:
    storage.check_root()

    def flip(request: Any, **_: Any) -> None:
        request.body = b"wrong"

    storage._connected().fs._s3.meta.events.register("before-send.s3.PutObject", flip)
    with pytest.raises(Unavailable, match=r"BadDigest.*nothing was stored"):
        put(storage, KEY, b"right")
    with pytest.raises(NotFound):
        storage.get(KEY, LIMIT)


# Permissions, and places that are not there


def calls_on(storage: Storage) -> list[Callable[[], object]]:
    return [
        lambda: storage.list(f"{RUN}/log"),
        lambda: storage.list("runs/none"),
        lambda: storage.get(KEY, LIMIT),
        lambda: storage.get(f"{RUN}/log/none", LIMIT),
        lambda: storage.size(KEY),
        lambda: storage.reader(KEY),
        lambda: storage.sync(KEY),
        lambda: storage.delete(KEY),
        lambda: put(storage, f"{RUN}/log/new", b"x"),
        storage.check_root,
    ]


def test_T6_a_reader_may_read_and_nothing_else(seaweed: SeaweedProcess, storage: S3Storage) -> None:
    put(storage, KEY, b"x")
    reader = S3Storage(storage.url, env=seaweed.env_of("reader"), part_bytes=SMALLEST_PART)
    assert reader.get(KEY, LIMIT) == b"x"
    assert reader.list(f"{RUN}/log") == [KEY.rpartition("/")[2]]
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: put(reader, f"{RUN}/log/new", b"y"), "s3:PutObject"),
        (lambda: put(reader, KEY, b"y"), "s3:PutObject"),
        (lambda: reader.put(PAYLOAD, [bytes(SMALLEST_PART + 1)], SMALLEST_PART + 1), "s3:PutObject"),
        (lambda: reader.delete(KEY), "s3:DeleteObject"),
    ]
    for call, permission in refused:
        with pytest.raises(Unavailable, match=f"403.*{permission}") as caught:
            call()
        assert type(caught.value) is Unavailable
        assert "AWS_ACCESS_KEY_ID" in caught.value.do
    assert storage.get(KEY, LIMIT) == b"x"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "wrong"}, "InvalidAccessKeyId"),
    ],
)
def test_T6_refused_credentials_are_no_absence(
    seaweed: SeaweedProcess, storage: S3Storage, changed: dict[str, str], says: str
) -> None:
    put(storage, KEY, b"x")
    refused = S3Storage(storage.url, env={**seaweed.env, **changed})
    for call in calls_on(refused):
        with pytest.raises(Unavailable, match=rf"{says}|403 \(403\)") as caught:  # a HEAD is answered without words
            call()
        assert type(caught.value) is Unavailable
    assert "wrong" not in str(caught.value)


def test_no_credentials_at_all(s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="no credentials"):
        open_storage(s3_url)


def test_a_bucket_that_is_not_there_is_not_made(seaweed: SeaweedProcess) -> None:
    storage = S3Storage("s3://elsewhere/prefix", env=seaweed.env_of("admin"))
    for call in [*calls_on(storage), storage.initialise]:
        with pytest.raises(NotInitialised, match="elsewhere"):
            call()
    client = S3Storage(seaweed.url("x"), env=seaweed.env_of("admin")).settings.new_client()
    assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == [seaweed.bucket]


def test_T3_a_prefix_without_marker_gives_no_answers(s3_url: str) -> None:
    storage = S3Storage(s3_url)
    for call in calls_on(storage):
        with pytest.raises(NotInitialised) as caught:
            call()
        assert f"ckptd init {s3_url}" in caught.value.do
    uuid = storage.initialise()
    assert storage.initialise() == init_root(s3_url) == uuid
    assert storage.list("runs") == []


def test_T3_another_storage_in_the_same_place_is_noticed(storage: S3Storage) -> None:
    put(storage, KEY, b"x")
    storage.check_root()
    marker = storage.settings.key(layout.ROOT_MARKER)
    other = b'{"format":1,"storage_uuid":"other"}'
    client_of(storage).put_object(Bucket=storage.settings.bucket, Key=marker, Body=other)
    with pytest.raises(NotInitialised, match="another storage"):
        put(storage, f"{RUN}/log/new", b"x")


def test_T4_racing_inits_end_with_one_uuid(s3_url: str) -> None:
    uuids: list[str] = []
    assert together([lambda: uuids.append(init_root(s3_url))] * 4) == [None] * 4
    assert set(uuids) == {open_storage(s3_url).check_root()}


# URLs and processes


@pytest.mark.parametrize("end", ["", "/", "?deadline_seconds=7.5"])
def test_the_url_opens_the_storage_again_in_another_process(s3_url: str, end: str) -> None:
    uuid = init_root(s3_url)
    storage = open_storage(s3_url + end)
    assert storage.url == s3_url + end.rstrip("/")
    program = "import sys; from ckptd.storage import open_storage; print(open_storage(sys.argv[1]).check_root())"
    done = subprocess.run([sys.executable, "-c", program, storage.url], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == uuid, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "bucket"),
        ("s3:///prefix", "bucket"),
        ("s3://user:secret@bucket/x", "bucket"),
        ("s3://bucket/a//b", "plain names"),
        ("s3://bucket/../b", "plain names"),
        ("s3://bucket/a?publish=lock", "deadline_seconds"),
        ("s3://bucket/a?deadline_seconds=0", "deadline_seconds"),
        ("s3://bucket/a?deadline_seconds=soon", "deadline_seconds"),
        ("s3://bucket/a#b", "prefix"),
        ("s3://[bucket/a", "Invalid IPv6"),
    ],
)
def test_urls_that_are_refused(url: str, says: str) -> None:
    for call in (open_storage, init_root):
        with pytest.raises(Invalid, match=says):
            call(url)


def test_keys_are_bounded_with_their_prefix(s3_url: str) -> None:
    storage = S3Storage(f"{s3_url}/{'p' * 200}")
    with pytest.raises(Invalid, match="1024"):
        storage.get("/".join(["y" * 200] * 5), LIMIT)


def test_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "127.0.0.1:9000")
    with pytest.raises(Invalid, match=r"endpoint '127.0.0.1:9000'"):
        open_storage("s3://bucket/prefix")


def test_without_the_extra_the_error_names_it() -> None:
    program = """
import sys
sys.modules["s3fs"] = None
from ckptd.errors import Invalid
from ckptd.storage import open_storage
try:
    open_storage("s3://bucket/prefix")
except Invalid as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "pip install 'ckptd[s3]'" in done.stdout, done.stderr


def test_files_need_no_s3_library(tmp_path: Path) -> None:
    program = f"""
import sys
from ckptd.storage import init_root
init_root({str(tmp_path)!r})
print(sorted(set(sys.modules) & {{"s3fs", "botocore", "aiobotocore", "aiohttp"}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def _in_child(storage: S3Storage, answers: Any) -> None:
    try:
        put(storage, f"{RUN}/log/child", b"child")
        gc.collect()  # must not reach what belongs to the parent
        answers.put((storage.get(KEY, LIMIT), read_all(storage, KEY)))
    except CkptdError as error:
        answers.put(error)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_storage_inherited_by_fork_makes_its_own_connections(storage: S3Storage) -> None:
    put(storage, KEY, b"parent")
    read_all(storage, KEY)
    context = multiprocessing.get_context("fork")
    for _ in range(5):  # the parent's connections work on beside the child's
        answers: Any = context.Queue()
        child = context.Process(target=_in_child, args=(storage, answers))
        child.start()
        assert answers.get(timeout=60) == (b"parent", b"parent")
        assert storage.get(KEY, LIMIT) == b"parent"
        child.join(60)
        assert child.exitcode == 0
        assert storage.size(KEY) == 6
        storage.delete(f"{RUN}/log/child")
    assert storage.list(f"{RUN}/log") == [KEY.rpartition("/")[2]]


def test_many_storages_opened_at_once_are_made_in_turn(storage: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    # Made all at once, their clients keep the one event loop from the requests that are on their way.
    settings = type(storage.settings)
    making: list[int] = []
    together_most = [0]
    barrier = threading.Barrier(32)
    real_filesystem, real_session = settings.new_filesystem, S3FileSystem.set_session

    def new_filesystem(of: Any) -> Any:
        making.append(1)
        together_most[0] = max(together_most[0], len(making))
        return real_filesystem(of)

    async def set_session(fs: Any, *arguments: Any, **options: Any) -> Any:
        first = fs._s3 is None
        made = await real_session(fs, *arguments, **options)
        if first:
            making.pop()
        return made

    monkeypatch.setattr(settings, "new_filesystem", new_filesystem)
    monkeypatch.setattr(S3FileSystem, "set_session", set_session)

    def open_one(_: int) -> str:
        barrier.wait(60)
        return S3Storage(storage.url).check_root()

    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(open_one, range(32))) == {storage.check_root()}
    assert (together_most, making) == ([1], [])


def test_waiting_for_others_that_open_storages_has_a_deadline(storage: S3Storage) -> None:
    hasty = S3Storage(f"{storage.url}?deadline_seconds=0.2")
    with one_at_a_time(storage.settings), pytest.raises(Unavailable, match="was not opened"):
        hasty.check_root()
    assert S3Storage(storage.url).check_root() == storage.check_root()


def test_one_storage_from_many_threads_makes_one_connection(storage: S3Storage) -> None:
    made = []
    real = type(storage.settings).new_client
    barrier = threading.Barrier(8)
    fresh = S3Storage(storage.url)

    def counted(settings: Any) -> Any:
        made.append(os.getpid())
        return real(settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(storage.settings), "new_client", counted)

        def connect(_: int) -> tuple[object, object]:
            barrier.wait(60)
            here = fresh._connected()
            return here, here.client

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(connect, range(8)))) == 1
    assert len(made) == 1
    assert together([partial(put, storage, f"{RUN}/log/{i}", b"x") for i in range(8)]) == [None] * 8
