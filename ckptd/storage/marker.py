"""The marker of a storage root: the proof that the drive is there and that it is the same one.

Without it an unmounted drive reads as an empty folder, and "there is no checkpoint" would be a lie.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from ckptd import layout
from ckptd.digests import canonical_json
from ckptd.errors import Corrupt, Invalid, NotInitialised

MAX_MARKER_BYTES = 4096


def new_marker() -> bytes:
    """The bytes of a marker with a fresh uuid."""
    return canonical_json({"format": layout.FORMAT, "storage_uuid": str(uuid.uuid4())})


def parse_marker(data: bytes, url: str) -> str:
    """The storage uuid. `Invalid` for a format this version does not know, `Corrupt` for anything else."""
    try:
        value: Any = json.loads(data)
    except ValueError as error:
        raise _damaged(url, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(url, f"expected a JSON object, found {type(value).__name__}")
    found = value.get("format")
    if isinstance(found, bool) or not isinstance(found, int):
        raise _damaged(url, f"expected a number as format, found {found!r}")
    if found != layout.FORMAT:
        raise Invalid(
            f"{url} has storage format {found}; this version of ckptd knows format {layout.FORMAT}",
            do="Use the version of ckptd that wrote this storage, or a later one.",
            expected=layout.FORMAT,
            found=found,
        )
    storage_uuid = value.get("storage_uuid")
    if not isinstance(storage_uuid, str) or not storage_uuid:
        raise _damaged(url, f"expected a text as storage_uuid, found {storage_uuid!r}")
    return storage_uuid


def no_marker(url: str, finding: str = "") -> NotInitialised:
    """The error for a root without a marker. It names both reasons, as only a person can tell them apart."""
    return NotInitialised(
        f"{url} holds no {layout.ROOT_MARKER}{f' ({finding})' if finding else ''}: "
        "this is new storage, or a drive that is not mounted",
        do=f"If it is a drive, mount it. If it is new storage, run `ckptd init {url}`.",
        url=url,
    )


def other_storage(url: str, expected: str, found: str) -> NotInitialised:
    """The error for a root whose uuid changed while this process used it."""
    return NotInitialised(
        f"{url} is another storage than before: expected uuid {expected}, found {found}",
        do="Mount the storage this process was started on, or start the process anew.",
        url=url,
        expected=expected,
        found=found,
    )


def _damaged(url: str, reason: str) -> Corrupt:
    return Corrupt(
        f"the marker {layout.ROOT_MARKER} of {url} is damaged: {reason}",
        do=f"Restore {layout.ROOT_MARKER} from a backup of the storage; it is written once and never changes.",
        url=url,
    )
