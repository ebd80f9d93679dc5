"""What happened in a soak, in a few lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ckptd.testing.soak_custody import Custody
from ckptd.testing.soak_journal import Tally
from ckptd.wire import RunInfo

UPKEEP = {
    "checkpoint-verified": "verified", "checkpoints-retired": "retired", "checkpoints-purged": "purged",
    "checkpoint-pinned": "pinned", "checkpoint-unpinned": "unpinned", "checkpoint-held": "held",
    "checkpoint-released": "released", "checkpoint-quarantined": "quarantined",
    "checkpoint-reinstated": "reinstated", "rolled-back": "rolled back",
}  # fmt: skip


def summary(
    tally: Tally, infos: Sequence[RunInfo], runs: Mapping[str, Custody], services: Collection[str]
) -> list[str]:
    """`runs` were read to their ends; `services` are the actors of all lives of the services."""
    fates, kinds, by_services = Counter[str](), Counter[str](), Counter[str]()
    grounds, retired, retired_by_services, silenced = Counter[str](), 0, 0, 0
    for run, custody in runs.items():
        found = custody.fates()
        fates.update(found[save] for save in tally.durable[run] if save in found)
        for (kind, actor), count in custody.records.items():
            kinds[UPKEEP.get(kind, "")] += count
            by_services[UPKEEP.get(kind, "")] += count if actor in services else 0
        retired += custody.saves_retired.total()
        retired_by_services += sum(custody.saves_retired[actor] for actor in services)
        grounds += custody.grounds
        silenced += custody.silenced
    del kinds[""], by_services[""]
    return [
        f"operations: {tally.operations.total()} ({listed(tally.operations)})",
        f"runs: {len(infos)}, with {sum(info.records for info in infos)} records,"
        f" of which {sum(info.void_records for info in infos)} are void",
        f"generations: {sum(info.generation for info in infos)}",
        f"commits: {sum(info.checkpoints for info in infos)},"
        f" {sum(map(len, tally.durable.values()))} of them acknowledged: {listed(fates)}",
        f"refused for good: {sum(map(len, tally.refused.values()))}",
        f"upkeep records: {listed(kinds)}; by services: {listed(by_services)}",
        f"checkpoints retired: {retired}, {retired_by_services} of them by services",
        f"quarantines: {listed(grounds)}",
        f"holds that ended by silence: {silenced}",
        f"damaged on purpose: {sum(map(len, tally.damaged_saves.values()))}",
        f"events: {listed(tally.events)}",
    ]


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
