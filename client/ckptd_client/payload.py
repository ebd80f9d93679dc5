"""Payload objects: safetensors files, which any tool can open, digested while they are written and read.

A file is 8 bytes of header length, a JSON header padded with spaces so that data starts at a 4096-byte boundary,
and the tensors without gaps. Dtypes the format has no name for lie in it as plain bytes; the state
tree knows the true one. `chunks` reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ckptd.digests import CHUNK_BYTES, chunk_count, chunk_digest
from ckptd.errors import Corrupt, Invalid
from ckptd.manifest import ObjectRef
from ckptd.storage.base import Storage
from ckptd_client.dtypes import FILE_ITEM_BYTES, file_dtype, shape_of
from ckptd_client.snapshot import Captured, Entry

LENGTH_BYTES = 8
DATA_ALIGNMENT_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # what the public readers of the format accept
METADATA = "__metadata__"
_quoted = json.JSONEncoder(ensure_ascii=False).encode  # one call per name: json.dumps makes an encoder each time


def header_bytes(entries: Sequence[Entry]) -> bytes:
    """Everything in the file before its data. `Invalid` when there are more names than the format can hold."""
    pieces = [f'{{"{METADATA}":{{"format":"pt"}}']
    for name, dtype, shape, offset, nbytes in entries:
        known = file_dtype(dtype)
        lengths = ",".join(map(str, shape)) if known else nbytes
        pieces.append(
            f',{_quoted(name)}:{{"dtype":"{known or "U8"}","shape":[{lengths}],'
            f'"data_offsets":[{offset},{offset + nbytes}]}}'
        )
    text = "".join((*pieces, "}")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise Invalid(
            f"the header for {len(entries)} tensors takes {len(text)} bytes, the format allows {MAX_HEADER_BYTES}",
            do="Save fewer or larger tensors, or shorter names.",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


class PayloadFile:
    """The bytes of a file in order, as views of header and data. A full pass leaves its digests in `digests`;
    a storage that has to send again may pass once more. A pass may begin before the bytes are captured."""

    def __init__(self, captured: Captured, chunk_bytes: int, count: int | None = None) -> None:
        """`count`: only the first so many tensors."""
        entries = captured.entries[:count]
        end = entries[-1].offset + entries[-1].nbytes if entries else 0
        self.header = memoryview(header_bytes(entries))
        self.data, self._until = captured.region[:end], captured.until
        self.chunk_bytes = chunk_bytes
        self.size = self.header.nbytes + self.data.nbytes
        self.digests: list[str] = []

    def __iter__(self) -> Iterator[memoryview]:
        self.digests.clear()
        for start in range(0, self.size, self.chunk_bytes):
            pieces = list(self._pieces(start, min(start + self.chunk_bytes, self.size)))
            self.digests.append(chunk_digest(*pieces))
            yield from pieces

    def _pieces(self, start: int, end: int) -> Iterator[memoryview]:
        split = len(self.header)
        if start < split:
            yield self.header[start : min(end, split)]
        if end > split:
            self._until(end - split)
            yield self.data[max(start, split) - split : end - split]


def write(
    storage: Storage, key: str, captured: Captured, *, count: int | None = None, chunk_bytes: int = CHUNK_BYTES
) -> ObjectRef:
    """Write one payload object, of all that was captured or of the first `count` tensors, and say what its bytes are.
    Called by a writer, on its save thread; copies nothing.

    Errors are the storage's own. The caller releases `captured`.
    """
    file = PayloadFile(captured, chunk_bytes, count)
    storage.put(key, file, file.size)
    if len(file.digests) != chunk_count(file.size, chunk_bytes):
        raise Corrupt(f"the storage took only a part of the {file.size} bytes of {key}", object=key)
    return ObjectRef(key=key, size=file.size, chunk_bytes=chunk_bytes, chunks=tuple(file.digests))


def parse_header(file: memoryview, key: str, *, size: int | None = None) -> tuple[int, dict[str, tuple[int, int]]]:
    """Where data starts in `file`, and the span of each tensor in it. `Corrupt` unless the spans cover the data
    exactly, without holes or overlaps, and fit dtype and shape. `file` may be a beginning of `size` bytes."""
    start, header = _header(file, key)
    header.pop(METADATA, None)
    spans = {name: _span(entry, name, key) for name, entry in header.items()}
    covered, data_bytes = 0, (file.nbytes if size is None else size) - start
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != covered:
            _broken(key, f"tensor {name[:200]!r} starts at {begin}, expected {covered}")
        covered = end
    if covered != data_bytes:
        _broken(key, f"its tensors cover {covered} bytes of {data_bytes}")
    return start, spans


def _header(file: memoryview, key: str) -> tuple[int, dict[str, Any]]:
    if file.nbytes < LENGTH_BYTES:
        _broken(key, f"{file.nbytes} bytes are too few")
    length = int.from_bytes(file[:LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, file.nbytes - LENGTH_BYTES):
        _broken(key, f"a header of {length} bytes does not fit")
    start = LENGTH_BYTES + length
    try:
        header = json.loads(bytes(file[LENGTH_BYTES:start]).decode(), object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        _broken(key, f"its header is not JSON ({error})")
    if not isinstance(header, dict):
        _broken(key, "its header is not an object")
    return start, header


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in it twice")
    return found


def _span(entry: Any, name: str, key: str) -> tuple[int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        known = len(entry) == 3 and type(begin) is int and type(end) is int and type(dtype) is str
    except (TypeError, KeyError, ValueError):
        known = False
    if not known:
        _broken(key, f"tensor {name[:200]!r} is described in an unknown form")
    item_bytes = FILE_ITEM_BYTES.get(dtype)
    if item_bytes is None:
        _broken(key, f"tensor {name[:200]!r} has unknown dtype {dtype[:40]!r}")
    try:
        expected = math.prod(shape_of(shape)) * item_bytes
    except ValueError as error:
        _broken(key, f"tensor {name[:200]!r}: {error}")
    if not 0 <= begin <= end or end - begin != expected:
        _broken(key, f"tensor {name[:200]!r} takes {expected} bytes, its span is {begin}..{end}")
    return begin, end


def _broken(key: str, reason: str) -> NoReturn:
    raise Corrupt(f"{key} is not a sound safetensors file: {reason}", object=key)
