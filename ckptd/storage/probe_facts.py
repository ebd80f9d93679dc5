"""What can be told about a storage without trying: its kind, its file system and mount, its space.

Mount options decide about things that no probe sees on a good day: a `soft` NFS mount gives up a write that the
server may still carry out, a FUSE mount of an object store says "done" before the object is uploaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from ckptd.storage.base import Storage
from ckptd.storage.findings import Finding, ok, unfit, warn

MOUNTS = Path("/proc/self/mountinfo")
LOCAL_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs"}
OBJECT_STORES = re.compile(
    r"s3fs|goofys|rclone|mount-?s3|mountpoint-s3|gcsfuse|geesefs|blobfuse2?|catfs|riofs|ossfs|obsfs"
)
LOW_BYTES = 1 << 30
CLOCK_SECONDS = 5.0


@runtime_checkable
class ProbeFacts(Protocol):
    """A storage may tell what it knows about itself; every fact is optional, every value is text for a person.

    `kind`, `publish` (how an object is created exclusively), `server`, `file_system`, `mount_options`,
    `mounted_from`, `free_bytes`, `total_bytes`, `clock_offset_seconds` (the storage's clock minus this machine's),
    `checksums` ("refused" if a wrong one is; else it is shown with a warning), `conditional_parts` (what becomes of
    an object of parts whose key is taken).
    """

    def facts(self) -> dict[str, str]:
        """`ckptd doctor` calls it once. What has to be tried is tried below `probe/`, and nothing of it stays."""


def facts_of(storage: Storage) -> dict[str, str]:
    """What the storage tells about itself, see `ProbeFacts`; for a folder, what the system tells about its mount."""
    root = local_root(storage.url)
    if isinstance(storage, ProbeFacts):
        return storage.facts()
    if root is not None:
        lock = storage.url.endswith("?publish=lock")
        return {**local_facts(root), "publish": "rename under a lock" if lock else "hard link"}
    return {"kind": storage.url.partition("://")[0]}


def local_root(url: str) -> Path | None:
    """The folder of a file:// URL, None for any other."""
    return Path(url.removeprefix("file://").partition("?")[0]) if url.startswith("file://") else None


def local_facts(root: Path, mounts: str | None = None) -> dict[str, str]:
    """Facts of a folder; `mounts` is the text of /proc/self/mountinfo."""
    facts = {"kind": "folder"}
    space = os.statvfs(root)
    if space.f_blocks:
        facts["free_bytes"] = str(space.f_bavail * space.f_frsize)
        facts["total_bytes"] = str(space.f_blocks * space.f_frsize)
    text = MOUNTS.read_text() if mounts is None else mounts
    return facts | _mount_of(os.path.realpath(root), text)


def _mount_of(path: str, mounts: str) -> dict[str, str]:
    """The mount that `path` lies on: the one with the longest mount point, and of equal ones the last."""
    best, found = -1, dict[str, str]()
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 6 or len(right) < 3:
            continue
        point, kind, source = _plain(left[4]), right[0], _plain(right[1])
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= best:
            options = dict.fromkeys([*left[5].split(","), *right[2].split(",")])
            best = len(point)
            found = {
                "file_system": kind,
                "mount_options": ",".join(options),
                "mounted_from": source,
                "mount_point": point,
            }
    return found


