"""What every storage must do, as tests. A backend's test module subclasses `StorageContract`:

    class TestMine(StorageContract):
        @pytest.fixture
        def storage(self) -> Storage: ...

Races are scheduled with barriers and events; nothing sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ckptd.errors import AlreadyExists, CkptdError, Corrupt, Invalid, NotFound
from ckptd.storage.base import Buffer, Storage

RUN = "runs/contract"
KEY = f"{RUN}/log/0000000000000001.json"
LIMIT = 1 << 20
DEADLINE_SECONDS = 60.0


def put(storage: Storage, key: str, data: bytes) -> None:
    storage.put(key, [data], len(data))


def together(calls: list[Callable[[], object]]) -> list[BaseException | None]:
    """Run all calls at once, each in a thread that starts at a barrier; what each one raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> BaseException | None:
        barrier.wait(DEADLINE_SECONDS)
        try:
            call()
        except CkptdError as error:
            return error
        return None

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class Halfway:
    """Chunks that stop in the middle until `resume` is set; `arrived` is set when the writer waits there."""

    def __init__(self, first: bytes, second: bytes) -> None:
        self.first, self.second = first, second
        self.arrived, self.resume = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Buffer]:
        yield self.first
        self.arrived.set()
        assert self.resume.wait(DEADLINE_SECONDS), "nobody resumed the writer"
        yield self.second


