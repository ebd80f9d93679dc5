"""Many seeds, on several processes; and what is told of one that failed: fewer operations and faults that do it too.

Nothing random is here: the seeds are counted up from the first one.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count

from ckptd.testing.sim.weather import FAULTS
from ckptd.testing.sim.world import OPERATIONS, Report, simulate

PROGRESS_SECONDS = 10.0
TRACE = 40


@dataclass
class Search:
    """What many seeds came to."""

    operations: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.operations += report.operations
        self.counts += report.counts
        if report.finding is not None:
            self.failed.append(report)


def search(
    first_seed: int,
    operations: int,
    *,
    processes: int = 1,
    max_failed: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Search:
    """Seeds from `first_seed` on until all have carried out `operations` storage operations together, or
    `max_failed` of them failed. With one process everything happens in this one."""
    found, began = Search(), time.monotonic()
    told = began
    for report in _reports(first_seed, processes):
        found.add(report)
        found.seconds = time.monotonic() - began
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            say(progress(found))
        if found.operations >= operations or len(found.failed) >= max_failed:
            break
    return found


def _reports(first_seed: int, processes: int) -> Iterator[Report]:
    if processes == 1:
        yield from map(simulate, count(first_seed))
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        batch = first_seed
        while True:  # in batches, for a pool draws from an endless iterator without end
            yield from pool.imap_unordered(simulate, range(batch, batch + 16 * processes))
            batch += 16 * processes


def progress(found: Search) -> str:
    pace = found.operations / max(found.seconds, 0.001)
    return (
        f"{found.operations:,} operations in {found.counts['seeds']} seeds, {found.seconds:.0f} s"
        f" ({pace:,.0f} a second): {found.counts['records']:,} records,"
        f" {found.counts['record checkpoint-committed']:,} commits, {len(found.failed)} findings"
    )


def shrink(report: Report, operations: int = OPERATIONS) -> tuple[int, list[str]]:
    """Fewer operations and kinds of faults that break the same rule: how many, and the kinds to leave out."""
    rule, without = report.rule, list[str]()

    def breaks(fewer: int, left_out: Collection[str]) -> bool:
        return simulate(report.seed, fewer, without=left_out).rule == rule

    for fault in FAULTS:
        if breaks(operations, [*without, fault]):
            without.append(fault)
    low, high = 0, operations
    while high - low > max(10, high // 20):
        middle = (low + high) // 2
        low, high = (low, middle) if breaks(middle, without) else (middle, high)
    return high, without


def replay_line(seed: int, operations: int, without: Collection[str]) -> str:
    """The command that takes the same course again."""
    options = "".join(f" --without {fault}" for fault in without)
    return f"python -m ckptd.testing.sim --seed {seed} --operations {operations}{options}"
