"""What must hold, checked at the moment it could break: at every record that lands, every object that is removed,
and every answer that an actor gets.

The truth is the medium itself, which no actor can see. The records are judged by `ckptd.history`, as every reader
judges them; what must hold of those that count is said by `ckptd.testing.auditor_rules`, in other words.
"""

from __future__ import annotations

import json
from collections import Counter

from ckptd import history, layout
from ckptd.digests import sha256_hex
from ckptd.encoding import decode
from ckptd.errors import Corrupt, NotFound
from ckptd.lineage import first_open
from ckptd.manifest import Manifest
from ckptd.state import RunState
from ckptd.testing.auditor import Auditor
from ckptd.testing.auditor_rules import Entry, Finding, Line, fence, generations, once
from ckptd.testing.sim.drive import Drive
from ckptd.wire import Answer, SaveStatus

RUN = "sim"
SLACK_SECONDS = 20.0  # for reading the log, while others have their turns


class Violated(BaseException):
    """An invariant does not hold. The run ends here, whatever the product would do with an exception."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Truth:
    """Follows one run on the medium of `drive`. Its methods raise `Violated`."""

    def __init__(self, drive: Drive) -> None:
        self.state = RunState()
        self.kinds: Counter[str] = Counter()
        self.acknowledged: set[str] = set()
        self.audits = 0
        self._drive = drive
        self._auditor = Auditor(drive.medium, RUN)
        self._line = Line(RUN)
        self._entries: list[Entry] = []
        self._refused: set[str] = set()  # rids that somebody was told will never count
        self._over: set[str] = set()  # saves that somebody was told will never be checkpoints
        self._answers: dict[tuple[str, int | None], bytes] = {}
        self._log = f"{layout.log_folder(RUN)}/"
        self._hurt: set[str] = set()  # keys that were damaged at rest at any time
        drive.watcher = self

    # What happens to the medium.

    def landed(self, key: str, data: bytes) -> None:
        if key.startswith(self._log):
            self._record(key, data)

    def removed(self, key: str) -> None:
        """A process deletes `key`: that may be done to what nobody needs any more, and to nothing else."""
        words = key.split("/")
        if key.startswith(f"{layout.snapshots_folder(RUN)}/"):
            return  # a cache
        save = words[-2] if len(words) > 3 else ""
        if words[:2] != ["runs", RUN] or words[2] not in ("data", "manifests") or not layout.SAVE_ID.fullmatch(save):
            raise self._violated("I13", key, "is deleted")
        state, current = self.state, self.state.current
        if save in state.checkpoints:
            if save not in state.retired:
                raise self._violated("I13", key, "is deleted, and its checkpoint is not retired")
        elif current is None or layout.generation_of(save) >= first_open(state):
            raise self._violated(
                "I13", key, f"is deleted while generation {current and current.number} may commit it"
            )

    def damaged(self, key: str) -> None:
        """An object is damaged at rest, on purpose."""
        self._hurt.add(key)

    def _record(self, key: str, data: bytes) -> None:
        state, seq = self.state, layout.seq_of(key.rpartition("/")[2])
        if seq != state.seq + 1 or key != layout.log_key(RUN, seq):
            raise self._violated("I2", key, f"is filled after slot {state.seq}")
        try:
            item = decode(data, key=key, seq=seq)
        except Corrupt as error:
            raise self._violated("L3", key, error.message) from error
        if item.prev != state.digest:
            raise self._violated("I3", key, "does not chain to the slot before")
        had_commits = bool(state.checkpoints)
        verdict = history.advance(state, item, sha256_hex(data))
        raw = json.loads(data)
        self.kinds[f"{raw['kind']}{'' if verdict.accepted else ' (void)'}"] += 1
        self._drive.say(
            "log", f"slot {seq}: {item.rid} {'counts' if verdict.accepted else 'is void'} {verdict.reason}"
        )
        if not verdict.accepted:
            return
        entry = Entry(seq, key, raw["kind"], raw["rid"], raw["body"], counts=True)
        self._entries.append(entry)
        findings = [*once(self._entries), *generations(self._entries), *fence(self._entries)]
        findings += self._line.follow([entry], state)
        for finding in findings:
            raise self._violated(finding.rule, finding.where, finding.what)
        self._check_entry(entry, had_commits)

    def _check_entry(self, entry: Entry, had_commits: bool) -> None:
        body, key = entry.body, entry.key
        if entry.rid in self._refused:
            raise self._violated("I7", key, f"{entry.rid} counts, and was refused for good")
        self.kinds["fallbacks"] += entry.kind == "generation-started" and body["fallback_of"] is not None
        if entry.kind == "generation-started" and body["resume_from"] is None and had_commits:
            raise self._violated("I17", key, "starts from nothing, and the run has commits")
        if entry.kind == "checkpoint-committed":
            if body["save"] in self._over:
                raise self._violated("I7", key, f"{body['save']} counts, and somebody was told that it never will")
            self._check_complete(key, body["manifest"])
        if entry.kind == "checkpoints-purged":
            self._check_gone(body["saves"])
        if entry.kind == "checkpoint-quarantined" and body["ground"] == "damage":
            folders = (layout.payload_folder(RUN, body["save"]), layout.manifest_folder(RUN, body["save"]))
            if not any(hurt.startswith(folders) for hurt in self._hurt):
                raise self._violated("I19", key, f"{body['save']} is given up for damage, and is whole")

    def _check_complete(self, key: str, ref: dict[str, object]) -> None:
        """A commit counts: everything it names is there, but for what was damaged on purpose."""
        medium, name = self._drive.medium, str(ref["key"])
        if name in self._hurt:
            return
        try:
            manifest = Manifest.model_validate_json(medium.get(name, 1 << 30))
            for part in manifest.objects():
                if part.key not in self._hurt and medium.size(part.key) != part.size:
                    raise self._violated("I12", key, f"{part.key} is not whole")
        except NotFound as error:
            raise self._violated("I12", key, error.message) from error

    def _check_gone(self, saves: list[str]) -> None:
        """Objects that stay although their checkpoint was purged are counted: nobody looks for them any more."""
        for save in saves:
            folders = (layout.payload_folder(RUN, save), layout.manifest_folder(RUN, save))
            left = sum(len(self._drive.medium.list(folder)) for folder in folders)
            self.kinds["objects left by a purge"] += left

    # What actors are told.

    def appended(self, rid: str) -> None:
        """An append returned."""
        if rid not in self.state.accepted:
            raise self._violated("I6", rid, "the append returned, and it does not count")

    def took(self, rid: str, seconds: float, deadline_seconds: float) -> None:
        """An append ended one way or another, after so many seconds of virtual time."""
        if seconds > deadline_seconds + SLACK_SECONDS:
            raise self._violated("I22", rid, f"took {seconds:.0f} s, the deadline was {deadline_seconds:.0f} s")

    def refused(self, rid: str) -> None:
        """An append was refused for good."""
        if rid in self.state.accepted:
            raise self._violated("I7", rid, "was refused for good, and counts")
        self._refused.add(rid)

    def durable(self, save: str) -> None:
        """Somebody was told that a save is a checkpoint."""
        if save not in self.state.checkpoints:
            raise self._violated("I6", save, "was acknowledged, and is no checkpoint")
        self.acknowledged.add(save)

    def told(self, status: SaveStatus) -> None:
        """Somebody asked what became of a save."""
        if status.status == "durable":
            self.durable(status.save)
        elif status.status in ("aborted", "fenced"):
            if status.save in self.state.checkpoints:
                raise self._violated("I7", status.save, f"was told {status.status}, and is a checkpoint")
            self._over.add(status.save)

    def answered(self, answer: Answer) -> None:
        """A rank holds the answer of its incarnation."""
        key, data = (answer.attempt, answer.fallback_of), answer.stored()
        if self._answers.setdefault(key, data) != data:
            raise self._violated("I9", answer.attempt, f"two answers for generation {answer.generation}")

    def none_since(self, commits: int) -> None:
        """Somebody was told that the run has no checkpoint, and asked when it had `commits`."""
        if commits:
            raise self._violated("I17", layout.log_folder(RUN), f"answered none, and the run had {commits} commits")

    def kept(self, save: str, who: str) -> None:
        """Somebody who alone uses the name `who` was told that a checkpoint is pinned or held for it."""
        state = self.state
        if who not in state.pinned.get(save, set()) | state.held.get(save, set()):
            raise self._violated("I6", save, f"was said to be kept for {who}, and is not")

    def missing(self, save: str, key: str) -> None:
        """Somebody who holds a checkpoint finds an object gone."""
        if key not in self._hurt:
            raise self._violated("I14", key, f"is gone, and {save} is held")

    # Now and then.

    def audit(self) -> None:
        """Everything once more, from the bytes on the medium alone."""
        self.audits += 1
        told: dict[str, set[str]] = {"acknowledged": self.acknowledged, "refused": self._refused}
        for finding in self._auditor.check(**told, damaged=set(self._drive.damaged)):
            raise self._violated(finding.rule, finding.where, finding.what)

    def _violated(self, rule: str, where: str, what: str) -> Violated:
        return Violated(Finding(rule, where, what))
