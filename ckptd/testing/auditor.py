"""The auditor: reads a storage and nothing else, and says what of a run is not as the protocol promises.

    auditor = Auditor(storage, "en-it")
    ...                                       # whatever may happen to the run
    auditor.assert_clean(acknowledged=saves)  # as often as you like: it remembers what it saw before

Whether a record counts is asked of `ckptd.history`, as every reader does. What must hold of the records that count is
checked here a second time, from the stored bytes, in other words than there. `Unavailable` comes through: an audit
that could not read has no result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptd import answers, history, layout
from ckptd.digests import ZERO_SHA256, chunk_digest, sha256_hex
from ckptd.errors import Corrupt, NotFound
from ckptd.records import MAX_RECORD_BYTES, decode
from ckptd.state import RunState
from ckptd.storage.base import Storage


@dataclass(frozen=True)
class Finding:
    """`rule` is the invariant that does not hold, `where` the key or name it was seen at."""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule} {self.where}: {self.what}"


@dataclass(frozen=True)
class Entry:
    """A stored record as it is read here: plain JSON, and whether history says that it counts."""

    seq: int
    key: str
    kind: str
    rid: str
    body: dict[str, Any]
    counts: bool


class Auditor:
    """One run on one storage. Keep it over a whole test: it compares what it sees with what it saw before."""

    def __init__(self, storage: Storage, run: str) -> None:
        self._storage = storage
        self._run = layout.check_run(run)
        self._slots: dict[int, bytes] = {}
        self._whole: set[str] = set()

    def check(
        self, *, acknowledged: Iterable[str | int] = (), refused: Iterable[str] = (), damaged: Iterable[str] = ()
    ) -> list[Finding]:
        """Everything that is wrong, nothing if the list is empty.

        `acknowledged` are saves (by name or step) that somebody was told are durable, `refused` rids that were
        refused for good, `damaged` the saves or keys that were damaged on purpose.
        """
        findings = list(self._read_slots())
        state, entries = RunState(), list[Entry]()
        findings += self._decode(state, entries)
        counting = [entry for entry in entries if entry.counts]
        findings += _once(counting)
        findings += _generations(counting)
        findings += _fence(counting)
        findings += _Line(self._run).follow(counting, state)
        findings += _told(counting, state, list(acknowledged), set(refused))
        findings += self._checkpoints(counting, state, set(damaged))
        return findings

    def assert_clean(
        self, *, acknowledged: Iterable[str | int] = (), refused: Iterable[str] = (), damaged: Iterable[str] = ()
    ) -> None:
        """As `check`, as an AssertionError that lists the findings."""
        findings = self.check(acknowledged=acknowledged, refused=refused, damaged=damaged)
        if findings:
            lines = "\n".join(f"  {finding}" for finding in findings)
            raise AssertionError(f"run {self._run} on {self._storage.url}: {len(findings)} findings\n{lines}")

    # The log

    def _read_slots(self) -> Iterator[Finding]:
        folder = layout.log_folder(self._run)
        found = sorted(seq for seq in map(layout.seq_of, self._storage.list(folder)) if seq is not None)
        for expected, seq in enumerate(found, 1):
            if seq != expected:
                yield Finding("I2", layout.log_key(self._run, expected), f"no record, and slot {found[-1]} is filled")
                break
        for seq in sorted(self._slots.keys() - set(found)):
            yield Finding("I1", layout.log_key(self._run, seq), "was read before and is gone")
        for seq in found:
            key = layout.log_key(self._run, seq)
            try:
                data = self._storage.get(key, MAX_RECORD_BYTES)
            except (NotFound, Corrupt) as error:
                yield Finding("I2", key, error.message)
                continue
            if self._slots.setdefault(seq, data) != data:
                yield Finding("I1", key, "holds other bytes than before")

    def _decode(self, state: RunState, entries: list[Entry]) -> Iterator[Finding]:
        """Fills `state` and `entries` as far as the log can be read."""
        digest = ZERO_SHA256
        for seq in range(1, len(self._slots) + 1):
            data, key = self._slots.get(seq), layout.log_key(self._run, seq)
            if data is None:
                return
            try:
                item = decode(data, key=key, seq=seq)
            except Corrupt as error:
                yield Finding("L3", key, error.message)
                return
            raw = json.loads(data)
            if raw["prev"] != digest:
                yield Finding("I3", key, f"chains to {raw['prev'][:12]}.., the record before it is {digest[:12]}..")
                return
            digest = sha256_hex(data)
            history.advance(state, item, digest)
            entries.append(Entry(seq, key, raw["kind"], raw["rid"], raw["body"], counts=seq not in state.void))

    # The checkpoints

    def _checkpoints(self, counting: list[Entry], state: RunState, damaged: set[str]) -> Iterator[Finding]:
        for entry in counting:
            if entry.kind != "checkpoint-committed":
                continue
            save, ref = entry.body["save"], entry.body["manifest"]
            if save in damaged or save in state.quarantined:
                continue
            data = bytearray()
            wrong = self._differs(ref["key"], ref["size"], ref["size"], keep=data)
            if wrong or sha256_hex(bytes(data)) != ref["sha256"]:
                yield from self._wrong(
                    ref["key"], damaged, f"is not the manifest of {save}: {wrong or 'other bytes'}"
                )
                continue
            self._whole.add(ref["key"])
            parts = json.loads(data)["parts"]
            if [part["writer"] for part in parts] != list(range(entry.body["writers"])):
                yield Finding("I12", ref["key"], f"{save} has not the parts of {entry.body['writers']} writers")
            for part in parts:
                yield from self._object(save, part["payload"], damaged)

    def _object(self, save: str, ref: dict[str, Any], damaged: set[str]) -> Iterator[Finding]:
        key = ref["key"]
        if not key.startswith(f"{layout.run_folder(self._run)}/data/") or ".." in key.split("/"):
            yield Finding("I20", key, f"{save} has an object outside its run")
            return
        wrong = self._differs(key, ref["size"], ref["chunk_bytes"], ref["chunks"])
        if wrong:
            yield from self._wrong(key, damaged, f"is not the object of {save}: {wrong}")
        else:
            self._whole.add(key)

    def _differs(
        self, key: str, size: int, step: int, chunks: list[str] | None = None, keep: bytearray | None = None
    ) -> str:
        """In what an object is not as it should be; it is read on the medium, `step` bytes at a time."""
        try:
            with self._storage.reader(key, fresh=True) as reader:
                if reader.size != size:
                    return f"expected {size} bytes, found {reader.size}"
                for index, start in enumerate(range(0, size, step)):
                    chunk = bytearray(min(step, size - start))
                    reader.read_into(start, memoryview(chunk))
                    if chunks is not None and chunk_digest(chunk) != chunks[index]:
                        return f"chunk {index} differs"
                    if keep is not None:
                        keep += chunk
        except (NotFound, Corrupt) as error:
            return error.message
        return ""

    def _wrong(self, key: str, damaged: set[str], what: str) -> Iterator[Finding]:
        """I13 if it was whole when it was looked at before, I12 else."""
        if key not in damaged:
            yield Finding("I13" if key in self._whole else "I12", key, what)


# What must hold of the records that count.


def _once(counting: list[Entry]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for entry in counting:
        if first.setdefault(entry.rid, entry.seq) != entry.seq:
            yield Finding("I5", entry.key, f"{entry.rid} counts already in slot {first[entry.rid]}")


def _generations(counting: list[Entry]) -> Iterator[Finding]:
    ages: dict[str, int] = {}
    number, youngest = 0, 0
    for entry in counting:
        if entry.kind == "attempt-opened":
            ages.setdefault(entry.body["attempt"], entry.seq)
        if entry.kind != "generation-started":
            continue
        age = ages.get(entry.body["attempt"])
        if entry.body["generation"] != number + 1:
            yield Finding("I8", entry.key, f"generation {entry.body['generation']} follows generation {number}")
        if age is None:
            yield Finding("I8", entry.key, f"attempt {entry.body['attempt']} was not opened before it began")
        elif age < youngest or (age == youngest and entry.body.get("fallback_of") != number):
            yield Finding("I8", entry.key, f"the attempt of slot {age} began after that of slot {youngest}")
        number, youngest = entry.body["generation"], max(youngest, age or 0)


def _fence(counting: list[Entry]) -> Iterator[Finding]:
    number, ready = 0, set[int]()
    for entry in counting:
        generation = entry.body.get("generation", 0)
        if entry.kind == "generation-started":
            number = max(number, generation)
        elif entry.kind == "generation-ready":
            ready.add(generation)
        elif entry.kind == "checkpoint-committed":
            if generation < number:
                yield Finding("I10", entry.key, f"a commit of generation {generation} after {number} started")
            if generation not in ready:
                yield Finding("I11", entry.key, f"a commit of generation {generation}, which is not ready")


class _Line:
    """Follows tip and resume point through the records that count, by itself."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._tip: str | None = None
        self._parents: dict[str, str | None] = {}
        self._steps: dict[str, int] = {}
        self._bad: set[str] = set()

    def follow(self, counting: list[Entry], state: RunState) -> Iterator[Finding]:
        floor = -1
        for entry in counting:
            yield from self._take(entry)
            step = self._resume_step()
            if entry.kind == "checkpoint-quarantined":
                floor = step  # the one reason for which it may go back
            elif step < floor:
                yield Finding("I15", entry.key, f"the resume step went from {floor} back to {step}")
            floor = max(floor, step)
        yield from self._compare(state)

    def _take(self, entry: Entry) -> Iterator[Finding]:
        body = entry.body
        match entry.kind:
            case "checkpoint-committed":
                self._parents[body["save"]], self._steps[body["save"]] = self._tip, body["step"]
                self._tip = body["save"]
            case "checkpoint-quarantined":
                self._bad.add(body["save"])
                if body["reported_by"] == body["confirmed_by"]:
                    yield Finding("I19", entry.key, f"one reader alone quarantined {body['save']}")
            case "generation-started":
                start = body["resume_from"]
                if start is None and self._parents:
                    yield Finding(
                        "I17", entry.key, f"starts from nothing, and the run has {len(self._parents)} commits"
                    )
                elif start is not None and start not in self._ancestors():
                    yield Finding("I16", entry.key, f"resumes from {start}, which is not on the line of {self._tip}")
                elif start is not None and start != self._resume():
                    yield Finding("I16", entry.key, f"resumes from {start}, the resume point is {self._resume()}")
                self._tip = start

    def _compare(self, state: RunState) -> Iterator[Finding]:
        """What readers are told is what was followed here."""
        where = layout.log_folder(self._run)
        point = history.resume_point(state)
        if (point.save if point is not None else None) != self._resume():
            yield Finding("I16", where, f"readers resume from {point and point.save}, expected {self._resume()}")
        if self._parents and answers.latest(self._run, state, {}).answer == "none":
            yield Finding("I17", where, f"answered none, and the run has {len(self._parents)} commits")

    def _ancestors(self) -> list[str]:
        found: list[str] = []
        save = self._tip
        while save is not None and save not in found:
            found.append(save)
            save = self._parents.get(save)
        return found

    def _resume(self) -> str | None:
        return next((save for save in self._ancestors() if save not in self._bad), None)

    def _resume_step(self) -> int:
        save = self._resume()
        return self._steps.get(save, -1) if save is not None else -1


def _told(
    counting: list[Entry], state: RunState, acknowledged: list[str | int], refused: set[str]
) -> Iterator[Finding]:
    """What somebody was told is what the log says."""
    commits = [entry for entry in counting if entry.kind == "checkpoint-committed"]
    point = history.resume_point(state)
    for told in acknowledged:
        which = [entry.body for entry in commits if told in (entry.body["save"], entry.body["step"])]
        if not which:
            yield Finding("I6", str(told), "was acknowledged, and no record of it counts")
        left = [body for body in which if body["save"] not in state.quarantined]
        if left and (point is None or point.step < left[0]["step"]):
            step = point.step if point is not None else None
            yield Finding("I15", str(told), f"was acknowledged, and the run would resume from step {step}")
    for entry in counting:
        if entry.rid in refused:
            yield Finding("I7", entry.key, f"{entry.rid} was refused for good, and counts")
