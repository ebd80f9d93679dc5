"""Which keys a storage takes: relative, plain, and never leading out of the root."""

from __future__ import annotations

from ckptd.errors import Invalid

MAX_KEY_BYTES = 1024
MAX_PART_BYTES = 255  # of one folder or file name; what common file systems allow


def check_key(key: str) -> tuple[str, ...]:
    """The parts of a key or folder. `Invalid` for one that is absolute, empty, too long, or holds '..'."""
    reason = _reason_against(key)
    if reason:
        raise Invalid(
            f"storage key {str(key)[:160]!r} is not allowed: {reason}",
            do="Use keys made by ckptd.layout.",
            field="key",
        )
    return tuple(key.split("/"))


def _reason_against(key: object) -> str:
    if not isinstance(key, str):
        return f"expected a str, found {type(key).__name__}"
    try:
        length = len(key.encode())
    except UnicodeEncodeError:
        return "it is not UTF-8 text"
    if length > MAX_KEY_BYTES:
        return f"expected at most {MAX_KEY_BYTES} bytes, found {length}"
    if "\0" in key:
        return "it holds a NUL"
    for part in key.split("/"):
        if part in ("", ".", ".."):
            return f"expected plain names between the slashes, found {part!r}"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"expected names of at most {MAX_PART_BYTES} bytes, found {len(part.encode())}"
    return ""
