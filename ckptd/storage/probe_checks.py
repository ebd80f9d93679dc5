"""The probes that need no race: creating, absence, errors, what others see and when, large objects, ranges, speed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ckptd import layout
from ckptd.errors import AlreadyExists, Corrupt, Invalid, NotFound
from ckptd.storage.base import Reader
from ckptd.storage.findings import Bench, Finding, not_raised, ok, unfit, warn
from ckptd.storage.probe_facts import local_root

MIB = 1 << 20
LOOKS = 20
LATENCY_PUTS = 40
SMALL = b"a small object of the probe"
POISON = 0xA5


def absence(bench: Bench) -> Finding:
    """What does not exist is NotFound and nothing else; an absent folder lists empty."""
    key = layout.probe_key(bench.folder, "never-written")
    problems = [
        f"{name}: {problem}"
        for name, call in (
            ("get", lambda: bench.other.get(key, 100)),
            ("size", lambda: bench.other.size(key)),
            ("open", lambda: bench.other.reader(key).close()),
            ("sync", lambda: bench.other.sync(key)),
        )
        if (problem := not_raised(NotFound, call))
    ]
    listed = bench.other.list(layout.probe_key(bench.folder, "no-such-folder"))
    if listed:
        problems.append(f"list of an absent folder: expected nothing, found {listed[:3]}")
    return (
        unfit("absence", "; ".join(problems)) if problems else ok("absence", "is NotFound; an absent folder is empty")
    )


def second_create(bench: Bench) -> Finding:
    """A taken key is refused to the instance that created it and to another one, and keeps its bytes."""
    key = bench.put("taken", SMALL)
    other = SMALL.upper()
    for who, storage in (("the creator", bench.one), ("another instance", bench.other)):
        if problem := not_raised(AlreadyExists, lambda storage=storage: storage.put(key, [other], len(other))):  # type: ignore[misc]
            return unfit("second create", f"a taken key was created again by {who}: {problem}")
        if bench.one.get(key, 100) != SMALL or bench.other.get(key, 100) != SMALL:
            return unfit(
                "second create", f"the second create by {who} was refused and changed the object all the same"
            )
    empty = not_raised(AlreadyExists, lambda: bench.other.put(key, [], 0))
    if empty or bench.other.get(key, 100) != SMALL:
        return unfit("second create", f"an empty object replaced a taken key: {empty or 'it was refused, and done'}")
    return ok("second create", "is refused, also to another instance; the first bytes stay")


class _Interrupted(Exception):
    """Raised by the probe's own chunks."""


def whole_or_nothing(bench: Bench) -> Finding:
    """A put that fails on the way leaves nothing, and the key stays free."""

    def breaking() -> Iterator[bytes]:
        yield SMALL
        raise _Interrupted

    name = "whole or nothing"
    for what, size in (("too short", len(SMALL) + 1), ("too long", len(SMALL) - 1)):
        key = bench.key(f"body-{what.replace(' ', '-')}")
        if problem := not_raised(Invalid, lambda key=key, size=size: bench.one.put(key, [SMALL], size)):  # type: ignore[misc]
            return unfit(name, f"a body that is {what}: {problem}")
        if problem := _absent(bench, key):
            return unfit(name, f"a body that is {what} left something: {problem}")
    key = bench.key("body-broken")
    try:
        bench.one.put(key, breaking(), 2 * len(SMALL))
    except _Interrupted:
        if problem := _absent(bench, key):
            return unfit(name, f"a body that broke off left something: {problem}")
    else:
        return unfit(name, "a body that broke off was stored")
    left = [listed for listed in bench.names(bench.other) if listed.startswith("body-")]
    if left:
        return unfit(name, f"failed puts are listed: {left}")
    bench.one.put(key, [SMALL], len(SMALL))
    return ok(name, "a wrong size or a broken body leaves nothing, and the key stays free")


def errors(bench: Bench) -> Finding:
    """An error is not read as absence: reading an object that is there in a wrong way is never NotFound."""
    key = bench.put("errors", SMALL)
    with bench.other.reader(key) as reader:
        problems = [
            f"{what}: {problem}"
            for what, problem in (
                ("longer than allowed", not_raised(Corrupt, lambda: bench.other.get(key, 3))),
                (
                    "past the end",
                    not_raised(Corrupt, lambda: reader.read_into(len(SMALL) - 2, memoryview(bytearray(9)))),
                ),
                ("a key that leads out", not_raised(Invalid, lambda: bench.other.get("../x", 3))),
            )
            if problem
        ]
    return unfit("errors", "; ".join(problems)) if problems else ok("errors", "are told apart from absence")


def seen_by_others(bench: Bench) -> Iterator[Finding]:
    """Another instance, which has just been told that a name is absent, sees it right after it was written: by
    reading and by listing."""
    unread, unlisted = list[str](), list[str]()
    for number in range(LOOKS):
        name = f"look-{number:04d}"
        key = bench.key(name)
        _absent(bench, key)  # a cache may remember that
        bench.names(bench.other)
        data = f"{name} ".encode() * 8
        bench.one.put(key, [data], len(data))
        if name not in bench.names(bench.other):
            unlisted.append(f"{name} was not listed")
        if problem := _unread(bench, key, data):
            unread.append(problem)
    yield _told("read-after-write", unread, "another instance reads at once what was written")
    yield _told("list-after-write", unlisted, "another instance lists it at once")


