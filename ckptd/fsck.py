"""Checking one run as it lies on its storage: log, manifests against their commits, every object, what is left over.

It reads and never changes anything. The log is read here slot by slot, past the first damage, unlike everywhere else,
where damage ends the reading: so all of it is told at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ckptd import layout, log_snapshots
from ckptd.digests import ZERO_SHA256, sha256_hex
from ckptd.encoding import MAX_RECORD_BYTES, decode
from ckptd.errors import Corrupt, Invalid, NotFound
from ckptd.history import advance
from ckptd.lineage import borrowers, first_open
from ckptd.manifest import Frozen, ObjectRef
from ckptd.reading import check_size, observe, read_manifest
from ckptd.state import Checkpoint, RunState
from ckptd.storage.base import Storage
from ckptd.watched import Watch, WatchedStorage, unwatched

Severity = Literal["damage", "known", "leftover", "strange"]


class Finding(Frozen):
    """`damage` is what the run needs and has not got; `known` the same of a checkpoint in quarantine; `leftover` what
    collection deletes, or a save that is under way; `strange` what ckptd did not write."""

    severity: Severity
    object: str
    detail: str
    save: str | None = None


class FsckAnswer(Frozen):
    """`records`, `checkpoints` and `objects` that were looked at, and `read_bytes` of payload, with `deep`."""

    run: str
    deep: bool
    records: int
    checkpoints: int
    objects: int
    read_bytes: int
    findings: tuple[Finding, ...]

    @property
    def damaged(self) -> bool:
        return any(finding.severity == "damage" for finding in self.findings)


def fsck(storage: Storage, run: str, *, deep: bool = False, watch: Watch = unwatched) -> FsckAnswer:
    """Look at everything of a run. `deep` reads every byte of payload, which `watch` follows. `NotFound` for a run
    that is none; `Unavailable` is no finding and comes through."""
    checking = _Checking(storage, run, deep, watch)
    checking.log()
    for checkpoint in checking.state.checkpoints.values():
        checking.checkpoint(checkpoint)
    checking.leftovers()
    return FsckAnswer(
        run=run,
        deep=deep,
        records=checking.records,
        checkpoints=len(checking.state.checkpoints),
        objects=checking.objects,
        read_bytes=checking.read_bytes,
        findings=tuple(checking.findings),
    )


@dataclass
class _Checking:
    storage: Storage
    run: str
    deep: bool
    watch: Watch
    state: RunState = field(default_factory=RunState)
    findings: list[Finding] = field(default_factory=list)
    records: int = 0
    objects: int = 0
    read_bytes: int = 0
    expected: dict[str, set[str]] = field(default_factory=dict)  # of each committed save, the keys it consists of
    looked: dict[str, tuple[ObjectRef, str]] = field(default_factory=dict)  # by key: what is wrong with an object
    whole_log: bool = True
    snapshots: dict[int, list[tuple[str, RunState]]] = field(default_factory=dict)

    # The log.

    def log(self) -> None:
        """Every slot by itself, its chain to the one before, and the state up to the first damage."""
        last = self._last_slot()
        self._read_snapshots()
        if not last:
            raise NotFound(f"there is no run {self.run} on {self.storage.url}", do="`ckptd runs` lists them.")
        seq, before = 1, ZERO_SHA256
        while True:
            key = layout.log_key(self.run, seq)
            try:
                before = self._record(key, seq, self.storage.get(key, MAX_RECORD_BYTES), before)
                self.records += 1
            except NotFound:
                if seq > last:
                    return
                before = self._log_damage(key, "the slot is empty, and later ones are filled")
            except Corrupt as error:
                before = self._log_damage(key, error.message)
            seq += 1

    def _last_slot(self) -> int:
        """The last one that is listed. Tells of every name that is no slot, or not where that slot lies."""
        last, folder = 0, layout.log_folder(self.run)
        for name in self.storage.list(folder):
            if layout.segment_of(name) is None:
                self.tell("strange", f"{folder}/{name}", "no folder of log slots")
                continue
            for slot in self.storage.list(f"{folder}/{name}"):
                key, seq = f"{folder}/{name}/{slot}", layout.seq_of(slot)
                if seq is None or key != layout.log_key(self.run, seq):
                    self.tell("strange", key, "no log slot")
                else:
                    last = max(last, seq)
        return last

    def _record(self, key: str, seq: int, data: bytes, before: str) -> str:
        """The digest that the next record chains to; empty after damage, where that cannot be told."""
        item, digest = decode(data, key=key, seq=seq), sha256_hex(data)
        if before and item.prev != before:
            self._log_damage(key, f"it chains to a record with sha256 {item.prev[:12]}.., not to slot {seq - 1}")
        if self.whole_log:
            advance(self.state, item, digest)
            for name, state in self.snapshots.pop(seq, []):
                if state != self.state and state.digest == digest:
                    key = f"{layout.snapshots_folder(self.run)}/{name}"
                    self.tell("damage", key, f"it is not what the log says up to slot {seq}; delete it")
        return digest

    def _read_snapshots(self) -> None:
        """Those that a reader would believe, for the log to be compared with. One that is damaged or another
        version's is passed over by readers, and does no harm."""
        for name in log_snapshots.listed(self.storage, self.run):
            try:
                state = log_snapshots.read(self.storage, self.run, name)
            except (Corrupt, NotFound) as error:
                self.tell("strange", f"{layout.snapshots_folder(self.run)}/{name}", error.message)
            else:
                self.snapshots.setdefault(state.seq, []).append((name, state))

    def _log_damage(self, key: str, detail: str) -> str:
        self.whole_log = False
        self.tell("damage", key, detail)
        return ""

    # Checkpoints.

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """The manifest against its commit, and every object. Of a retired one nothing need be there any more."""
        save, ref = checkpoint.save, checkpoint.manifest
        self.expected[save] = {ref.key}
        if save in self.state.retired:
            return
        severity: Severity = "known" if save in self.state.quarantined else "damage"
        try:
            manifest = read_manifest(self.storage, ref)
        except Corrupt as error:
            return self.tell(severity, ref.key, error.message, save)
        except Invalid as error:
            return self.tell("strange", ref.key, error.message, save)
        self.objects += 1
        self.expected[save] |= {item.key for item in manifest.written()}
        committed = (save, checkpoint.generation, checkpoint.step, checkpoint.writers, checkpoint.payload_bytes)
        named = (manifest.save, manifest.generation, manifest.step, len(manifest.parts), manifest.payload_bytes)
        if checkpoint.borrows != manifest.borrows:
            lenders = f"its commit says {list(checkpoint.borrows)}"
            self.tell(severity, ref.key, f"it borrows from {list(manifest.borrows)}, {lenders}", save)
        if (self.run, *committed) != (manifest.run, *named):
            self.tell(severity, ref.key, f"it is of {named} of run {manifest.run}, the commit of {committed}", save)
        for item in manifest.objects():
            self._object(item, severity, save)

    def _object(self, ref: ObjectRef, severity: Severity, save: str) -> None:
        """Several checkpoints may need one object: it is read once, and told of each."""
        known, wrong = self.looked.get(ref.key, (None, ""))
        if known is None:
            self.objects += 1
        if known != ref:
            wrong = self._look(ref)
            self.looked[ref.key] = (ref, wrong)
        if wrong:
            self.tell(severity, ref.key, wrong, save)

    def _look(self, ref: ObjectRef) -> str:
        """What is wrong with an object, empty if nothing is."""
        try:
            check_size(self.storage, ref)
        except Corrupt as error:
            return error.message
        damage = observe(WatchedStorage(self.storage, self._follow), ref) if self.deep else None
        if damage is None:
            return ""
        chunk = f"chunk {damage.chunk}: " if damage.chunk is not None else ""
        return f"{chunk}expected {damage.expected}, found {damage.observed}"

    def _follow(self, count: int) -> None:
        self.read_bytes += count
        self.watch(count)

    # What else is there.

    def leftovers(self) -> None:
        """Objects that no checkpoint needs. After damage in the log nobody can tell, and nothing is said."""
        if not self.whole_log:
            return
        needed = borrowers(self.state)
        for save in self._saves():
            keys = [
                f"{folder}/{name}"
                for folder in (layout.manifest_folder(self.run, save), layout.payload_folder(self.run, save))
                for name in self.storage.list(folder)
            ]
            expected = self.expected.get(save)
            for key in keys:
                part = layout.writer_of(key.rpartition("/")[2]) is not None
                if expected is None:
                    self.tell("leftover", key, self._uncommitted(save), save)
                elif save in self.state.retired:
                    if save not in needed:
                        self.tell("leftover", key, self._retired(save), save)
                elif key not in expected and not part:
                    self.tell("leftover", key, "of a try that was not committed, beside one that was", save)
        folder = layout.unnamed_folder(self.run)
        names = self.storage.list(folder)
        inner = [
            f"{folder}/{name}"
            for name in names
            if layout.generation_of_folder(name) is not None or layout.segment_of(name) is not None
        ]
        for place, count in [
            (folder, len(names) - len(inner)),
            *((sub, len(self.storage.list(sub))) for sub in inner),
        ]:
            if count:
                self.tell("leftover", place, f"{count} objects without a name yet, or of writers that were killed")

    def _retired(self, save: str) -> str:
        purged = save in self.state.purged
        return "of a checkpoint whose bytes were collected" if purged else "of a retired one: collection deletes it"

    def _uncommitted(self, save: str) -> str:
        current = self.state.current
        if current is not None and layout.generation_of(save) < first_open(self.state):
            return f"not committed, and its generation ended; {current.number} is the last: collection deletes it"
        return "not committed yet: a save that is under way, or one that failed"

    def _saves(self) -> Iterator[str]:
        names = set(self.storage.list(layout.manifests_folder(self.run)))
        data = layout.data_folder(self.run)
        for folder in self.storage.list(data):
            if layout.generation_of_folder(folder) is None:
                self.tell("strange", f"{data}/{folder}", "no folder of a generation")
                continue
            names.update(self.storage.list(f"{data}/{folder}"))
        for name in sorted(names):
            if layout.SAVE_ID.fullmatch(name):
                yield name
            else:
                self.tell("strange", name, "no name of a save")

    def tell(self, severity: Severity, key: str, detail: str, save: str | None = None) -> None:
        self.findings.append(Finding(severity=severity, object=key, detail=detail, save=save))
