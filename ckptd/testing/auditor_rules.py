"""What must hold of the records of a log that count, said a second time, in other words than `ckptd.history` says it.

Each function takes the records that count, in order, and yields what is wrong. The auditor calls them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptd import answers, layout, lineage
from ckptd.state import RunState

TURNS = ("rolled-back", "checkpoint-reinstated")  # people's decisions to train on from elsewhere


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


def once(counting: list[Entry]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for entry in counting:
        if first.setdefault(entry.rid, entry.seq) != entry.seq:
            yield Finding("I5", entry.key, f"{entry.rid} counts already in slot {first[entry.rid]}")


def generations(counting: list[Entry]) -> Iterator[Finding]:
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


def fence(counting: list[Entry]) -> Iterator[Finding]:
    number, ready, ended = 0, set[int](), 0
    for entry in counting:
        generation = entry.body.get("generation", 0)
        if entry.kind == "generation-started":
            number = max(number, generation)
        elif entry.kind in ("rolled-back", "run-closed"):
            ended = number
        elif entry.kind == "generation-ready":
            ready.add(generation)
        elif entry.kind == "checkpoint-committed":
            if generation < number:
                yield Finding("I10", entry.key, f"a commit of generation {generation} after {number} started")
            if generation <= ended:
                yield Finding("I10", entry.key, f"a commit of generation {generation}, which a person had ended")
            if generation not in ready:
                yield Finding("I11", entry.key, f"a commit of generation {generation}, which is not ready")


class Line:
    """Follows tip and resume point through the records that count, by itself."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._tip: str | None = None
        self._parents: dict[str, str | None] = {}
        self._steps: dict[str, int] = {}
        self._bad: set[str] = set()
        self._retired: set[str] = set()
        self._verified: set[str] = set()
        self._unread: set[str] = set()  # given up since the generation started
        self._kept: dict[str, set[str]] = {}
        self._borrows: dict[str, list[str]] = {}
        self._start: str | None = None
        self._ready = False
        self._closed = False
        self._floor = -1

    def follow(self, counting: list[Entry], state: RunState) -> Iterator[Finding]:
        """The records that count since the last call; `state` is the fold after them."""
        for entry in counting:
            yield from self._take(entry)
            step = self._resume_step()
            if entry.kind in TURNS or entry.kind == "checkpoint-quarantined":
                self._floor = step  # the reasons for which it may go back
            elif step < self._floor:
                yield Finding("I15", entry.key, f"the resume step went from {self._floor} back to {step}")
            self._floor = max(self._floor, step)
        yield from self._compare(state)

    def _take(self, entry: Entry) -> Iterator[Finding]:
        body = entry.body
        match entry.kind:
            case "checkpoint-committed":
                yield from self._borrow(entry)
                self._parents[body["save"]], self._steps[body["save"]] = self._tip, body["step"]
                self._tip = body["save"]
            case "checkpoint-quarantined":
                self._bad.add(body["save"])
                self._verified.discard(body["save"])
                self._unread.add(body["save"])
                if body["ground"] == "damage" and body["reported_by"] == body["confirmed_by"]:
                    yield Finding("I19", entry.key, f"one reader alone quarantined {body['save']}")
            case "checkpoint-reinstated":
                self._bad.discard(body["save"])
            case "rolled-back":
                self._tip, self._ready = body["to"], False
            case "run-closed" | "run-reopened":
                self._closed, self._ready = entry.kind == "run-closed", False
            case "checkpoint-verified":
                self._verified.add(body["save"])
            case "checkpoint-pinned" | "checkpoint-held":
                self._kept.setdefault(body["save"], set()).add(f"{entry.kind[11:15]} {body['who']}")
            case "checkpoint-unpinned" | "checkpoint-released":
                word = "pinn" if entry.kind == "checkpoint-unpinned" else "held"
                self._kept[body["save"]].discard(f"{word} {body['who']}")
            case "generation-ready":
                self._ready = True
                if self._start is not None and self._start not in self._unread:
                    self._verified.add(self._start)
            case "checkpoints-retired":
                yield from self._retire(entry)
            case "checkpoints-purged":
                yield from self._purge(entry)
            case "generation-started":
                yield from self._begin(entry)

    def _begin(self, entry: Entry) -> Iterator[Finding]:
        start = entry.body["resume_from"]
        if self._closed:
            yield Finding("I10", entry.key, "starts in a run that is closed")
        if start is None and self._parents:
            yield Finding("I17", entry.key, f"starts from nothing, and the run has {len(self._parents)} commits")
        elif start is not None and start not in self._ancestors():
            yield Finding("I16", entry.key, f"resumes from {start}, which is not on the line of {self._tip}")
        elif start is not None and start != self._resume():
            yield Finding("I16", entry.key, f"resumes from {start}, the resume point is {self._resume()}")
        self._tip, self._start, self._ready = start, start, False
        self._unread.clear()

    def _borrow(self, entry: Entry) -> Iterator[Finding]:
        """What a commit borrows is there, and stays."""
        save, lenders = entry.body["save"], entry.body.get("borrows", [])
        for lender in lenders:
            if lender not in self._parents or lender in self._bad or not self._needed_by(lender):
                yield Finding("I12", entry.key, f"{save} borrows from {lender}, which is not there for good")
        self._borrows[save] = lenders

    def _needed_by(self, save: str) -> list[str]:
        """The checkpoints that are not retired and need its bytes: itself, and those that borrow them."""
        return [s for s, lenders in self._borrows.items() if save in (s, *lenders) and s not in self._retired]

    def _purge(self, entry: Entry) -> Iterator[Finding]:
        """No bytes go that a checkpoint needs, its own or others'."""
        for save in entry.body["saves"]:
            needs = self._needed_by(save)
            if needs:
                yield Finding("I13", entry.key, f"the bytes of {save} go, and {', '.join(needs)} need them")

    def _retire(self, entry: Entry) -> Iterator[Finding]:
        """Retention leaves what a start needs, and two verified ones to fall back to."""
        saves = set(entry.body["saves"])
        if not self._ready and not self._closed:
            yield Finding("I14", entry.key, "retires while a generation is starting")
        if self._resume() in saves:
            yield Finding("I14", entry.key, f"retires the resume point {self._resume()}")
        for save in sorted(saves & {save for save, who in self._kept.items() if who}):
            yield Finding("I14", entry.key, f"retires {save}, which is kept for {sorted(self._kept[save])}")
        self._retired |= saves
        left = [s for s in self._ancestors() if s in self._verified and s not in self._bad | self._retired]
        if len(left) < 2:
            yield Finding("I14", entry.key, f"leaves {len(left)} verified checkpoints on the line")

    def _compare(self, state: RunState) -> Iterator[Finding]:
        """What readers are told is what was followed here."""
        where = layout.log_folder(self._run)
        point = lineage.resume_point(state)
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
        return next((s for s in self._ancestors() if s not in self._bad | self._retired), None)

    def _resume_step(self) -> int:
        save = self._resume()
        return self._steps.get(save, -1) if save is not None else -1


def told(
    counting: list[Entry], state: RunState, acknowledged: list[str | int], refused: set[str]
) -> Iterator[Finding]:
    """What somebody was told is what the log says."""
    commits = [entry for entry in counting if entry.kind == "checkpoint-committed"]
    point = lineage.resume_point(state)
    turned = max((entry.seq for entry in counting if entry.kind in TURNS), default=0)
    for name in acknowledged:
        which = [entry for entry in commits if name in (entry.body["save"], entry.body["step"])]
        if not which:
            yield Finding("I6", str(name), "was acknowledged, and no record of it counts")
        given_up = state.quarantined.keys() | state.retired.keys()
        left = [e.body for e in which if e.body["save"] not in given_up and e.seq > turned]
        if left and (point is None or point.step < left[0]["step"]):
            step = point.step if point is not None else None
            yield Finding("I15", str(name), f"was acknowledged, and the run would resume from step {step}")
    for entry in counting:
        if entry.rid in refused:
            yield Finding("I7", entry.key, f"{entry.rid} was refused for good, and counts")
