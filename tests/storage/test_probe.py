"""The probe: fit storages are called fit, and each broken one is found out by the right finding."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckptd import layout
from ckptd.digests import sha256_hex
from ckptd.errors import AlreadyExists, CkptdError, Corrupt, Invalid, NotFound, NotInitialised, Unavailable, Unfit
from ckptd.storage import Storage, init_root, open_storage
from ckptd.storage.base import Buffer, Reader
from ckptd.storage.findings import Bench, Finding, Verdict
from ckptd.storage.memory import MemoryReader, MemoryStorage
from ckptd.storage.probe import Report, probe, quick_probe, refuse_unfit
from ckptd.storage.probe_facts import facts_of, judge_clock, judge_facts, local_facts
from ckptd.storage.probe_race import Outcome, Tally, Try, attempt, body, race_processes, race_threads, run_racer
from ckptd.testing.faulty import FaultyStorage

LARGE = 2 * 1024 * 1024 + 12_345


class Through:
    """A storage that passes every call on; the broken ones below change one method."""

    def __init__(self, inner: MemoryStorage) -> None:
        self.inner, self.url = inner, "broken://store"

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        self.inner.put(key, chunks, size)

    def get(self, key: str, max_bytes: int) -> bytes:
        return self.inner.get(key, max_bytes)

    def reader(self, key: str, *, fresh: bool = False) -> Reader:
        return self.inner.reader(key, fresh=fresh)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def list(self, folder: str) -> list[str]:
        return self.inner.list(folder)

    def sync(self, key: str) -> None:
        self.inner.sync(key)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def check_root(self) -> str:
        return self.inner.check_root()


def objects(storage: MemoryStorage) -> set[str]:
    return set(storage._objects)


def probed(kind: Callable[[MemoryStorage], Storage], inner: MemoryStorage | None = None) -> Report:
    """The report on a broken storage, each instance of which is a `kind` around one memory."""
    inner = inner or MemoryStorage()
    return probe("broken://store", racers=4, rounds=5, large_bytes=LARGE, open_one=lambda: kind(inner))


def verdicts(report: Report) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in report.findings}


def names_unfit(report: Report) -> set[str]:
    return {finding.name for finding in report.unfit}


# Fit ones.


@pytest.mark.parametrize("publish", ["", "?publish=lock"])
def test_a_folder_is_fit(tmp_path: Path, publish: str) -> None:
    url = f"file://{tmp_path}/root{publish}"
    uuid = init_root(url)
    told: list[str] = []
    report = probe(url, racers=4, rounds=3, large_bytes=LARGE, tell=told.append)
    assert (report.unfit, report.interrupted, report.uuid) == ([], None, uuid)
    assert report.tier == ("rename under a lock" if publish else "hard link")
    assert {"second create", "race of threads", "race of processes", "ranges", "clock"} <= set(verdicts(report))
    assert "race of threads" in told
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert set(left) <= {"root/ckptd-root.json", "root/ckptd.lock"}


def test_memory_is_fit_with_a_warning_and_nothing_is_left() -> None:
    storage = MemoryStorage()
    storage.put("probe/of/others", [b"x"], 1)
    report = probe(storage.url, racers=4, rounds=3, large_bytes=LARGE)
    assert report.unfit == []
    assert verdicts(report)["medium"] == "warn"
    assert "race of processes" not in verdicts(report)
    assert objects(storage) == {layout.ROOT_MARKER, "probe/of/others"}


def test_two_mounts_of_one_folder_are_probed_together(tmp_path: Path) -> None:
    init_root(f"file://{tmp_path}/root")
    (tmp_path / "mount").symlink_to(tmp_path / "root")
    here, there = f"file://{tmp_path}/root", f"file://{tmp_path}/mount"
    report = probe(here, racers=2, rounds=2, large_bytes=LARGE, other=there)
    assert (report.unfit, verdicts(report)["race of processes"]) == ([], "ok")


def test_another_storage_is_not_taken_for_another_mount() -> None:
    here, there = MemoryStorage(), MemoryStorage()
    report = probe(here.url, racers=2, rounds=2, large_bytes=LARGE, other=there.url)
    assert names_unfit(report) == {"marker"}
    assert (objects(here), objects(there)) == ({layout.ROOT_MARKER}, {layout.ROOT_MARKER})


def test_keep_leaves_the_keys() -> None:
    storage = MemoryStorage()
    report = probe(storage.url, racers=2, rounds=2, large_bytes=LARGE, keep=True)
    assert "left there" in verdicts(report)
    assert any(key.endswith("/race-0001") for key in objects(storage))


def test_a_root_without_its_marker_is_not_probed(tmp_path: Path) -> None:
    with pytest.raises(NotInitialised):
        probe(f"file://{tmp_path}")
    assert list(tmp_path.iterdir()) == []


# Broken ones.


class Overwrites(Through):
    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        try:
            self.inner.put(key, chunks := list(chunks), size)
        except AlreadyExists:
            self.inner.delete(key)
            self.inner.put(key, chunks, size)


def test_T2_a_storage_that_overwrites_is_unfit() -> None:
    report = probed(Overwrites)
    assert {"second create", "race of threads"} <= names_unfit(report)
    assert "created again by the creator" in report.unfit[0].detail


class OverwritesAndSaysNo(Through):
    """Refuses, as it must, after it has overwritten."""

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        try:
            self.inner.put(key, [data], size)
        except AlreadyExists:
            self.inner._objects[key] = data
            raise


def test_an_overwrite_that_is_denied_is_found() -> None:
    assert {"second create"} <= names_unfit(probed(OverwritesAndSaysNo))


class EmptyOverwrites(Through):
    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        if size == 0 and key in self.inner._objects:
            self.inner._objects[key] = b""
            return
        self.inner.put(key, chunks, size)


def test_an_empty_object_that_overwrites_is_found() -> None:
    report = probed(EmptyOverwrites)
    assert names_unfit(report) == {"second create"}
    assert "empty" in report.unfit[0].detail


class ListsLate(Through):
    """Each instance lists a folder as it was at its first look."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self._remembered: dict[str, list[str]] = {}

    def list(self, folder: str) -> list[str]:
        return self._remembered.setdefault(folder, self.inner.list(folder))


