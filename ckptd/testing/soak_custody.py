"""What became of every checkpoint of a run, read from its log, and whether somebody is answerable for it.

The auditor says whether a log keeps the rules. This says whether it tells what was done: no checkpoint that was
acknowledged is gone without a record that somebody asked for, and none that was kept lost a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from ckptd import layout
from ckptd.digests import sha256_hex
from ckptd.encoding import MAX_RECORD_BYTES, Record, decode
from ckptd.errors import NotFound
from ckptd.history import advance
from ckptd.lineage import CRASH_LOOP_STARTS, MAX_DOUBTS, is_valid, lineage
from ckptd.manifest import ManifestRef
from ckptd.reading import observe_manifest, read_manifest
from ckptd.records import CheckpointCommitted, GenerationStarted
from ckptd.second import read_here
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.testing.soak_journal import Decision, Tally
from ckptd.upkeep_records import (
    CheckpointQuarantined,
    CheckpointReinstated,
    CheckpointReleased,
    CheckpointsPurged,
    CheckpointsRetired,
    RolledBack,
)

LOST = "lost"
CLOCK_SECONDS = 0.1  # records have milliseconds


class Custody:
    """One run on one storage, read on as it grows. A service lets go of what silent readers hold after
    `hold_seconds`."""

    def __init__(self, storage: Storage, run: str, *, hold_seconds: float) -> None:
        self.state = RunState()
        self.records: Counter[tuple[str, str]] = Counter()  # that count, by kind and actor
        self.grounds: Counter[str] = Counter()  # of quarantines
        self.saves_retired: Counter[str] = Counter()  # by actor
        self.silenced = 0  # holds that a service ended
        self._storage, self._run = storage, run
        self._hold_seconds = hold_seconds
        self._left: dict[str, str] = {}  # saves that are no longer on the line, and how that came
        self._quarantined = set[str]()  # ever
        self._rolled_back = set[str]()
        self._released: dict[Decision, float] = {}
        self._starts: Counter[str] = Counter()
        self._doubts = 0

    def check(self, tally: Tally) -> Iterator[str]:
        """Read on, and say what of it nobody is answerable for. Processes and services must not be at work."""
        meant, told = tally.meant[self._run], tally.told[self._run]
        damaged = tally.damaged_saves[self._run]
        yield from self._read_on(meant, damaged)
        fates = self.fates()
        for save in sorted(tally.durable[self._run]):
            if fates.get(save) == LOST:
                yield f"{save} was acknowledged, and is valid and off the line, and nobody rolled back"
        for decision, at in told.items():
            yield from self._check_told(decision, at, meant)
        for save in self.state.quarantined.keys() - self.state.retired.keys() - damaged:
            for ref in self._damaged(self.state.checkpoints[save].manifest):
                yield f"{ref} of {save} is damaged, and {save} is in quarantine, not retired"
        for save in self.state.purged - damaged:
            if self._objects(save):
                yield f"{save} is purged, and there is {self._objects(save)}"

    def fates(self) -> dict[str, str]:
        """Where each checkpoint of the run is now."""
        state, line = self.state, {c.save for c in lineage(self.state)}
        found = dict.fromkeys(state.checkpoints, LOST) | self._left | dict.fromkeys(line, "on the line")
        found |= dict.fromkeys(state.quarantined, "in quarantine") | dict.fromkeys(state.retired, "retired")
        return found

    def leftovers(self, damaged: set[str]) -> Iterator[str]:
        """Objects that nobody needs, after everything was collected."""
        current = self.state.current.number if self.state.current is not None else 0
        folders = list(self._storage.list(layout.manifests_folder(self._run)))
        for generation in self._storage.list(layout.data_folder(self._run)):
            folders += self._storage.list(f"{layout.data_folder(self._run)}/{generation}")
        for save in sorted(set(folders)):
            needed = save in self.state.checkpoints and save not in self.state.retired
            if not needed and layout.generation_of(save) < current and save not in damaged and self._objects(save):
                yield f"{save} was collected, and there is {self._objects(save)}"

    # The log

    def _read_on(self, meant: set[Decision], damaged: set[str]) -> Iterator[str]:
        while True:
            seq = self.state.seq + 1
            key = layout.log_key(self._run, seq)
            try:
                data = self._storage.get(key, MAX_RECORD_BYTES)
            except NotFound:
                return
            item = decode(data, key=key, seq=seq)
            line = (
                [c.save for c in lineage(self.state)] if isinstance(item.body, GenerationStarted | RolledBack) else []
            )
            if advance(self.state, item, sha256_hex(data)).accepted:
                self.records[item.body.kind, item.actor] += 1
                for finding in self._take(item, line, meant, damaged):
                    yield f"slot {seq}: {finding}"

    def _take(self, item: Record, line: list[str], meant: set[Decision], damaged: set[str]) -> Iterator[str]:
        """One more record that counts. `line` is the one before it, newest first, if it can have moved."""
        verbs = {(verb, save) for verb, save, _ in meant}
        match item.body:
            case GenerationStarted() as body:
                yield from self._move(line, "passed over in quarantine")
                if body.resume_from is not None and body.fallback_of is None:
                    self._starts[body.resume_from] += 1
            case RolledBack() as body:
                self._rolled_back.add(body.to)
                yield from self._move(line, "left by a roll-back")
                self._starts.clear()
                self._doubts = 0
                if ("rollback", body.to) not in verbs:
                    yield f"a roll-back to {body.to}, and nobody wanted it"
            case CheckpointCommitted():
                self._starts.clear()
                self._doubts = 0
            case CheckpointQuarantined() as body:
                self._quarantined.add(body.save)
                self.grounds[body.ground] += 1
                yield from self._judge_quarantine(body, verbs, damaged)
            case CheckpointReinstated() as body:
                self._starts.pop(body.save, None)
                if ("reinstate", body.save) not in verbs:
                    yield f"{body.save} is out of quarantine, and nobody wanted it"
            case CheckpointReleased() as body:
                released = ("release", body.save, body.who)
                self._released[released] = datetime.fromisoformat(item.time).timestamp()
                self.silenced += released not in meant
            case CheckpointsRetired() as body:
                self.saves_retired[item.actor] += len(body.saves)
            case CheckpointsPurged():
                pass

    def _move(self, line: list[str], how: str) -> Iterator[str]:
        now = {c.save for c in lineage(self.state)}
        for save in now:
            self._left.pop(save, None)
        for save in line:
            if save not in now:
                self._left[save] = how
                if how != "left by a roll-back" and is_valid(self.state, save):
                    yield f"a start left {save} behind, which was valid"

    def _judge_quarantine(
        self, body: CheckpointQuarantined, verbs: set[tuple[str, str]], damaged: set[str]
    ) -> Iterator[str]:
        match body.ground:
            case "damage" if body.save not in damaged:
                yield f"{body.save} is in quarantine for damage, and nobody damaged it"
            case "operator" if ("quarantine", body.save) not in verbs:
                yield f"{body.save} is in quarantine by hand, and nobody wanted it"
            case "crash-loop":
                starts, doubts, self._doubts = self._starts[body.save], self._doubts, self._doubts + 1
                if starts < CRASH_LOOP_STARTS or doubts >= MAX_DOUBTS:
                    yield f"{body.save} is in doubt after {starts} starts, {doubts} were before it"
                if not any(is_valid(self.state, c.save) for c in lineage(self.state)):
                    yield f"{body.save} is in doubt, and there is no other"

    # What people were told

    def _check_told(self, decision: Decision, at: float, meant: set[Decision]) -> Iterator[str]:
        verb, save, who = decision
        pinned, held = (who in kept.get(save, ()) for kept in (self.state.pinned, self.state.held))
        match verb:
            case "pin" if not pinned and ("unpin", save, who) not in meant:
                yield f"{save} was pinned for {who}, and is not any more"
            case "unpin" if pinned:
                yield f"{save} was unpinned for {who}, and is pinned"
            case "hold" if not held and ("release", save, who) not in meant:
                ended = self._released.get(("release", save, who))
                if ended is None or ended < at + self._hold_seconds - CLOCK_SECONDS:
                    after = f"{ended - at:.1f} s later" if ended is not None else "never released"
                    yield f"{save} was held for {who}, and is not any more: {after}"
            case "release" if held:
                yield f"{save} was released for {who}, and is held"
            case "quarantine" if save not in self._quarantined:
                yield f"{save} was put into quarantine by {who}, and no record says so"
            case "rollback" if save not in self._rolled_back:
                yield f"the run was rolled back to {save} by {who}, and no record says so"

    def _damaged(self, manifest: ManifestRef) -> Iterator[str]:
        if observe_manifest(self._storage, manifest) is not None:
            yield manifest.key
            return
        for ref in read_manifest(self._storage, manifest).objects():
            if read_here(self._storage, ref).damage is not None:
                yield ref.key

    def _objects(self, save: str) -> list[str]:
        folders = (layout.manifest_folder(self._run, save), layout.payload_folder(self._run, save))
        return [f"{folder}/{name}" for folder in folders for name in self._storage.list(folder)]