def deletes_seen(bench: Bench) -> Finding:
    """Whether another instance sees at once that an object is gone. Told, as no rule needs it."""
    late = list[str]()
    for number in range(LOOKS):
        name = f"gone-{number:04d}"
        key = bench.put(name, SMALL)
        bench.other.get(key, 100)
        bench.one.delete(key)
        if problem := _absent(bench, key):
            late.append(problem)
        elif name in bench.names(bench.other):
            late.append(f"{name} was still listed")
    if late:
        return warn("read-after-delete", f"{len(late)} of {LOOKS}: {late[0]}", "Deleted objects show for a while.")
    return ok("read-after-delete", "a deleted object is gone for another instance at once")


def _absent(bench: Bench, key: str) -> str:
    return not_raised(NotFound, lambda: bench.other.get(key, 100))


def _unread(bench: Bench, key: str, data: bytes) -> str:
    """What was wrong when another instance read `key`; empty if nothing was."""
    try:
        found, size = bench.other.get(key, 2 * len(data)), bench.other.size(key)
    except NotFound:
        return f"{key} was read as absent after it was written"
    if found != data or size != len(data):
        return f"{key}: expected {len(data)} bytes, found {len(found)} (size {size}), or other ones"
    return ""


def _told(name: str, problems: list[str], good: str) -> Finding:
    if problems:
        return unfit(
            name,
            f"{len(problems)} of {LOOKS}: {problems[0]}",
            "Switch off caches of names and listings on this mount or store, or use another.",
        )
    return ok(name, f"{good} ({LOOKS} of {LOOKS})")


class _Pattern:
    """A large object made of pieces of 1 MiB, each one different, and never in memory as a whole."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._block = os.urandom(MIB - 8)

    def piece(self, number: int) -> bytes:
        return (number.to_bytes(8, "big") + self._block)[: self.size - number * MIB]

    def pieces(self) -> Iterator[bytes]:
        for number in range(-(-self.size // MIB)):
            yield self.piece(number)

    def at(self, offset: int, length: int) -> bytes:
        first = offset // MIB
        text = b"".join(self.piece(number) for number in range(first, (offset + max(length, 1) - 1) // MIB + 1))
        return text[offset - first * MIB :][:length]


def large_object(bench: Bench, size: int) -> Iterator[Finding]:
    """An object of many chunks comes back as it was, by pieces and by ranges, also from several threads."""
    pattern, key = _Pattern(size), bench.key("large")
    began = time.monotonic()
    bench.one.put(key, pattern.pieces(), size)
    put_seconds = time.monotonic() - began
    with bench.other.reader(key, fresh=True) as reader:
        if reader.size != size or bench.other.size(key) != size:
            yield unfit("large object", f"{size} bytes were written, its size is told as {reader.size}")
            return
        began = time.monotonic()
        wrong = [
            number
            for number, piece in enumerate(pattern.pieces())
            if _read(reader, number * MIB, len(piece)) != piece
        ]
        get_seconds = time.monotonic() - began
        if wrong:
            yield unfit("large object", f"{len(wrong)} of its pieces of 1 MiB differ, the first at {wrong[0]} MiB")
        else:
            speeds = f"written at {size / MIB / put_seconds:.0f}, read at {size / MIB / get_seconds:.0f} MiB/s"
            yield ok("large object", f"{size / MIB:.1f} MiB came back as they were; {speeds}")
        yield _ranges(reader, pattern)


def _ranges(reader: Reader, pattern: _Pattern) -> Finding:
    size = pattern.size
    wanted = [
        (0, 1),
        (size - 1, 1),
        (size, 0),
        (7, 4096),
        (size // 2 - 5000, 10_000),
        (MIB - 3, 6),
        (size - 4097, 4097),
    ]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: _read(reader, *part), wanted * 2))
    wrong = [part for part, data in zip(wanted * 2, found, strict=True) if data != pattern.at(*part)]
    if wrong:
        return unfit(
            "ranges",
            f"{len(wrong)} of {len(found)} ranges read wrong bytes, first (offset, length) = {wrong[0]}",
        )
    if problem := not_raised(Corrupt, lambda: _read(reader, size - 1, 2)):
        return unfit("ranges", f"a range past the end: {problem}")
    return ok("ranges", f"{len(found)} ranges from 4 threads; past the end is an error")


def _read(reader: Reader, offset: int, length: int) -> bytes:
    """A range, into a buffer that shows what was not filled."""
    buffer = bytearray([POISON]) * length
    reader.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def latency(bench: Bench) -> Finding:
    """How long a small durable put takes. Told, not judged."""
    seconds = []
    for number in range(LATENCY_PUTS):
        began = time.monotonic()
        bench.put(f"latency-{number:04d}", SMALL * 10)
        seconds.append(time.monotonic() - began)
    p50, p95 = statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=20)[-1] * 1e3
    return ok("latency", f"a durable put of {len(SMALL) * 10} bytes: p50 {p50:.1f} ms, p95 {p95:.1f} ms")


def clock_offset(bench: Bench) -> float | None:
    """The clock of the drive minus this machine's, by the time of a file just written; None if there is no file."""
    root = local_root(bench.one.url)
    before = time.time()
    key = bench.put("clock", SMALL)
    after = time.time()
    if root is None:
        return None
    written = os.stat(root / key).st_mtime
    return min(written - before, 0.0) + max(written - after, 0.0)