def test_a_storage_whose_listing_lags_is_unfit() -> None:
    assert names_unfit(probed(ListsLate)) == {"list-after-write"}


class ReadsStale(Through):
    """Each instance remembers that a key was absent."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__(inner)
        self._absent: set[str] = set()

    def get(self, key: str, max_bytes: int) -> bytes:
        try:
            if key not in self._absent:
                return self.inner.get(key, max_bytes)
        except NotFound:
            self._absent.add(key)
            raise
        raise NotFound(f"{key} does not exist")


def test_a_storage_that_reads_stale_is_unfit() -> None:
    assert names_unfit(probed(ReadsStale)) == {"read-after-write"}


class ShortReader:
    def __init__(self, inner: MemoryReader) -> None:
        self._inner, self.size = inner, inner.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(offset, buffer[: max(len(buffer) - 1, 1)])

    def paged(self) -> bool:
        return self._inner.paged()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> ShortReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReadsShort(Through):
    def reader(self, key: str, *, fresh: bool = False) -> Reader:
        return ShortReader(self.inner.reader(key, fresh=fresh))


def test_a_storage_that_returns_short_reads_is_unfit() -> None:
    assert {"large object", "ranges"} <= names_unfit(probed(ReadsShort))


class NotFoundForErrors(Through):
    def get(self, key: str, max_bytes: int) -> bytes:
        try:
            return self.inner.get(key, max_bytes)
        except CkptdError as error:
            raise NotFound(f"{key} does not exist") from error


def test_T6_a_storage_that_answers_absent_for_errors_is_unfit() -> None:
    report = probed(NotFoundForErrors)
    assert names_unfit(report) == {"errors"}
    assert "expected Corrupt, found NotFound" in report.unfit[0].detail


class KeepsHalf(Through):
    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.inner.put(key, [data], len(data))
        if len(data) != size:
            raise Invalid("expected another size")


def test_T1_a_storage_that_keeps_a_refused_body_is_unfit() -> None:
    report = probed(KeepsHalf)
    assert names_unfit(report) == {"whole or nothing"}
    assert "left something" in report.unfit[0].detail


class DeletesLate(Through):
    def delete(self, key: str) -> None:
        pass


def test_a_delete_that_is_not_seen_is_a_warning() -> None:
    report = probed(DeletesLate)
    assert (names_unfit(report), verdicts(report)["read-after-delete"]) == (set(), "warn")


# Permissions, and a storage that does not answer.


def denied(key: str = "") -> Unavailable:
    return Unavailable(f"permission denied {key}", errno="EACCES", do="Check the permissions.")


class ReadOnly(Through):
    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        raise denied(key)


class WriteOnly(Through):
    def get(self, key: str, max_bytes: int) -> bytes:
        raise denied(key)


class NoListing(Through):
    def list(self, folder: str) -> list[str]:
        raise denied(folder)


class NoDeletes(Through):
    def delete(self, key: str) -> None:
        raise denied(key)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ReadOnly, {"put": "unfit", "get": "ok", "list": "ok", "the rest": "warn"}),
        (WriteOnly, {"put": "ok", "get": "unfit", "list": "ok", "delete": "ok", "the rest": "warn"}),
        (NoListing, {"put": "ok", "get": "ok", "list": "unfit", "delete": "ok", "the rest": "warn"}),
        (NoDeletes, {"put": "ok", "get": "ok", "list": "ok", "delete": "warn", "clean up": "warn"}),
    ],
)
def test_each_permission_has_a_verdict(
    kind: Callable[[MemoryStorage], Storage], expected: dict[str, Verdict]
) -> None:
    found = verdicts(probed(kind))
    assert {name: found.get(name) for name in expected} == expected
    assert ("race of threads" in found) == ("the rest" not in expected)
    assert ("clean up" in found) == (kind is NoDeletes)


def test_a_storage_that_stops_answering_interrupts_the_probe_and_is_not_called_unfit() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.fail_before("put", "body-broken", times=None)
    report = probe(faulty.url, racers=2, rounds=2, large_bytes=LARGE, open_one=lambda: faulty)
    assert isinstance(report.interrupted, Unavailable)
    assert report.unfit == []
    assert "race of threads" not in verdicts(report)
    assert objects_of(faulty) == {layout.ROOT_MARKER}
    faulty.assert_all_fired()


def objects_of(faulty: FaultyStorage) -> set[str]:
    assert isinstance(faulty.inner, MemoryStorage)
    return objects(faulty.inner)


def test_what_cannot_be_deleted_is_told() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.fail_before("delete", "taken")
    report = probe(faulty.url, racers=2, rounds=2, large_bytes=LARGE, open_one=lambda: faulty)
    assert verdicts(report)["clean up"] == "warn"
    faulty.assert_all_fired()


# The race.


def test_a_lost_answer_and_an_open_outcome_are_counted_and_harmless() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.fail_after("put", "race-0001", times=None)
    bench = Bench(lambda: faulty, "f0")
    finding = race_threads(bench, racers=1, rounds=3)
    assert finding.verdict == "warn"
    assert "1 writes with an open outcome" in finding.detail
    faulty.assert_all_fired()


class CheckThenWrite(Through):
    """Asks whether the key is free, then writes. Two writers both get their answer before either writes."""

    asked = threading.Barrier(2)

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        free = key not in self.inner._objects
        self.asked.wait()
        if not free:
            raise AlreadyExists(f"{key} exists")
        self.inner._objects[key] = b"".join(bytes(chunk) for chunk in chunks)


def test_T2_check_then_write_has_two_winners() -> None:
    memory = MemoryStorage()
    finding = race_threads(Bench(lambda: CheckThenWrite(memory), "f0"), racers=2, rounds=1)
    assert finding.verdict == "unfit"
    assert "2 of 2 writers" in finding.detail


class Race:
    """One round told by hand. Writers and their bodies are "a" and "b"; "" is nothing there."""

    def __init__(self) -> None:
        self.memory = MemoryStorage()
        self.bench = Bench(lambda: self.memory, "f0")
        self.key = self.bench.key("race")
        self.tally = Tally(self.bench)
        self.bodies = {"a": body(self.key, 0), "b": body(self.key, 1)}

    def store(self, letter: str) -> None:
        self.memory.delete(self.key)
        if letter:
            self.memory.put(self.key, [self.bodies[letter]], len(self.bodies[letter]))

    def tried(self, letter: str, outcome: Outcome, saw: str | None) -> Try:
        digest = sha256_hex(self.bodies[saw]) if saw else saw
        return Try(sha256_hex(self.bodies[letter]), outcome, digest, "NotFound: x" if outcome == "error" else "", 0.0)

    def finding(
        self, a: tuple[Outcome, str | None], b: tuple[Outcome, str | None], *, stays: str, later: str
    ) -> Finding:
        self.store(stays)
        self.tally.add(self.key, [self.tried("a", *a), self.tried("b", *b)])
        self.store(later)
        self.tally.check_again()
        return self.tally.finding("race", "2 writers")


@pytest.mark.parametrize(
    ("a", "b", "stays", "later", "verdict", "detail"),
    [
        (("won", "a"), ("refused", "a"), "a", "a", "ok", "one winner each"),
        (("won", "a"), ("refused", ""), "a", "a", "ok", "1 losers could not read"),
        (("won", None), ("refused", None), "a", "a", "ok", "one winner each"),
        (("refused", "a"), ("refused", "a"), "a", "a", "ok", "1 winners were told that the key is taken"),
        (("open", "a"), ("refused", "a"), "a", "a", "warn", "1 writes with an open outcome"),
        (("open", ""), ("open", ""), "", "", "warn", "2 writes with an open outcome"),
        (("won", "a"), ("error", "a"), "a", "a", "unfit", "expected AlreadyExists"),
        (("won", "a"), ("won", "a"), "a", "a", "unfit", "2 of 2 writers"),
        (("won", "a"), ("refused", "b"), "b", "b", "unfit", "2 different objects"),
        (("won", ""), ("refused", "a"), "a", "a", "unfit", "could not read what it had just written"),
        (("won", "a"), ("refused", "a"), "", "", "unfit", "the winner's object is not there"),
        (("won", None), ("refused", "b"), "b", "b", "unfit", "the winner's bytes are not what stayed"),
        (("refused", ""), ("refused", ""), "", "", "unfit", "every writer was refused"),
        (("won", "a"), ("refused", "a"), "a", "b", "unfit", "changed after its race"),
        (("won", "a"), ("refused", "a"), "a", "", "unfit", "was gone after its race"),
    ],
)
def test_a_round_is_judged(
    a: tuple[Outcome, str | None],
    b: tuple[Outcome, str | None],
    stays: str,
    later: str,
    verdict: Verdict,
    detail: str,
) -> None:
    finding = Race().finding(a, b, stays=stays, later=later)
    assert (finding.verdict, detail in finding.detail) == (verdict, True), finding


def test_bytes_that_nobody_wrote_are_found() -> None:
    race = Race()
    race.bodies["c"] = b"other"
    finding = race.finding(("refused", None), ("refused", None), stays="c", later="c")
    assert "no writer wrote" in finding.detail


def test_a_racing_process_answers_line_by_line(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/root"
    init_root(url)
    key = layout.probe_key("f0", "race")
    orders = [{"url": url, "racer": 3}, {"key": key, "at": 0.0}, {"key": key, "at": 0.0}]
    said: list[str] = []
    run_racer(iter(json.dumps(order) + "\n" for order in orders), said.append)
    assert said[0] == "ready\n"
    assert [json.loads(line)["outcome"] for line in said[1:]] == ["won", "refused"]
    assert open_storage(url).get(key, 10_000) == body(key, 3)
    with pytest.raises(Invalid):
        run_racer(iter(()), said.append)


def test_processes_that_cannot_open_the_storage_are_unavailable(tmp_path: Path) -> None:
    bench = Bench(MemoryStorage, "f0")
    with pytest.raises(Unavailable, match="a racing process ended"):
        race_processes(bench, [f"file://{tmp_path}/gone"] * 2, rounds=1)


def test_an_attempt_tells_what_it_could_not_read() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.fail_before("get", "one")
    faulty.fail_before("get", "two", error=Corrupt("damaged"))
    one, two = (attempt(faulty, layout.probe_key("f0", name), 0) for name in ("one", "two"))
    assert (one.outcome, one.saw) == ("won", None)
    assert (two.outcome, two.error) == ("error", "Corrupt: damaged")
    faulty.assert_all_fired()


# Facts.

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 22 0:30 / /mnt rw - tmpfs tmpfs rw,size=8192k
32 31 0:31 / /mnt/with\\040space rw,nosuid shared:1 - nfs4 server:/export rw,vers=4.2,hard
33 31 0:32 / /mnt/s rw - xfs /dev/vdb rw
34 31 0:33 / /mnt/s rw - fuse.sshfs host:/src rw,user_id=0
a line that is cut
"""


