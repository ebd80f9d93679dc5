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
from typing import Any

from ckptd import history, layout, log_snapshots
from ckptd.digests import ZERO_SHA256, chunk_digest, sha256_hex
from ckptd.encoding import MAX_RECORD_BYTES, decode
from ckptd.errors import Corrupt, NotFound
from ckptd.slots import all_slots
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.testing.auditor_rules import Entry, Finding, Line, fence, generations, once, told


class Auditor:
    """One run on one storage. Keep it over a whole test: it compares what it sees with what it saw before."""

    def __init__(self, storage: Storage, run: str) -> None:
        self._storage = storage
        self._run = layout.check_run(run)
        self._slots: dict[int, bytes] = {}
        self._whole: set[str] = set()
        self.passed_over: tuple[str, ...] = ()

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
        findings += once(counting)
        findings += generations(counting)
        findings += fence(counting)
        findings += Line(self._run).follow(counting, state)
        findings += told(counting, state, list(acknowledged), set(refused))
        late = self._still_wanted(list(self._checkpoints(counting, state, set(damaged))))
        return findings + [finding for finding in late if finding not in findings]

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
        found = list(all_slots(self._storage, self._run))
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
        digest, snapshots = ZERO_SHA256, self._snapshots()
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
            for name, cached in snapshots.pop(seq, []):
                if cached.digest == digest and cached != state:
                    yield Finding("L7", name, f"a snapshot is not what the log says up to slot {seq}")
            entries.append(Entry(seq, key, raw["kind"], raw["rid"], raw["body"], counts=seq not in state.void))

    def _snapshots(self) -> dict[int, list[tuple[str, RunState]]]:
        """By slot, those that a reader would use; of another history it uses none."""
        found: dict[int, list[tuple[str, RunState]]] = {}
        for name in log_snapshots.listed(self._storage, self._run):
            try:
                state = log_snapshots.read(self._storage, self._run, name)
            except (Corrupt, NotFound):
                continue
            found.setdefault(state.seq, []).append((name, state))
        return found

    # The checkpoints

    def _still_wanted(self, found: list[tuple[str, Finding]]) -> list[Finding]:
        """Without what is about checkpoints that were given up while they were looked at: beside a live service their
        bytes may go at any time. The log is read once more for that."""
        if not found:
            return []
        state = RunState()
        again = [*self._read_slots(), *self._decode(state, [])]
        return again + [finding for save, finding in found if save not in state.retired and not _damaged(state, save)]

    def _checkpoints(
        self, counting: list[Entry], state: RunState, damaged: set[str]
    ) -> Iterator[tuple[str, Finding]]:
        """What is wrong, and with which checkpoint. Passes over the bytes of those in quarantine for damage, which
        are known not to be right, and names them in `passed_over`; all others in quarantine are as whole as any."""
        looked: dict[str, str] = {}
        self.passed_over = tuple(save for save in state.quarantined if _damaged(state, save))
        for entry in counting:
            if entry.kind != "checkpoint-committed":
                continue
            save, ref = entry.body["save"], entry.body["manifest"]
            if save in damaged or save in self.passed_over or save in state.retired:
                continue
            data = bytearray()
            wrong = self._differs(ref["key"], ref["size"], ref["size"], keep=data)
            if wrong or sha256_hex(bytes(data)) != ref["sha256"]:
                wrong = f"is not the manifest of {save}: {wrong or 'other bytes'}"
                yield from ((save, finding) for finding in self._wrong(ref["key"], damaged, wrong))
                continue
            self._whole.add(ref["key"])
            parts = json.loads(data)["parts"]
            if [part["writer"] for part in parts] != list(range(entry.body["writers"])):
                why = f"{save} has not the parts of {entry.body['writers']} writers"
                yield save, Finding("I12", ref["key"], why)
            borrowed = [item for part in parts for item in part.get("borrowed", [])]
            if sorted({item["save"] for item in borrowed}) != entry.body.get("borrows", []):
                yield save, Finding("I12", ref["key"], f"{save} borrows from others than its commit says")
            mine = [(save, part["payload"]) for part in parts]
            for owner, item in [*mine, *((item["save"], item["object"]) for item in borrowed)]:
                yield from ((save, finding) for finding in self._object(save, owner, item, damaged, looked))

    def _object(
        self, save: str, owner: str, ref: dict[str, Any], damaged: set[str], looked: dict[str, str]
    ) -> Iterator[Finding]:
        """One object that a checkpoint needs and `owner` wrote; `looked` has what was found out about others."""
        key = ref["key"]
        if not key.startswith(f"{layout.payload_folder(self._run, owner)}/") or ".." in key.split("/"):
            yield Finding("I20", key, f"{save} has an object outside its run, or of another save")
            return
        what = json.dumps(ref, sort_keys=True)
        if what not in looked:
            looked[what] = self._differs(key, ref["size"], ref["chunk_bytes"], ref["chunks"])
        if looked[what]:
            if owner not in damaged:
                yield from self._wrong(key, damaged, f"is not the object of {save}: {looked[what]}")
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


def _damaged(state: RunState, save: str) -> bool:
    """Whether it is in quarantine because two readers found it damaged."""
    return save in state.quarantined and state.quarantined[save].ground == "damage"
