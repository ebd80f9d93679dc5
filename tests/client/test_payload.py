"""Payload files: any tool opens them, every damaged bit is found, and nothing is copied on the way."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from ckptd import layout
from ckptd.digests import chunk_digest
from ckptd.errors import AlreadyExists, Corrupt, Invalid
from ckptd.manifest import ObjectRef
from ckptd.storage import open_storage
from ckptd.storage.base import Buffer, Storage
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryStorage
from ckptd_client import dtypes, payload
from ckptd_client.snapshot import Captured, Entry, HostSnapshot
from ckptd_client.state import Flat, flatten, unflatten
from tests.client.reading_back import read_back

torch.set_num_threads(1)
KEY = layout.payload_key("r", "g00000001-000000000007-a1", 0, "ab" * 8)


def capture(state: object) -> tuple[Flat, Captured]:
    flat = flatten(state, "shared")
    return flat, HostSnapshot().capture([flat])


def written(
    state: object, chunk_bytes: int = 1000, storage: Storage | None = None
) -> tuple[Storage, ObjectRef, JsonValue]:
    flat, captured = capture(state)
    storage = storage or MemoryStorage()
    return storage, payload.write(storage, KEY, captured, chunk_bytes=chunk_bytes), flat.tree


def file_bytes(storage: Storage, ref: ObjectRef) -> bytes:
    return storage.get(ref.key, ref.size)


def on_disk(state: object, folder: Path) -> Path:
    storage, ref, _ = written(state)
    path = folder / "payload.safetensors"
    path.write_bytes(file_bytes(storage, ref))
    return path


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(6 * dtype.itemsize, dtype=torch.uint8).remainder(2).view(dtype).view(2, 3)
        for name, dtype in dtypes.TORCH.items()
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("chunk_bytes", [1, 500, 4096, 5000, 10**6])
def test_state_to_file_to_state(chunk_bytes: int, store: Storage) -> None:
    state: dict[str, Any] = {
        "tensors": tensors_of_all_dtypes(),
        "arrays": [np.arange(3, dtype=">i4"), np.array("2024", "M8[Y]"), np.array(["ab", "c"]), np.zeros((0, 3))],
        "blob": b"x" * 300,
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "step": 3,
    }
    storage, ref, tree = written(state, chunk_bytes, store)
    back: Any = unflatten(tree, read_back(storage, ref))
    assert all(same_bits(back["tensors"][name], tensor) for name, tensor in state["tensors"].items())
    for found, expected in zip(back["arrays"], state["arrays"], strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    assert (back["blob"], back["scalar"], back["empty"].shape, back["step"]) == (b"x" * 300, 1.5, (0, 3), 3)


def test_through_a_drive(home: str) -> None:
    storage = open_storage(home)
    flat, captured = capture({"w": torch.arange(5000.0), "b": torch.ones(3, dtype=torch.bfloat16)})
    ref = payload.write(storage, KEY, captured, chunk_bytes=4096)
    back: Any = unflatten(flat.tree, read_back(storage, ref))
    assert torch.equal(back["w"], torch.arange(5000.0))
    assert safetensors.torch.load(storage.get(KEY, ref.size))["shared/w"].shape == (5000,)
    with pytest.raises(AlreadyExists):
        payload.write(storage, KEY, captured)


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 4100, 10**6])
def test_the_reference_describes_the_exact_file(chunk_bytes: int) -> None:
    storage, ref, _ = written({"w": torch.arange(300.0)}, chunk_bytes)
    data = file_bytes(storage, ref)
    assert len(data) == ref.size == 4096 + 1200
    assert ref.chunks == tuple(chunk_digest(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes))


def test_data_starts_at_a_page_and_every_tensor_is_aligned() -> None:
    for count in (0, 1, 40, 200):
        _, captured = capture([torch.ones(3, dtype=dtype) for dtype in (torch.uint8, torch.float64) * count])
        header = payload.header_bytes(captured.entries)
        assert len(header) % 4096 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8
    storage, ref, tree = written(tensors_of_all_dtypes())
    raw = read_back(storage, ref)
    back: Any = unflatten(tree, raw)
    for name, tensor in back.items():
        assert tensor.data_ptr() % tensor.itemsize == 0
        assert tensor.data_ptr() == raw[f"shared/{name}"].data_ptr()  # a view, no copy


def test_safetensors_reads_every_dtype(tmp_path: Path) -> None:
    tensors = tensors_of_all_dtypes()
    path = on_disk(tensors, tmp_path)
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == {f"shared/{name}" for name in tensors}
    known = {name for name in tensors if dtypes.file_dtype(name)}
    assert known >= {"float32", "bfloat16", "float8_e4m3fn", "complex64", "uint64", "bool"}
    for name, tensor in tensors.items():
        found = loaded[f"shared/{name}"]
        assert same_bits(found, tensor if name in known else tensor.reshape(-1).view(torch.uint8))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == loaded.keys()
        assert same_bits(file.get_tensor("shared/bfloat16"), tensors["bfloat16"])
        assert file.get_slice("shared/float32")[1:].shape == (1, 3)


def test_safetensors_reads_numpy_arrays(tmp_path: Path) -> None:
    names = ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8"]
    arrays = {name: np.ones((2, 3), name) for name in names}
    loaded = safetensors.numpy.load_file(on_disk({**arrays, ">f8": np.ones(2, ">f8")}, tmp_path))
    for name, array in arrays.items():
        assert (loaded[f"shared/{name}"].dtype, loaded[f"shared/{name}"].tobytes()) == (array.dtype, array.tobytes())
    assert loaded["shared/>f8"].tobytes() == np.ones(2, ">f8").tobytes()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"step": 1},
        {"empty": torch.empty(0)},
        {"a": torch.empty(0, 3), "b": torch.tensor(2.0), "c": torch.empty(3, 0, dtype=torch.int64)},
        {'quote"\\\n': torch.ones(1), "ünï": torch.ones(2), "__metadata__": torch.ones(3), "x" * 9000: torch.ones(4)},
    ],
)
def test_safetensors_reads_odd_files(state: dict[str, Any], tmp_path: Path) -> None:
    path = on_disk(state, tmp_path)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    loaded = safetensors.torch.load_file(path)
    assert sorted(tuple(t.shape) for t in loaded.values()) == sorted(tuple(t.shape) for t in tensors)
    with safetensors.safe_open(path, "pt") as file:
        assert len(list(file.keys())) == len(tensors)
    start, spans = payload.parse_header(memoryview(path.read_bytes()), "key")
    assert start % 4096 == 0
    assert set(spans) == set(loaded)


def test_a_file_of_the_public_library_can_be_read() -> None:
    tensors = {"a": torch.arange(5, dtype=torch.int16), "b": torch.tensor(1.5), "c": torch.zeros(0, 2)}
    data = safetensors.torch.save(tensors, {"any": "thing"})
    storage = MemoryStorage()
    storage.put(KEY, [data], len(data))
    ref = ObjectRef(key=KEY, size=len(data), chunk_bytes=10**6, chunks=(chunk_digest(data),))
    raw = read_back(storage, ref)
    assert {name: tensor.numel() for name, tensor in raw.items()} == {"a": 10, "b": 4, "c": 0}
    assert torch.equal(raw["a"].view(torch.int16), tensors["a"])


DAMAGE_STATE = {"w": torch.arange(600.0), "b": torch.ones(7, dtype=torch.uint8), "e": torch.empty(0)}


def read_altered(data: bytes, ref: ObjectRef) -> None:
    storage = MemoryStorage()
    storage.put(ref.key, [data], len(data))
    read_back(storage, ref)


def test_one_flipped_bit_anywhere_is_found() -> None:
    storage, ref, _ = written(DAMAGE_STATE, chunk_bytes=512)
    data = file_bytes(storage, ref)
    assert len(ref.chunks) == 13
    for at in [*range(16), *range(16, len(data), 7)]:  # header, padding, every tensor and chunk; all bits in turn
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(Corrupt) as caught:
            read_altered(bytes(damaged), ref)
        assert (caught.value.fields["object"], caught.value.fields["chunk"]) == (KEY, at // 512)


@settings(deadline=None)
@given(st.data())
def test_any_other_bytes_are_found(draw: st.DataObject) -> None:
    storage, ref, _ = written(DAMAGE_STATE, chunk_bytes=512)
    data = file_bytes(storage, ref)
    start = draw.draw(st.integers(0, len(data) - 1))
    other = draw.draw(st.binary(min_size=1, max_size=50))
    altered = data[:start] + other + data[start + len(other) :]
    if altered == data:
        read_altered(altered, ref)
    else:
        with pytest.raises(Corrupt):
            read_altered(altered, ref)


def test_cut_extended_and_missing_files_are_found() -> None:
    storage, ref, _ = written(DAMAGE_STATE)
    data = file_bytes(storage, ref)
    for altered in (data[:-1], data[:4096], data[:7], b"", data + b"\0", data + data):
        with pytest.raises(Corrupt) as caught:
            read_altered(altered, ref)
        assert caught.value.fields["observed"] == f"{len(altered)} bytes"
    with pytest.raises(Corrupt) as caught:
        read_back(MemoryStorage(), ref)
    assert caught.value.fields["observed"] == "missing"


def test_swapped_chunks_are_found() -> None:
    storage, ref, _ = written({"w": torch.arange(2048.0)}, chunk_bytes=4096)
    data = file_bytes(storage, ref)
    with pytest.raises(Corrupt) as caught:
        read_altered(data[:4096] + data[8192:] + data[4096:8192], ref)
    assert caught.value.fields["chunk"] == 1


def file_with(header: object, data_bytes: int, *, text: bytes | None = None) -> memoryview:
    encoded = json.dumps(header).encode() if text is None else text
    return memoryview(len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes))


def entry(begin: Any, end: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


UNSOUND: list[tuple[memoryview, str]] = [
    (memoryview(b""), "0 bytes are too few"),
    (memoryview(bytes(7)), "7 bytes are too few"),
    (memoryview(bytes(8)), "not JSON"),
    (memoryview((100).to_bytes(8, "little") + bytes(99)), "a header of 100 bytes does not fit"),
    (memoryview(b"\xff" * 8 + bytes(99)), "does not fit"),
    (file_with(0, 0, text=b"{"), "not JSON"),
    (file_with(0, 0, text=b"\xff\xfe"), "not JSON"),
    (file_with(0, 0, text=b"[" * 200_000), "not JSON"),
    (file_with(0, 0, text=b"9" * 10_000), "not JSON"),
    (file_with(0, 0, text=b'{"a":1,"a":1}'), "a name is in it twice"),
    (file_with([], 0), "not an object"),
    (file_with({"a": 3}, 0), "described in an unknown form"),
    (file_with({"a": {"dtype": "U8", "shape": [1]}}, 1), "described in an unknown form"),
    (file_with({"a": {**entry(0, 1), "more": 1}}, 1), "described in an unknown form"),
    (file_with({"a": entry(0, 1, dtype=3)}, 1), "described in an unknown form"),
    (file_with({"a": entry(0.0, 1.0)}, 1), "described in an unknown form"),
    (file_with({"a": entry(0, 1, dtype="F4")}, 1), "unknown dtype 'F4'"),
    (file_with({"a": entry(0, 1, shape=[-1])}, 1), "not a shape"),
    (file_with({"a": entry(0, 1, shape=3)}, 1), "not a shape"),
    (file_with({"a": entry(0, 1, shape=[2**62, 2**62])}, 1), "its span is 0..1"),
    (file_with({"a": entry(0, 6, dtype="F32", shape=[2])}, 6), "takes 8 bytes, its span is 0..6"),
    (file_with({"a": entry(-1, 0)}, 0), "span is -1..0"),
    (file_with({"a": entry(2, 1, shape=[0])}, 2), "span is 2..1"),
    (file_with({"a": entry(0, 4)}, 3), "cover 4 bytes of 3"),
    (file_with({"a": entry(0, 4)}, 5), "cover 4 bytes of 5"),
    (file_with({}, 1), "cover 0 bytes of 1"),
    (file_with({"a": entry(1, 4)}, 4), "starts at 1, expected 0"),
    (file_with({"a": entry(0, 2), "b": entry(3, 4)}, 4), "starts at 3, expected 2"),
    (file_with({"a": entry(0, 3), "b": entry(2, 4)}, 4), "starts at 2, expected 3"),
    (file_with({"a": entry(0, 4), "b": entry(0, 4)}, 4), "starts at 0, expected 4"),
]


@pytest.mark.parametrize(("file", "reason"), UNSOUND, ids=[reason for _, reason in UNSOUND])
def test_an_unsound_header_is_corrupt(file: memoryview, reason: str) -> None:
    with pytest.raises(Corrupt, match="key is not a sound safetensors file") as caught:
        payload.parse_header(file, "key")
    assert reason in caught.value.message


@given(st.binary(max_size=60), st.binary(max_size=20))
def test_any_header_is_read_or_corrupt(text: bytes, data: bytes) -> None:
    file = memoryview(len(text).to_bytes(8, "little") + text + data)
    spans = {"": (0, 0)}
    try:
        spans = payload.parse_header(file, "key")[1]
    except Corrupt as error:
        assert error.message.startswith("key is not")  # noqa: PT017
    assert all(begin <= end for begin, end in spans.values())


def test_more_names_than_the_format_can_hold_are_refused() -> None:
    entries = [Entry("x" * 1_000_000 + str(index), "uint8", (0,), 0, 0) for index in range(101)]
    with pytest.raises(Invalid, match="the header for 101 tensors takes"):
        payload.header_bytes(entries)


class Sending(MemoryStorage):
    """Looks at what it is sent."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes = passes
        self.sent: list[Buffer] = []

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        for _ in range(self.passes):
            self.sent = list(chunks)
        if self.passes:
            super().put(key, self.sent, size)