def _plain(text: str) -> str:
    """The kernel writes a space in a path as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def judge_facts(facts: Mapping[str, str]) -> Iterator[Finding]:
    """Findings from facts alone."""
    if "publish" in facts:
        yield _judge_publish(facts["publish"], facts)
    yield _judge_medium(facts)
    if "free_bytes" in facts:
        yield _judge_space(int(facts["free_bytes"]), int(facts.get("total_bytes", 0)))
    if "checksums" in facts:
        refused = facts["checksums"] == "refused"
        text = f"wrong checksums are {facts['checksums']}"
        yield ok("checksums", text) if refused else warn("checksums", f"{text}; damage shows when it is read")
    if "conditional_parts" in facts:  # told only: such keys hold a nonce, so that no two writers share one
        yield ok("conditional parts", f"an object of parts whose key is taken is {facts['conditional_parts']}")


def _judge_publish(publish: str, facts: Mapping[str, str]) -> Finding:
    if publish == "rename under a lock":
        network = facts.get("file_system", "") not in LOCAL_DISKS
        text = "rename under a lock: one writing host at a time"
        return (
            warn("tier", text, "Use hard links (no ?publish=lock) if the mount has them.")
            if network
            else ok("tier", text)
        )
    return ok("tier", publish)


def _judge_medium(facts: Mapping[str, str]) -> Finding:
    """The verdict on kind, file system and mount options."""
    kind, options = facts.get("file_system", ""), set(facts.get("mount_options", "").split(","))
    source = facts.get("mounted_from", "")
    name = "medium"
    if facts.get("kind") == "memory":
        return warn(
            name, "the memory of this process: not durable, and no other process sees it", "For trying out only."
        )
    if not kind:
        return ok(name, " at ".join(filter(None, (facts.get("kind", "unknown"), facts.get("server", "")))))
    text = f"{kind} from {source}"
    if kind in ("tmpfs", "ramfs"):
        return warn(name, f"{kind}: works, but nothing of it survives a reboot", "For trying out only.")
    if kind.startswith("fuse") and OBJECT_STORES.search(f"{kind} {source}"):
        return unfit(
            name,
            f"{text}: a folder view of an object store; it reports a write as done before it is stored",
            "Use the object store itself, s3://bucket/prefix.",
        )
    if kind in ("nfs", "nfs4"):
        return _judge_nfs(text, options)
    if kind in ("cifs", "smb3"):
        return _judge_cifs(text, options)
    if kind == "overlay":
        return warn(
            name, f"{text}: the writable layer of a container goes with the container", "Mount a volume there."
        )
    if options & {"nobarrier", "barrier=0"}:
        return warn(name, f"{text} without barriers: a power cut loses what was synced", "Mount it with barriers.")
    if kind == "fuse.sshfs":
        return warn(
            name,
            f"{text}: other hosts see new names up to 20 s late, unless it is mounted with "
            "dir_cache=no,entry_timeout=0,attr_timeout=0,negative_timeout=0 (options that cannot be seen from here)",
            "Mount it so, a second time as well, and run `ckptd doctor` with --other for the second mount.",
        )
    if kind in LOCAL_DISKS or kind == "fuse.mergerfs":
        return ok(name, text)
    return warn(name, f"{text}: nothing is known about it but what is measured here", "Ask how it keeps synced data.")


def _judge_nfs(text: str, options: set[str]) -> Finding:
    if options & {"soft", "softerr"}:
        return unfit(
            "medium",
            f"{text}, mounted soft: a write that was given up may still land later, unsynced data is dropped",
            "Mount it `hard`.",
        )
    return warn(
        "medium",
        f"{text}: whether the server exports it `sync` cannot be seen from here",
        "Look at `exportfs -v` on the server: with `async` an acknowledged checkpoint may be lost.",
    )


def _judge_cifs(text: str, options: set[str]) -> Finding:
    if "nostrictsync" in options:
        return unfit(
            "medium", f"{text}, mounted nostrictsync: fsync does not reach the server", "Mount it `strictsync`."
        )
    return warn("medium", f"{text}: not measured; without hard links use ?publish=lock, with one writing host")


def _judge_space(free: int, total: int) -> Finding:
    share = f" of {total / 2**30:.1f}" if total else ""
    text = f"{free / 2**30:.1f}{share} GiB free"
    if free < LOW_BYTES or free * 20 < total:
        return warn("space", text, "Make room before a save fails.")
    return ok("space", text)


def judge_clock(offset_seconds: float | None) -> Finding:
    """No rule reads a clock, so a wrong one is told and no more."""
    if offset_seconds is None:
        return ok("clock", "the storage tells no time; no rule needs one")
    if abs(offset_seconds) > CLOCK_SECONDS:
        return warn(
            "clock", f"{offset_seconds:+.1f} s from this machine's", "Set the clocks: times shown will not fit."
        )
    return ok("clock", f"within {CLOCK_SECONDS:.0f} s of this machine's ({offset_seconds:+.2f} s)")