@pytest.mark.parametrize(
    ("folder", "kind", "source", "option"),
    [
        ("/x/y", "ext4", "/dev/vda", "discard"),
        ("/mnt/other", "tmpfs", "tmpfs", "size=8192k"),
        ("/mnt/with space/run", "nfs4", "server:/export", "vers=4.2"),
        ("/mnt/s/a", "fuse.sshfs", "host:/src", "user_id=0"),
        ("/mnt/so", "tmpfs", "tmpfs", "rw"),
    ],
)
def test_the_mount_of_a_folder(
    folder: str, kind: str, source: str, option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.path.realpath", lambda path: folder)
    facts = local_facts(tmp_path, MOUNTS)
    assert (facts["file_system"], facts["mounted_from"]) == (kind, source)
    assert option in facts["mount_options"].split(",")
    assert int(facts["total_bytes"]) >= int(facts["free_bytes"]) > 0


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    facts = local_facts(tmp_path)
    assert facts["file_system"]
    assert str(tmp_path).startswith(facts["mount_point"].rstrip("/"))


@pytest.mark.parametrize(
    ("kind", "source", "options", "verdict", "detail"),
    [
        ("ext4", "/dev/vda", "rw,relatime", "ok", "ext4"),
        ("ext4", "/dev/vda", "rw,nobarrier", "warn", "without barriers"),
        ("tmpfs", "tmpfs", "rw", "warn", "nothing of it survives"),
        ("overlay", "overlay", "rw", "warn", "container"),
        ("nfs4", "server:/export", "rw,hard", "warn", "exports it `sync`"),
        ("nfs", "server:/export", "rw,soft,timeo=30", "unfit", "mounted soft"),
        ("nfs4", "server:/export", "rw,softerr", "unfit", "mounted soft"),
        ("cifs", "//server/share", "rw,nostrictsync", "unfit", "nostrictsync"),
        ("cifs", "//server/share", "rw,strictsync", "warn", "not measured"),
        ("fuse.sshfs", "host:/src", "rw", "warn", "up to 20 s late"),
        ("fuse.mergerfs", "a:b", "rw", "ok", "mergerfs"),
        ("fuse.s3fs", "bucket", "rw", "unfit", "object store"),
        ("fuse.goofys", "bucket", "rw", "unfit", "object store"),
        ("fuse.rclone", "remote:", "rw", "unfit", "object store"),
        ("fuse", "mountpoint-s3", "rw", "unfit", "object store"),
        ("fuse.mount-s3", "bucket", "rw", "unfit", "object store"),
        ("fuse.gcsfuse", "bucket", "rw", "unfit", "object store"),
        ("beegfs", "b", "rw", "warn", "nothing is known"),
    ],
)
def test_a_file_system_has_a_verdict(kind: str, source: str, options: str, verdict: Verdict, detail: str) -> None:
    facts = {"kind": "folder", "file_system": kind, "mounted_from": source, "mount_options": options}
    (finding,) = judge_facts(facts)
    assert (finding.name, finding.verdict, detail in finding.detail) == ("medium", verdict, True), finding
    assert bool(finding.do) or verdict != "unfit"


class Telling(Through):
    def facts(self) -> dict[str, str]:
        return {
            "kind": "S3",
            "server": "127.0.0.1:9",
            "publish": "conditional put",
            "checksums": "stored, not verified",
            "conditional_parts": "overwritten",
            "clock_offset_seconds": "-90.5",
        }


def test_a_storage_tells_its_own_facts() -> None:
    report = probed(Telling)
    assert (report.tier, names_unfit(report)) == ("conditional put", set())
    told = {"checksums": "warn", "clock": "warn", "medium": "ok", "conditional parts": "ok"}
    assert told.items() <= verdicts(report).items()
    assert facts_of(Through(MemoryStorage())) == {"kind": "broken"}


def test_good_facts_are_ok() -> None:
    facts = {"kind": "S3", "checksums": "refused", "conditional_parts": "refused", "free_bytes": str(2**40)}
    assert {finding.verdict for finding in judge_facts(facts)} == {"ok"}
    assert {finding.verdict for finding in (judge_clock(None), judge_clock(0.5))} == {"ok"}


def test_little_room_is_a_warning() -> None:
    verdict = {f.name: f.verdict for f in judge_facts({"free_bytes": "1000000", "total_bytes": "8000000"})}
    assert verdict["space"] == "warn"


# The short form.


def test_the_short_form_is_short_and_leaves_nothing() -> None:
    memory = MemoryStorage()
    faulty = FaultyStorage(memory)
    assert {finding.verdict for finding in quick_probe(faulty)} == {"ok"}
    assert objects(memory) == {layout.ROOT_MARKER}
    assert sum(faulty.calls.values()) <= 8


def test_starts_leave_no_folders_behind(tmp_path: Path) -> None:
    init_root(f"file://{tmp_path}/root")
    storage = open_storage(f"file://{tmp_path}/root")
    for _ in range(3):
        refuse_unfit(storage)
    assert [path.name for path in (tmp_path / "root" / "probe").iterdir()] == ["quick"]
    assert list((tmp_path / "root" / "probe" / "quick").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Overwrites, "created again"),
        (OverwritesAndSaysNo, "expected b'"),
        (ReadOnly, "permission denied"),
        (WriteOnly, "permission denied"),
        (NoListing, "permission denied"),
    ],
)
def test_an_unfit_storage_is_refused_at_the_start(kind: Callable[[MemoryStorage], Storage], reason: str) -> None:
    with pytest.raises(Unfit, match=reason) as refused:
        refuse_unfit(kind(MemoryStorage()))
    assert "what to do" in str(refused.value)


def test_a_storage_that_does_not_answer_now_is_not_called_unfit(caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.fail_before("put")
    with caplog.at_level(logging.WARNING, "ckptd.storage"):
        refuse_unfit(faulty)
    assert "could not be probed now" in caplog.text
    faulty.assert_all_fired()


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "..", "a" * 65])
def test_T5_a_probe_key_is_derived(name: str) -> None:
    assert layout.probe_key("f0", "race-1") == "probe/f0/race-1"
    for words in ((name, "x"), ("x", name)):
        with pytest.raises(Invalid):
            layout.probe_key(*words)
