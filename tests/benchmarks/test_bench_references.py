"""The plain writes and reads that everything is compared with do what they say; and the crowd gets its answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.crowd import BARE, BEGUN, PARKED
from benchmarks.crowd_load import _status
from benchmarks.jobs import Job
from benchmarks.references import (
    BLOCK_BYTES,
    VECTORS,
    bytes_of,
    cool,
    files_in,
    read_into,
    remove,
    warm_buffer,
    write,
    write_direct,
)
from benchmarks.running import run_job
from benchmarks.states import make, packed


def test_files_are_read_in_order_into_many_pieces(tmp_path: Path) -> None:
    data = os.urandom(30_000)
    for number, start in enumerate((0, 10_000)):
        write(tmp_path / f"{number}", memoryview(data)[start : start + (10_000, 20_000)[number]])
    pieces = [memoryview(bytearray(size)) for size in (1, 0, 17, *[9] * (VECTORS + 50), 20_000)]
    read_into(files_in(tmp_path), pieces)
    found = b"".join(pieces)
    assert found[: len(data)] == data[: len(found)]


def test_what_does_not_fit_goes_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "file", memoryview(b"0123456789"))
    target = bytearray(4)
    read_into([tmp_path / "file"], [memoryview(target)])
    assert target == b"0123"


def test_a_direct_write_is_whole_pages_and_never_over_another_file(tmp_path: Path) -> None:
    buffer = warm_buffer(10_000)
    write_direct(tmp_path / "file", bytes_of(buffer))
    assert (tmp_path / "file").read_bytes() == b"\1" * 3 * BLOCK_BYTES
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", bytes_of(buffer))
    cool(tmp_path)
    remove(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_state_is_packed_tensor_by_tensor() -> None:
    state = make(0.001, 7)
    buffer = warm_buffer(state.size_bytes)
    packed(state, buffer)
    expected = b"".join(tensor.numpy().tobytes() for tensor in state.tensors().values())
    assert bytes(bytes_of(buffer)[: state.size_bytes]) == expected


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 200),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}", 0),
        (b"HTTP/1.1 204 No Content\r\nserver: x\r\n\r\n", 204),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 1", 0),
        (b"", 0),
    ],
)
def test_only_a_whole_answer_counts(said: bytes, status: int) -> None:
    assert _status(said) == status


def test_a_small_crowd_gets_its_answers(tmp_path: Path) -> None:
    part = run_job(Job(group="crowd", count=20), tmp_path, lambda doing: None)
    (table,) = part.tables
    assert [row.name for row in table.rows] == [BARE, BEGUN, PARKED]
    assert all(row.samples["errors"] == (0.0,) for row in table.rows)
    assert {figure.at for figure in part.figures} == {"20 ranks"}
