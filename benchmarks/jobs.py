"""What is measured in which mode: each job is one group at one size, in a process of its own."""

from __future__ import annotations

from benchmarks.results import Value


class Job(Value):
    """`count` is ranks, checkpoints, records, saves or clients, as the group has it; `tensors` 0 means GPT-like.
    Without `peers` the other libraries are left out, which is shown."""

    group: str
    gigabytes: float = 0.0
    rounds: int = 3
    tensors: int = 0
    count: int = 0
    deadline_seconds: float = 900.0
    peers: bool = True

    @property
    def left_out(self) -> str:
        """Why peers are missing from this job."""
        return "" if self.peers else "left out of this job"

    @property
    def label(self) -> str:
        size = f"{self.gigabytes:g} GB"
        return f"{size} in {self.tensors:,} tensors" if self.tensors else size


QUICK = (
    Job(group="saving", gigabytes=1, rounds=3),
    Job(group="stalls", gigabytes=1, rounds=4),
    Job(group="training", gigabytes=1, rounds=3),
    Job(group="memory", gigabytes=0.25, count=50),
    Job(group="loading", gigabytes=1, rounds=3),
    Job(group="ranks", gigabytes=0.25, rounds=5, count=2),
    Job(group="ranks", gigabytes=0.25, rounds=5, count=4),
    Job(group="s3", gigabytes=0.25, rounds=3),
    Job(group="metadata", rounds=30),
    Job(group="runs", rounds=200, count=100_000),
    Job(group="crowd", count=10_000),
    Job(group="restart", rounds=2, count=4),
)
FULL = (
    *(Job(group="saving", gigabytes=size, rounds=9, deadline_seconds=3000) for size in (0.25, 1, 3)),
    *(Job(group="saving", gigabytes=0.25, tensors=count, rounds=5) for count in (100, 1_000, 10_000)),
    Job(group="saving", gigabytes=0.25, tensors=100_000, rounds=2, deadline_seconds=3000),
    *(Job(group="stalls", gigabytes=size, rounds=9) for size in (0.25, 1)),
    Job(group="stalls", gigabytes=0.25, tensors=100_000, rounds=2, deadline_seconds=3000),
    Job(group="training", gigabytes=1, rounds=9),
    *(Job(group="memory", gigabytes=size, count=50) for size in (1, 0.25)),
    *(Job(group="loading", gigabytes=size, rounds=7, deadline_seconds=3000) for size in (0.25, 1, 3)),
    *(Job(group="loading", gigabytes=0.25, tensors=count, rounds=5) for count in (100, 10_000)),
    Job(group="loading", gigabytes=0.25, tensors=100_000, rounds=2, deadline_seconds=3000),
    *(Job(group="ranks", gigabytes=size, rounds=9, count=count) for size in (0.25, 1) for count in (2, 4)),
    # A deleted object keeps its place on the server's disk, so there are few rounds of the large one.
    Job(group="s3", gigabytes=1, rounds=2),
    Job(group="s3", gigabytes=0.25, rounds=7),
    Job(group="metadata", rounds=100),
    *(Job(group="runs", rounds=500, count=count) for count in (1_000, 10_000, 100_000)),
    *(Job(group="crowd", count=count) for count in (1, 100, 1_000, 10_000)),
    Job(group="restart", rounds=7, count=4),
)
GROUPS = tuple(dict.fromkeys(job.group for job in QUICK))
