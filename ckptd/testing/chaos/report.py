"""What is told of a run: a table for people, JSON for everything else."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ckptd.testing.chaos.checks import Checks, complete_generations, counted_seconds, steps_lost
from ckptd.testing.chaos.job import Job
from ckptd.testing.chaos.plan import Fault


@dataclass(frozen=True)
class Struck:
    """A fault that was carried out. `fired` is false too if the job did not come through it as it must."""

    fault: Fault
    fired: bool
    told: str
    generations: int
    seconds: float


@dataclass
class Report:
    seed: int
    storage: str
    not_possible_here: list[str]
    struck: list[Struck] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    told: int = 0

    @property
    def held(self) -> bool:
        return not self.findings and bool(self.struck) and all(struck.fired for struck in self.struck)

    def finish(self, job: Job, checks: Checks, wall_seconds: float) -> None:
        self.findings = checks.findings
        counted = counted_seconds(job)
        self.numbers = {
            "faults": len(self.struck),
            "fired": sum(struck.fired for struck in self.struck),
            "generations": complete_generations(job),
            "steps": job.step,
            "steps lost": steps_lost(job),
            "commits acknowledged": len({event["save"] for event in job.named("durable")}),
            "checkpoints that borrow": checks.borrowing,
            "commits lost": checks.commits_lost,
            "wrong resumes": checks.wrong_resumes,
            "losses compared": checks.steps_compared,
            "audits": checks.audits,
            "wall seconds": round(wall_seconds, 1),
            "seconds in steps that counted": round(counted, 2),
            "effective training time ratio": round(counted / wall_seconds, 4),
        }

    def table(self) -> Table:
        table = Table("kind", "struck", "fired", "new generations", "seconds, each", title=f"seed {self.seed}")
        kinds = Counter(struck.fault.kind for struck in self.struck)
        for kind, count in sorted(kinds.items()):
            these = [struck for struck in self.struck if struck.fault.kind == kind]
            fired, new = sum(s.fired for s in these), sum(s.generations for s in these)
            seconds = sum(s.seconds for s in these) / count
            table.add_row(kind, str(count), str(fired), str(new), f"{seconds:.1f}")
        return table

    def lines(self) -> list[str]:
        missing = ", ".join(self.not_possible_here) or "none"
        return [
            *(f"{name}: {value}" for name, value in self.numbers.items()),
            f"kinds that cannot be had here: {missing}",
            f"findings: {len(self.findings)}",
            *(f"FINDING {finding}" for finding in self.findings),
            *(f"NOT AS IT MUST: {s.fault} -> {s.told}" for s in self.struck if not s.fired),
        ]

    def write(self, path: Path) -> None:
        faults = [
            {**vars(s.fault), "fired": s.fired, "told": s.told, "generations": s.generations, "seconds": s.seconds}
            for s in self.struck
        ]
        whole = {"seed": self.seed, "storage": self.storage, "held": self.held, **self.numbers}
        whole |= {"not possible here": self.not_possible_here, "findings": self.findings, "plan": faults}
        path.write_text(json.dumps(whole, indent=1))