class StorageContract:
    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError("a backend's tests give an empty, initialised storage here")

    # Create and read

    def test_what_was_put_is_read_back(self, storage: Storage) -> None:
        put(storage, KEY, b"hello")
        assert storage.get(KEY, LIMIT) == b"hello"
        assert storage.size(KEY) == 5
        assert storage.list(f"{RUN}/log") == ["0000000000000001.json"]

    def test_empty_object(self, storage: Storage) -> None:
        storage.put(KEY, [], 0)
        assert storage.get(KEY, 0) == b""
        assert storage.size(KEY) == 0
        with storage.reader(KEY) as reader:
            reader.read_into(0, memoryview(bytearray()))

    def test_chunks_of_any_buffer_type(self, storage: Storage) -> None:
        wide = memoryview(bytearray(b"ABCDEFGH")).cast("I")
        chunks: list[Buffer] = [b"ab", bytearray(b"cd"), memoryview(b"-ef-")[1:3], b"", wide]
        storage.put(KEY, iter(chunks), 14)
        assert storage.get(KEY, LIMIT) == b"abcdefABCDEFGH"

    def test_large_object_in_many_chunks(self, storage: Storage) -> None:
        chunk = bytes(range(256)) * 4096
        storage.put(KEY, (chunk for _ in range(5)), 5 * len(chunk))
        assert storage.get(KEY, 5 * len(chunk)) == chunk * 5

    def test_T2_an_existing_key_is_never_overwritten(self, storage: Storage) -> None:
        put(storage, KEY, b"first")
        with pytest.raises(AlreadyExists) as caught:
            put(storage, KEY, b"second")
        assert caught.value.fields["key"] == KEY
        assert storage.get(KEY, LIMIT) == b"first"

    @pytest.mark.parametrize("size", [0, 2, 4, 1000])
    def test_wrong_size_leaves_nothing(self, storage: Storage, size: int) -> None:
        with pytest.raises(Invalid) as caught:
            storage.put(KEY, [b"a", b"bc"], size)
        assert caught.value.fields["expected"] == size
        self.assert_absent(storage, KEY)

    def test_T1_a_failing_chunk_iterator_leaves_nothing(self, storage: Storage) -> None:
        # An OSError, as reading the source may raise: it is the caller's and must not look like ours.
        def chunks() -> Iterator[bytes]:
            yield b"half"
            raise FileExistsError("the source is gone")

        with pytest.raises(FileExistsError, match="the source is gone"):
            storage.put(KEY, chunks(), 8)
        self.assert_absent(storage, KEY)
        put(storage, KEY, b"whole")
        assert storage.get(KEY, LIMIT) == b"whole"

    def test_get_refuses_a_longer_object(self, storage: Storage) -> None:
        put(storage, KEY, b"12345")
        assert storage.get(KEY, 5) == b"12345"
        with pytest.raises(Corrupt) as caught:
            storage.get(KEY, 4)
        assert (caught.value.fields["expected"], caught.value.fields["found"]) == (4, 5)

    # Ranged reads

    @pytest.mark.parametrize("fresh", [False, True])
    def test_ranges(self, storage: Storage, fresh: bool) -> None:
        data = bytes(range(256)) * 16
        put(storage, KEY, data)
        with storage.reader(KEY, fresh=fresh) as reader:
            assert reader.size == len(data)
            for offset, length in ((0, 1), (0, len(data)), (100, 300), (len(data) - 1, 1), (len(data), 0)):
                buffer = bytearray(length)
                reader.read_into(offset, memoryview(buffer))
                assert buffer == data[offset : offset + length]

    @pytest.mark.parametrize(("offset", "length"), [(0, 6), (4, 2), (5, 1), (99, 1)])
    def test_reading_past_the_end_is_corrupt(self, storage: Storage, offset: int, length: int) -> None:
        put(storage, KEY, b"12345")
        with storage.reader(KEY) as reader, pytest.raises(Corrupt) as caught:
            reader.read_into(offset, memoryview(bytearray(length)))
        assert caught.value.fields["key"] == KEY
        assert caught.value.fields["expected"] == offset + length

    def test_wrong_reads_are_invalid(self, storage: Storage) -> None:
        put(storage, KEY, b"12345")
        reader = storage.reader(KEY)
        with pytest.raises(Invalid):
            reader.read_into(-1, memoryview(bytearray(1)))
        with pytest.raises(Invalid):
            reader.read_into(0, memoryview(b"x"))
        reader.close()
        reader.close()
        with pytest.raises(Invalid):
            reader.read_into(0, memoryview(bytearray(1)))

    def test_one_reader_from_four_threads(self, storage: Storage) -> None:
        block = 65536
        put(storage, KEY, b"".join(bytes([i]) * block for i in range(16)))
        with storage.reader(KEY) as reader:

            def read(thread: int) -> None:
                for i in range(thread, 16, 4):
                    buffer = bytearray(block)
                    reader.read_into(i * block, memoryview(buffer))
                    assert buffer == bytes([i]) * block

            assert together([partial(read, thread) for thread in range(4)]) == [None] * 4

    # Names

    def test_absent(self, storage: Storage) -> None:
        self.assert_absent(storage, KEY)
        assert storage.list(RUN) == []
        put(storage, KEY, b"x")
        self.assert_absent(storage, f"{RUN}/log/0000000000000002.json")
        self.assert_absent(storage, f"{RUN}/log")  # a folder is no object

    def test_many_names_are_listed_sorted(self, storage: Storage) -> None:
        names = [f"{number:016d}.json" for number in range(300)]
        for name in reversed(names):
            put(storage, f"{RUN}/log/{name}", b"x")
        assert storage.list(f"{RUN}/log") == names

    def test_a_listing_shows_direct_names_only(self, storage: Storage) -> None:
        for key in ("runs/b/log/1", "runs/a/log/1", "runs/a/log/2", "runs/a/data/x/y"):
            put(storage, key, b"x")
        assert storage.list("runs") == ["a", "b"]
        assert storage.list("runs/a/log") == ["1", "2"]
        assert storage.list("runs/a/data") == ["x"]
        assert storage.list("runs/a/lo") == []

    def test_delete(self, storage: Storage) -> None:
        other = f"{RUN}/log/0000000000000002.json"
        put(storage, KEY, b"x")
        put(storage, other, b"y")
        storage.delete(KEY)
        storage.delete(KEY)
        storage.delete("runs/never/log/was")
        self.assert_absent(storage, KEY)
        assert storage.list(f"{RUN}/log") == [other.rpartition("/")[2]]
        assert storage.get(other, LIMIT) == b"y"
        put(storage, KEY, b"again")
        assert storage.get(KEY, LIMIT) == b"again"

    def test_sync(self, storage: Storage) -> None:
        put(storage, KEY, b"x")
        storage.sync(KEY)
        with pytest.raises(NotFound):
            storage.sync(f"{RUN}/log/0000000000000002.json")

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/etc/passwd", "..", "../x", "a/../b", "a/./b", ".", "a//b", "a/", "a\0b", "\ud800",
         "x" * 256, "/".join(["y" * 200] * 6)],
    )  # fmt: skip
    def test_T5_keys_that_are_not_plain_are_refused(self, storage: Storage, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: put(storage, key, b"x"),
            lambda: storage.get(key, LIMIT),
            lambda: storage.reader(key),
            lambda: storage.size(key),
            lambda: storage.list(key),
            lambda: storage.sync(key),
            lambda: storage.delete(key),
        ]
        for call in calls:
            with pytest.raises(Invalid):
                call()

    def test_the_root_has_one_uuid(self, storage: Storage) -> None:
        assert storage.check_root() == storage.check_root() != ""

    # Races

    def test_T2_sixteen_racers_have_one_winner(self, storage: Storage) -> None:
        for round_ in range(8):
            key = f"{RUN}/log/{round_:016d}.json"
            ends = together([partial(put, storage, key, b"%d" % i) for i in range(16)])
            winners = [i for i, end in enumerate(ends) if end is None]
            assert len(winners) == 1, ends
            assert all(end is None or type(end) is AlreadyExists for end in ends), ends
            assert storage.get(key, LIMIT) == b"%d" % winners[0]

    def test_T1_no_part_of_an_object_is_seen_while_it_is_written(self, storage: Storage) -> None:
        chunks = Halfway(b"a" * 100_000, b"b" * 100_000)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(storage.put, KEY, chunks, 200_000)
            try:
                assert chunks.arrived.wait(DEADLINE_SECONDS)
                self.assert_absent(storage, KEY)
            finally:
                chunks.resume.set()
            writing.result(DEADLINE_SECONDS)
        assert storage.get(KEY, LIMIT) == b"a" * 100_000 + b"b" * 100_000

    def test_a_slow_writer_loses_against_one_that_finished_first(self, storage: Storage) -> None:
        chunks = Halfway(b"slow", b"slow")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(storage.put, KEY, chunks, 8)
            try:
                assert chunks.arrived.wait(DEADLINE_SECONDS)
                put(storage, KEY, b"quick")
            finally:
                chunks.resume.set()
            assert isinstance(writing.exception(DEADLINE_SECONDS), AlreadyExists)
        assert storage.get(KEY, LIMIT) == b"quick"

    def test_an_open_reader_outlives_nothing_it_did_not_read(self, storage: Storage) -> None:
        # Deleting an object under a reader gives its bytes or an error, never other bytes.
        put(storage, KEY, b"12345")
        with storage.reader(KEY) as reader:
            storage.delete(KEY)
            buffer = bytearray(5)
            try:
                reader.read_into(0, memoryview(buffer))
            except CkptdError:
                return
            assert buffer == b"12345"

    @staticmethod
    def assert_absent(storage: Storage, key: str) -> None:
        folder, _, name = key.rpartition("/")
        if storage.list(key) == []:
            assert name not in storage.list(folder)
        calls: list[Callable[[], object]] = [
            lambda: storage.get(key, LIMIT),
            lambda: storage.reader(key),
            lambda: storage.size(key),
            lambda: storage.sync(key),
        ]
        for call in calls:
            with pytest.raises(NotFound):
                call()
