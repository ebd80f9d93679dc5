"""The host buffer: by value, packed, aligned, one save at a time."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ckptd.errors import Conflict, Invalid
from ckptd_client import packing, payload, snapshot
from ckptd_client.snapshot import Captured, HostSnapshot, lay_out
from ckptd_client.state import TensorSource, flatten

torch.set_num_threads(1)


def bytes_of(captured: Captured, name: str) -> bytes:
    (entry,) = [entry for entry in captured.entries if entry.name == name]
    return bytes(captured.data[entry.offset : entry.offset + entry.nbytes])


def test_the_copy_is_by_value() -> None:
    weight, array, blob = torch.arange(6.0), np.arange(3), bytearray(b"x" * 1000)
    expected = [weight.numpy().tobytes(), array.tobytes(), bytes(blob)]
    with HostSnapshot().capture([flatten([weight, array, blob], "s")]) as captured:
        weight.zero_()
        array[:] = 0
        blob[:] = b"y" * 2000
        assert [bytes_of(captured, f"s/{index}") for index in range(3)] == expected


def test_views_strides_conjugates_and_foreign_byte_order_are_stored_as_they_read() -> None:
    matrix = torch.arange(24.0).view(4, 6)
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    wide = torch.arange(8, dtype=torch.float64).to(torch.complex128).view(2, 4)
    swapped = np.arange(6, dtype=">i4").reshape(2, 3)
    state: dict[str, Any] = {
        "t": matrix.T,
        "column": matrix[:, 2],
        "conj": value.conj(),
        "neg": value.conj().imag,
        "expanded": torch.tensor([1.5]).expand(3),
        "bf16": matrix.to(torch.bfloat16).T,
        "f8": matrix.to(torch.float8_e4m3fn).T,
        "wide": wide.T,
        "swapped": swapped.T,
        "texts": np.array([["a", "bc"], ["def", ""]]).T,
    }
    with HostSnapshot().capture([flatten(state, "s")]) as captured:
        assert bytes_of(captured, "s/t") == matrix.numpy().T.tobytes()
        assert bytes_of(captured, "s/column") == matrix.numpy()[:, 2].tobytes()
        assert bytes_of(captured, "s/conj") == value.numpy().conj().tobytes()
        assert bytes_of(captured, "s/neg") == (-value.numpy().imag).tobytes()
        assert bytes_of(captured, "s/expanded") == np.full(3, 1.5, np.float32).tobytes()
        for name in ("bf16", "f8", "wide"):
            assert bytes_of(captured, f"s/{name}") == bytes(
                state[name].contiguous().reshape(-1).view(torch.uint8).numpy()
            )
        for name in ("swapped", "texts"):
            assert bytes_of(captured, f"s/{name}") == state[name].tobytes()


def test_padding_inside_a_record_never_carries_bytes_of_the_save_before() -> None:
    records = np.array([[(1, 2.0), (3, 4.0)]] * 2, dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True))
    snapshot = HostSnapshot()
    snapshot.capture([flatten(np.full(records.nbytes, 255, np.uint8), "s")]).release()
    with snapshot.capture([flatten(records.T, "s")]) as captured:
        back = np.frombuffer(captured.data, records.dtype).reshape(2, 2)
        assert back.tolist() == records.T.tolist()
        assert bytes(captured.data).count(255) == 0


def test_nan_payloads_survive_the_copy() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC12345, 0xFFFFFFFF - 2**32], dtype=torch.int64).to(torch.int32)
    noisy = bits.view(torch.float32).repeat(2, 1)
    with HostSnapshot().capture([flatten([noisy, noisy.T], "s")]) as captured:
        assert bytes_of(captured, "s/0") == bits.repeat(2, 1).numpy().tobytes()
        assert bytes_of(captured, "s/1") == bits.repeat(2, 1).numpy().T.tobytes()


KINDS = ["uint8", "bfloat16", "float32", "int64", "complex128"]
sources = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=12)


@given(sources)
def test_the_layout_has_no_gaps_and_keeps_alignment(shapes: list[tuple[str, int]]) -> None:
    tensors = [torch.zeros(count, dtype=getattr(torch, dtype)) for dtype, count in shapes]
    sources: dict[str, TensorSource] = flatten(tensors, "s").tensors
    entries = lay_out(sources)
    end = 0
    for entry in entries:
        assert entry.offset == end
        assert entry.offset % sources[entry.name].alignment == 0
        end += entry.nbytes
    assert {entry.name for entry in entries} == sources.keys()


def test_the_buffer_is_reused_and_grows_only_when_it_must() -> None:
    snapshot, page = HostSnapshot(), mmap.PAGESIZE
    assert snapshot.reserve([flatten(torch.ones(250), "s")]) == 1000
    place = snapshot._buffer.data_ptr()
    assert place % page == 0
    for size in (10, 250, page // 4):
        snapshot.capture([flatten(torch.ones(size), "s")]).release()
        assert (snapshot.capacity_bytes, snapshot._buffer.data_ptr()) == (page, place)
    captured = snapshot.capture([flatten(torch.ones(page // 4 + 1), "s")])
    assert (snapshot.capacity_bytes, len(captured.data)) == (2 * page, page + 4)


def test_one_save_at_a_time() -> None:
    snapshot, flat = HostSnapshot(), flatten(torch.ones(4), "s")
    first = snapshot.capture([flat])
    with pytest.raises(Conflict, match="belongs to the save before"):
        snapshot.capture([flat])
    with pytest.raises(Conflict):
        snapshot.reserve([flat])
    assert not snapshot.wait(0.0)
    assert bytes_of(first, "s") == np.ones(4, np.float32).tobytes()

    writer = threading.Thread(target=first.release)
    writer.start()
    assert snapshot.wait(60.0)
    writer.join()
    with pytest.raises(Conflict, match="released"):
        _ = first.data
    second = snapshot.capture([flat])
    first.release()  # a late second release must not take the buffer from the next save
    assert not snapshot.wait(0.0)
    second.release()


def test_the_captured_bytes_cannot_be_written_by_the_save() -> None:
    assert HostSnapshot().capture([flatten(torch.ones(4), "s")]).data.readonly


def test_a_failed_capture_frees_the_buffer() -> None:
    snapshot, flat = HostSnapshot(), flatten({"a": torch.ones(4)}, "s")
    with pytest.raises(Invalid, match="'s/a' is in two states"):
        snapshot.capture([flat, flat])
    snapshot.capture([flat]).release()


def test_several_states_and_none() -> None:
    snapshot = HostSnapshot()
    with snapshot.capture([]) as captured:
        assert (captured.entries, captured.data.nbytes) == ((), 0)
    flats = [flatten({"a": torch.ones(1)}, "shared"), flatten({"a": torch.zeros(0)}, "rank")]
    with snapshot.capture(flats) as captured:
        assert {entry.name: entry.nbytes for entry in captured.entries} == {"shared/a": 4, "rank/a": 0}


def test_capturing_needs_no_second_copy() -> None:
    # What torch allocates while it captures is asked of torch itself, so no other memory of the process counts.
    weight = torch.ones(4_000_000)
    flat = flatten({"w": weight, "t": weight.view(2000, 2000).T}, "s")
    snapshot = HostSnapshot()
    snapshot.reserve([flat])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        snapshot.capture([flat]).release()
    assert max((event.self_cpu_memory_usage for event in profile.key_averages()), default=0) < 1_000_000


# Filled while others read.


def test_bytes_are_given_out_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOVE_BYTES", 1 << 18)
    weight, seen = torch.arange(1 << 18, dtype=torch.float32), list[int]()
    captured = HostSnapshot().begin([flatten({"w": weight}, "s")])
    real = captured._arrived

    def arrived(end: int) -> None:
        real(end)
        captured.until(end)
        seen.append(end)
        assert bytes(captured.region[:end]) == weight.numpy().tobytes()[:end]

    monkeypatch.setattr(captured, "_arrived", arrived)
    captured.fill()
    assert seen == [*[at << 18 for at in range(1, 5)], 1 << 20, 1 << 20]
    assert bytes(captured.data) == weight.numpy().tobytes()


def test_who_needs_bytes_waits_for_them() -> None:
    weight, got = torch.arange(1000.0), list[bytes]()
    captured = HostSnapshot().begin([flatten({"w": weight}, "s")])
    reader = threading.Thread(target=lambda: got.append(bytes(captured.data)))
    reader.start()
    captured.fill()
    reader.join(60.0)
    assert got == [weight.numpy().tobytes()]


def test_a_copy_that_fails_or_hangs_is_told_to_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_, flat = HostSnapshot(), flatten({"w": torch.ones(4)}, "s")
    monkeypatch.setattr(snapshot, "FILL_SECONDS", 0.05)
    with snapshot_.begin([flat]) as captured, pytest.raises(Invalid, match=r"is not complete after"):
        _ = captured.data

    def fail(*args: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(snapshot, "pack", fail)
    with snapshot_.begin([flat]) as captured:
        with pytest.raises(RuntimeError):
            captured.fill()
        with pytest.raises(Invalid, match="the copy of the state failed: the device is gone"):
            captured.until(1)


def test_a_hundred_thousand_small_tensors_are_stored_as_they_are(tmp_path: Path) -> None:
    count = 100_000
    rows = torch.randn(count, 3)
    state = {f"layer{index}": row for index, row in enumerate(rows.unbind())}
    state["odd"] = torch.arange(5, dtype=torch.uint8)
    with HostSnapshot().capture([flatten(state, "s")]) as captured:
        assert len(captured.entries) == count + 1
        assert bytes(captured.data) == rows.numpy().tobytes() + bytes(range(5))
        header = payload.header_bytes(captured.entries)
        path = tmp_path / "file"
        path.write_bytes(header + captured.data)
    with safe_open(path, "pt") as file:  # by the public library, which checks that the tensors cover the data
        assert len(file.keys()) == count + 1
        assert torch.equal(file.get_tensor("s/layer77777"), rows[77777])
    assert json.loads(header[8:])["s/odd"] == {
        "dtype": "U8", "shape": [5], "data_offsets": [12 * count, 12 * count + 5],
    }  # fmt: skip


def test_a_forked_child_keeps_no_bytes_of_a_save() -> None:
    """As a data loader's worker would; in a process without threads, because only such a one may fork."""
    program = """
import os, torch
from ckptd_client.snapshot import HostSnapshot
from ckptd_client.state import flatten
captured = HostSnapshot().capture([flatten(torch.ones(1000, dtype=torch.uint8), "s")])
child = os.fork()
if child == 0:
    os._exit(any(captured.data))
assert os.waitpid(child, 0)[1] == 0, "the child sees the bytes"
assert all(captured.data)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Tensors on a GPU: what is asked of CUDA. There is none where the tests run, so its calls are recorded.


def test_the_buffer_is_pinned_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        calls: list[tuple[str, int]] = []

        def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
            self.calls.append(("register", size))
            return 0

        def cudaHostUnregister(self, place: int) -> int:
            self.calls.append(("unregister", 0))
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    host, page = HostSnapshot(), mmap.PAGESIZE
    for size in (page, 10, 3 * page):
        host.capture([flatten(torch.zeros(size, dtype=torch.uint8), "s")]).release()
    assert Runtime.calls == [("register", page), ("unregister", 0), ("register", 3 * page)]
