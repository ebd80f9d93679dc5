"""Whether a storage does what the protocol relies on: at length for `ckptd doctor`, in short at every start.

Everything goes through the `Storage` Protocol, so any backend can be probed. A probe writes below `probe/` only and
removes exactly the keys it wrote.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckptd import layout
from ckptd.errors import AlreadyExists, CkptdError, Unavailable, Unfit, describe
from ckptd.storage import probe_checks as checks
from ckptd.storage.base import Storage
from ckptd.storage.findings import Bench, Finding, Opener, access, judged, not_raised, ok, unfit, warn
from ckptd.storage.probe_facts import facts_of, judge_clock, judge_facts
from ckptd.storage.probe_race import race_processes, race_threads
from ckptd.storage.root import open_storage

RACERS, ROUNDS = 16, 50
PROCESS_ROUNDS = 10
LARGE_BYTES = 40 * checks.MIB + 12_345  # no multiple of anything
_QUICK_FOLDER = "quick"
_log = logging.getLogger("ckptd.storage")

Tell = Callable[[str], None]


@dataclass
class Report:
    """What was found. `interrupted` is why the probe ended early: the storage did not answer any more."""

    url: str
    uuid: str
    facts: dict[str, str]
    findings: list[Finding] = field(default_factory=list)
    interrupted: Unavailable | None = None

    @property
    def tier(self) -> str:
        return self.facts.get("publish", "unknown")

    @property
    def unfit(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "unfit"]


def probe(
    url: str,
    *,
    racers: int = RACERS,
    rounds: int = ROUNDS,
    keep: bool = False,
    large_bytes: int = LARGE_BYTES,
    other: str | None = None,
    open_one: Opener | None = None,
    tell: Tell = lambda step: None,
) -> Report:
    """Probe the storage at `url`; from half a second to minutes. `ckptd doctor` calls it.

    `other` is where another mount, such as that of another host, has the same storage: every second instance is
    opened there. `tell` hears what is done next. `keep` leaves the keys for a look. `open_one` makes a storage
    instance in place of the URLs; then no processes race, as they could not use it. Errors of the first opening come
    through, `NotInitialised` above all.
    """
    urls = [url, other or url]
    turns = itertools.cycle(urls)
    bench = Bench(open_one or (lambda: open_storage(next(turns))), layout.new_nonce())
    report = Report(bench.one.url, bench.one.check_root(), {})
    race_in = urls if open_one is None and not url.startswith("memory:") else None
    try:
        for finding in _all(bench, report, racers, rounds, large_bytes, race_in, tell):
            report.findings.append(finding)
    except Unavailable as error:
        report.interrupted = error
    finally:
        if not any(finding.name == "put" for finding in report.unfit):  # else nothing came to be
            report.findings.extend(_clean_up(bench, keep))
    return report


def _all(
    bench: Bench, report: Report, racers: int, rounds: int, large_bytes: int, race_in: list[str] | None, tell: Tell
) -> Iterator[Finding]:
    marker = [*judged("marker", lambda: _marker(bench))]
    yield from marker
    if marker[0].verdict == "unfit":
        return
    tell("facts")
    yield from judged("facts", lambda: _told_facts(bench, report))
    tell("permissions")
    yield from access(bench)
    if any(finding.name in ("put", "get", "list") for finding in report.unfit):
        yield warn("the rest", "was not probed: it needs put, get and list")
        return
    steps: list[tuple[str, Callable[[], Finding | Iterator[Finding]]]] = [
        ("absence", lambda: checks.absence(bench)),
        ("second create", lambda: checks.second_create(bench)),
        ("whole or nothing", lambda: checks.whole_or_nothing(bench)),
        ("errors", lambda: checks.errors(bench)),
        ("seen by others", lambda: checks.seen_by_others(bench)),
        ("large object", lambda: checks.large_object(bench, _affordable(large_bytes, report.facts))),
        ("latency", lambda: checks.latency(bench)),
        ("clock", lambda: judge_clock(_clock(bench, report.facts))),
    ]
    if any(finding.name == "delete" and finding.verdict == "ok" for finding in report.findings):
        steps.insert(5, ("read-after-delete", lambda: checks.deletes_seen(bench)))
    steps.append(("race of threads", lambda: race_threads(bench, racers, rounds)))
    if race_in is not None:
        steps.append(("race of processes", lambda: race_processes(bench, race_in, min(rounds, PROCESS_ROUNDS))))
    for name, step in steps:
        tell(name)
        yield from judged(name, step)


def _marker(bench: Bench) -> Finding:
    one, other = bench.one.check_root(), bench.other.check_root()
    if one != other:
        return unfit(
            "marker", f"two looks found two storages: {one} and {other}", "Look which drives are mounted there."
        )
    return ok("marker", f"storage {one}")


def _told_facts(bench: Bench, report: Report) -> Iterator[Finding]:
    report.facts.update(facts_of(bench.one))
    yield from judge_facts(report.facts)


def _affordable(size: int, facts: dict[str, str]) -> int:
    """A small drive is not filled by its probe."""
    free = int(facts.get("free_bytes", 4 * size))
    return max(min(size, free // 4), checks.MIB + 12_345)


def _clock(bench: Bench, facts: dict[str, str]) -> float | None:
    told = facts.get("clock_offset_seconds")
    return checks.clock_offset(bench) if told is None else float(told)


def _clean_up(bench: Bench, keep: bool) -> Iterator[Finding]:
    """Delete what was written, each key for itself. What stays is told: it costs space and nothing else."""
    if keep:
        yield ok("left there", f"{len(bench.written)} keys below {layout.probe_key(bench.folder, 'x')[:-2]}")
        return
    failed: list[str] = []
    for key in bench.written:
        try:
            bench.one.delete(key)
        except CkptdError as error:
            failed.append(f"{key}: {describe(error)}")
            if len(failed) == 3:  # a storage that does not answer is not asked a thousand times
                break
    if failed:
        yield warn(
            "clean up", f"not everything could be deleted: {failed[0]}", "Delete what lies below probe/ by hand."
        )


def quick_probe(storage: Storage) -> list[Finding]:
    """The short form, a few small objects: the service and rank 0's client run it when they start.

    The marker, one create, its refused repetition, read, list, delete. `Unavailable` if the storage does not answer
    now, which says nothing about its fitness.
    """
    bench = Bench(lambda: storage, _QUICK_FOLDER)
    name = layout.new_nonce()
    data = name.encode()

    def created_once() -> Finding:
        key = bench.put(name, data)
        if problem := not_raised(AlreadyExists, lambda: storage.put(key, [b"other"], 5)):
            return unfit("second create", f"a taken key was created again: {problem}")
        if (found := storage.get(key, 100)) != data:
            return unfit("get", f"expected {data!r}, found {found!r}")
        if name not in bench.names(storage):
            return unfit("list", "what was written is not listed")
        return ok("second create", "is refused; the first bytes are read back and listed")

    findings = [*judged("marker", lambda: _marker(bench))]
    try:
        findings += judged("create", created_once)
    finally:
        findings += _clean_up(bench, keep=False)
    return findings


def refuse_unfit(storage: Storage) -> None:
    """`Unfit`, with the reason, if the short probe finds that the storage cannot carry a run. A storage that does not
    answer now is let through: it has its own error where it is used."""
    try:
        found = [finding for finding in quick_probe(storage) if finding.verdict == "unfit"]
    except Unavailable as error:
        _log.warning("%s could not be probed now: %s", storage.url, describe(error))
        return
    if found:
        reasons = "; ".join(f"{finding.name}: {finding.detail}" for finding in found)
        raise Unfit(f"storage {storage.url} is unfit: {reasons}", do=found[0].do, url=storage.url)
