"""Canonical bytes and the two digests ckptd uses.

sha256 chains the log and names manifests; it is what a person checks with `sha256sum`. Payload is digested
with xxh3-128, chunk by chunk, because it must keep up with memory: it detects damage, it is no signature.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import xxhash

PAYLOAD_DIGEST = "xxh3-128"
CHUNK_BYTES = 32 * 1024 * 1024
ZERO_SHA256 = "0" * 64


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def chunk_digest(*pieces: bytes | bytearray | memoryview) -> str:
    """The digest of one payload chunk, given in one piece or in several, as hex. Releases the GIL meanwhile."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def chunk_count(size: int, chunk_bytes: int) -> int:
    return -(-size // chunk_bytes)
