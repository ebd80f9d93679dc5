"""What must hold after each fault and at the end, from what the ranks told and from the storage alone.

Losses equal the undisturbed run's to the last bit, those of steps that were trained again too. All ranks of a
generation start from one step: the newest commit before it that nobody damaged. What a rank was told is durable
counts. No generation starts without reason, and no orphan commits: the auditor reads that from the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptd.log import RunLog
from ckptd.testing.auditor import Auditor
from ckptd.testing.chaos.job import WORLD, Event, Job
from ckptd.testing.chaos.site import Site
from ckptd.testing.torchrun import stopped

Curve = dict[tuple[int, int], tuple[str, int]]
"""By rank and step: the loss of the whole batch, and the samples of this rank."""


@dataclass
class Checks:
    """Keep it over a whole run: it looks only at what is new."""

    job: Job
    site: Site
    reference: Curve
    findings: list[str] = field(default_factory=list)
    wrong_resumes: int = 0
    commits_lost: int = 0
    steps_compared: int = 0
    audits: int = 0
    borrowing: int = 0
    """Checkpoints that hold bytes in an earlier one's object."""
    _seen: int = 0

    def __post_init__(self) -> None:
        self._auditor = Auditor(self.site.storage, self.job.run)

    def look(self, where: str) -> None:
        """All of it, at a moment when the ranks wait or have ended."""
        events = self.job.look()
        new, self._seen = events[self._seen :], len(events)
        self._find(where, self._losses(new))
        with stopped(self.site.service.pid):  # its housekeeping retires and collects between two looks of an audit
            self._find(where, self._starts({event["generation"] for event in new if event["event"] == "start"}))
            self._find(where, self._log())

    def _losses(self, new: Iterable[Event]) -> Iterable[str]:
        for event in new:
            if event["event"] != "step":
                continue
            self.steps_compared += 1
            expected = self.reference.get((event["rank"], event["step"]))
            if expected != (event["loss"], event["crc"]):
                where = f"step {event['step']}, rank {event['rank']}, generation {event['generation']}"
                yield f"{where}: loss and samples {event['loss']}, {event['crc']}, undisturbed {expected}"

    def _starts(self, generations: set[int]) -> Iterable[str]:
        state = RunLog(self.site.storage, self.job.run, actor="chaos").replay(to_the_end=True)
        commits = [c for c in state.checkpoints.values() if c.save not in self.job.damaged]
        self.borrowing = sum(bool(commit.borrows) for commit in state.checkpoints.values())
        for number in sorted(generations):
            starts = self.job.starts()[number]
            before = [commit for commit in commits if commit.generation < number]
            newest = max(before, key=lambda commit: commit.seq) if before else None
            expected = (newest.step, newest.save) if newest else (0, None)
            found = {(event["step"], event["save"]) for event in starts.values()}
            if found != {expected}:
                self.wrong_resumes += 1
                yield f"generation {number}: {len(starts)} ranks started from {found}, expected {expected}"

    def _log(self) -> Iterable[str]:
        self.audits += 1
        acknowledged = {event["save"] for event in self.job.named("durable")}
        found = self._auditor.check(acknowledged=sorted(acknowledged), damaged=self.job.damaged)
        self.commits_lost = sum(finding.rule in ("I6", "I12", "I13", "I15") for finding in found)
        return [str(finding) for finding in found]

    def _find(self, where: str, findings: Iterable[str]) -> None:
        known = {finding.partition(": ")[2] for finding in self.findings}
        self.findings += [f"{where}: {finding}" for finding in findings if finding not in known]


def curve_of(job: Job) -> Curve:
    return {(e["rank"], e["step"]): (e["loss"], e["crc"]) for e in job.named("step")}


def steps_lost(job: Job) -> int:
    """Steps that rank 0 trained more than once."""
    return sum(count - 1 for count in Counter(event["step"] for event in job.named("step", rank=0)).values())


def counted_seconds(job: Job) -> float:
    """Time in the steps that later ones build on: the last time that each was trained."""
    last = {event["step"]: event["seconds"] for event in job.named("step", rank=0)}
    return float(sum(last.values()))


def complete_generations(job: Job) -> int:
    return sum(len(starts) == WORLD for starts in job.starts().values())