def test_a_storage_may_pass_over_the_bytes_again() -> None:
    storage = Sending(passes=3)
    flat, captured = capture({"w": torch.arange(999.0)})
    ref = payload.write(storage, KEY, captured, chunk_bytes=1000)
    back: Any = unflatten(flat.tree, read_back(storage, ref))
    assert torch.equal(back["w"], torch.arange(999.0))


def test_a_storage_that_did_not_look_at_all_bytes_is_found() -> None:
    _, captured = capture({"w": torch.arange(999.0)})
    with pytest.raises(Corrupt, match="only a part of the"):
        payload.write(Sending(passes=0), KEY, captured)


def test_pieces_are_views_of_the_snapshot_of_at_most_a_chunk() -> None:
    storage = Sending(passes=1)
    _, captured = capture({"w": torch.arange(9999.0)})
    payload.write(storage, KEY, captured, chunk_bytes=5000)
    base = captured.data.obj
    assert all(isinstance(piece, memoryview) and piece.nbytes <= 5000 for piece in storage.sent)
    assert [piece.obj is base for piece in storage.sent if isinstance(piece, memoryview)] == [False] + [True] * 9


def test_writing_and_reading_take_no_memory_beside_the_two_buffers(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.initialise()
    _, captured = capture({"w": torch.ones(4 * 2**20)})
    tracemalloc.start()
    try:
        ref = payload.write(storage, KEY, captured, chunk_bytes=2**20)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.reset_peak()
        raw = read_back(storage, ref)
        assert tracemalloc.get_traced_memory()[1] < 2**20  # the buffer itself is torch's, which is not traced
    finally:
        tracemalloc.stop()
    assert raw["shared/w"].untyped_storage().nbytes() == 16 * 2**20
    assert ref.size == os.path.getsize(tmp_path / KEY)
