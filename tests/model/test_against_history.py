"""The code and the model come to the same verdicts: on every log within bounds, for every record that anybody could
have asked for by then.

The logs are met breadth first, each by one shortest way. Beside each fold of the model stands the real state, which
came from the bytes of the same records. What the two judge differently on purpose is said by `_left_out` and
`_may_wait`, and nowhere else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import pytest

from ckptd import encoding, history, lineage
from ckptd.digests import sha256_hex
from ckptd.records import Body, RunCreated
from ckptd.state import RunState
from ckptd.verdicts import never as refused
from ckptd.verdicts import void
from tests.model.bodies import asked, body_of, fold_of
from tests.model.configurations import UNDER_WAY
from tests.model.folding import apply
from tests.model.refusals import never
from tests.model.rules import (
    GENERATIONS,
    Fold,
    Ground,
    Kind,
    Record,
    Rules,
    bit,
    generation_of,
    judge,
)
from tests.model.states import Bounds, Event
from tests.model.telling import say

CREATED = RunCreated(fingerprint="f" * 32)
STARTS = Bounds(incarnations=3, fallbacks=1, saves=2, commits=3)
ABORTS = Bounds(incarnations=3, fallbacks=1, commits=2, aborts=True)
QUARANTINE = Bounds(saves=2, commits=3, quarantines=2, reinstates=1, rollbacks=1, verifies=True, history=UNDER_WAY)
CRASH_LOOPS = Bounds(incarnations=3, fallbacks=1, commits=3, quarantines=2, reinstates=1, history=UNDER_WAY)
# Two checkpoints were doubted since the last commit, and the second was reinstated.
DOUBTED = (
    *UNDER_WAY,
    Record(Kind.COMMITTED, 3),
    *(Record(Kind.OPENED, attempt) for attempt in range(1, 7)),
    Record(Kind.STARTED, 1, number=2, point=3, by=1),
    Record(Kind.STARTED, 2, number=3, point=3, by=2),
    Record(Kind.QUARANTINED, 3, ground=Ground.CRASH_LOOP),
    Record(Kind.STARTED, 3, number=4, point=2, by=3),
    Record(Kind.STARTED, 4, number=5, point=2, by=4),
    Record(Kind.QUARANTINED, 2, ground=Ground.CRASH_LOOP),
    Record(Kind.REINSTATED, 2, turn=1),
)
DOUBTS = Bounds(incarnations=7, commits=4, quarantines=3, reinstates=1, history=DOUBTED)
PEOPLE = Bounds(saves=3, commits=3, pins=2, retires=1, verifies=True, history=UNDER_WAY)
RETENTION = Bounds(saves=3, commits=4, quarantines=1, retires=2, verifies=True, objects=True, history=UNDER_WAY)
BORROWING = Bounds(saves=3, commits=4, retires=1, verifies=True, borrows=1, objects=True, history=UNDER_WAY)
LENDERS = Bounds(saves=3, commits=3, quarantines=1, retires=1, verifies=True, borrows=2, history=UNDER_WAY)
BOUNDS = {
    "starts": STARTS,
    "aborts": ABORTS,
    "quarantine": QUARANTINE,
    "crash loops": CRASH_LOOPS,
    "doubts": DOUBTS,
    "people": PEOPLE,
    "retention": RETENTION,
    "borrowing": BORROWING,
    "lenders": LENDERS,
}


def within(bounds: Bounds, record: Record, fold: Fold) -> bool:
    """Whether the search goes on from the fold that this record made."""
    return (
        fold.opened <= bounds.incarnations
        and len(fold.generations) <= GENERATIONS
        and sum(generation.fallback_of > 0 for generation in fold.generations) <= bounds.fallbacks
        and fold.committed.bit_count() <= bounds.commits
        and (bounds.aborts or not fold.aborted)
        and sum((turn + 1) // 2 for turn in fold.turns) <= bounds.quarantines
        and sum(turn // 2 for turn in fold.turns) <= bounds.reinstates
        and fold.rollbacks <= bounds.rollbacks
        and (bounds.verifies or record.kind is not Kind.VERIFIED)
        and sum(fold.pin_turns) <= bounds.pins
        and fold.retired.bit_count() <= bounds.retires
        and len(fold.lenders) <= bounds.borrows
        and (bounds.objects or not fold.purged)
    )


@dataclass(frozen=True)
class Log:
    """A log that both hold: what the model makes of it, what the code does, and its newest record."""

    fold: Fold
    state: RunState
    record: Record | None = None
    before: Log | None = None

    def told(self) -> str:
        earlier = self.before.told() if self.before is not None else ""
        return earlier + (f"\n  {say(Event('record', self.record))}" if self.record is not None else "")


class Comparison:
    """`differences` is what there is to it; `logs`, `verdicts` and `met` say afterwards how much was compared."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules, self.bounds = rules, bounds
        self.logs = self.verdicts = 0
        self.met: Counter[Kind] = Counter()

    def differences(self) -> Iterator[str]:
        """Each with the records before it. After one of them the search goes on where both still agree."""
        log = Log(Fold(), _appended(RunState(), CREATED))
        for record in self.bounds.history:
            log = self._after(log, record, body_of(log.fold, record, log.state))
        met, queue = {log.fold}, deque([log])
        while queue:
            log = queue.popleft()
            self.logs += 1
            for record in asked(log.fold, self.bounds.saves):
                body = body_of(log.fold, record, log.state)
                self.verdicts += 1
                counts, difference = self._verdicts(log, record, body)
                if difference:
                    yield f"{difference}{log.told()}\n  and now: {record}"
                if not counts or difference:
                    continue
                fold = self._applied(log.fold, record)
                if fold in met or not within(self.bounds, record, fold):
                    continue
                met.add(fold)
                after = self._after(log, record, body)
                if fold_of(after.state) == fold:
                    queue.append(after)
                else:
                    yield f"the code makes {fold_of(after.state)} of it, the model {fold}{after.told()}"

    def _verdicts(self, log: Log, record: Record, body: Body) -> tuple[bool, str]:
        """Whether the record counts, and what the two say differently of it."""
        verdict = history.judge(log.state, body)
        counts = judge(self.rules, _left_out(log.fold, record), record)
        if verdict.accepted != counts:
            return counts, f"it counts for the {'model' if counts else 'code'} only, {verdict}"
        if counts or body.rid in log.state.accepted:
            return counts, ""  # a repeat finds its own earlier write, and whoever asks is told that it counts (A4)
        final = never(self.rules, log.fold, record)
        if verdict.final != final and not (final and _may_wait(log.fold, record)):
            return counts, f"it is refused for good by the {'model' if final else 'code'} only, {verdict}"
        return counts, ""

    def _after(self, log: Log, record: Record, body: Body) -> Log:
        self.met[record.kind] += 1
        return Log(self._applied(log.fold, record), _appended(log.state, body), record, log)

    def _applied(self, fold: Fold, record: Record) -> Fold:
        return apply(self.rules, fold, record)._replace(unread=0)  # no rule looks at that


def _left_out(fold: Fold, record: Record) -> Fold:
    """A checkpoint may be verified again, which changes nothing but when that was: the model leaves it out."""
    return fold._replace(verified=fold.verified & ~bit(record.about)) if record.kind is Kind.VERIFIED else fold


def _may_wait(fold: Fold, record: Record) -> bool:
    """What can never count MAY be refused for good (A2); who does not refuse it reads on and asks once more. The code
    says one reason, and one that may pass stands before one that does not: that no generation is ready (V7, V18), and
    that a checkpoint is not valid, where it is to be read or rolled back to."""
    current = fold.generations[-1]
    going = current.ready and not current.closed
    match record.kind:
        case Kind.COMMITTED:
            return generation_of(record.about) == len(fold.generations) and not going
        case Kind.RETIRED:
            return not going
        case Kind.VERIFIED | Kind.ROLLED_BACK:
            return bool(fold.retired & bit(record.about))
        case _:
            return False


def _appended(state: RunState, body: Body) -> RunState:
    """The state after one more record, which went through its bytes."""
    seq, after = state.seq + 1, state.snapshot()
    data = encoding.encode(encoding.record(seq, state.digest, body, actor="model", time=""))
    assert history.advance(after, encoding.decode(data, key="model", seq=seq), sha256_hex(data)).accepted
    return after


def _compared(monkeypatch: pytest.MonkeyPatch, name: str, rules: Rules) -> tuple[Comparison, str]:
    """The first difference, "" for none. A crash loop takes as few starts as in the model, to be reached soon."""
    monkeypatch.setattr(lineage, "CRASH_LOOP_STARTS", Rules().crash_loop_starts)
    compared = Comparison(rules, BOUNDS[name])
    found = next(compared.differences(), "")
    print(f"{name}: {compared.logs} logs, {compared.verdicts} verdicts, {dict(compared.met)}\n{found}")
    return compared, found


@pytest.mark.parametrize("name", BOUNDS)
def test_the_code_and_the_model_come_to_the_same_verdicts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, found = _compared(monkeypatch, name, Rules())
    assert not found, found
    assert compared.verdicts > 5 * compared.logs > 500
    bounds = BOUNDS[name]
    wanted = {
        Kind.ABORTED: bounds.aborts,
        Kind.QUARANTINED: bounds.quarantines,
        Kind.REINSTATED: bounds.reinstates,
        Kind.ROLLED_BACK: bounds.rollbacks,
        Kind.VERIFIED: bounds.verifies,
        Kind.PINNED: bounds.pins,
        Kind.UNPINNED: bounds.pins > 1,
        Kind.RETIRED: bounds.retires,
        Kind.PURGED: bounds.objects,
    }
    missing = {Kind.STARTED, Kind.READY, Kind.COMMITTED, *(kind for kind in wanted if wanted[kind])} - set(
        compared.met
    )
    assert not missing, f"the bounds leave out {missing}"


# A rule of the model taken away, and where it must be missed.
WEAKENED_MODEL: dict[str, tuple[str, Rules]] = {
    "V8": ("starts", Rules(fence=False)),
    "V2": ("starts", Rules(age_by_opening=False)),
    "V7": ("starts", Rules(ready_before_commit=False)),
    "V6": ("starts", Rules(fallback_before_ready=False)),
    "V10": ("starts", Rules(steps_rise=False)),
    "V11": ("quarantine", Rules(along_the_line=False)),
    "V5": ("quarantine", Rules(never_from_nothing=False)),
    "V12": ("quarantine", Rules(two_readers=False)),
    "V15-turns": ("quarantine", Rules(turns=False)),
    "V15-purged": ("retention", Rules(reinstate_purged=True)),
    "V16": ("quarantine", Rules(rollback_closes=False)),
    "V17": ("people", Rules(pins_stay=False)),
    "V18-judged": ("retention", Rules(reader_judges_retirement=False)),
    "V18-ready": ("retention", Rules(retire_when_ready=False)),
    "V18-point": ("retention", Rules(resume_point_stays=False)),
    "V18-two": ("retention", Rules(min_keep=1)),
    "V18-verified": ("retention", Rules(only_verified_count=False)),
    "V18-quarantine": ("retention", Rules(quarantine_unverifies=False)),
    "V19": ("borrowing", Rules(lenders_stay=False)),
    "V20-last": ("crash loops", Rules(doubt_the_last=True)),
    "V20-starts": ("crash loops", Rules(crash_loop_starts=1)),
    "V20-doubts": ("doubts", Rules(max_doubts=3)),
    "V21": ("borrowing", Rules(lenders_are_kept=False)),
}


@pytest.mark.parametrize("rule", WEAKENED_MODEL)
def test_a_rule_that_the_model_lacks_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, rules = WEAKENED_MODEL[rule]
    assert _compared(monkeypatch, name, rules)[1], f"{rule} makes no difference within the bounds of {name}"


# What the code's rules stand on, replaced by less.
WEAKENED_CODE: dict[str, tuple[str, str, object]] = {
    "V4": ("starts", "ckptd.history.resume_point", lambda state: None),
    "V11": (
        "quarantine",
        "ckptd.history.resume_point",
        lambda state: max(state.checkpoints.values(), key=attrgetter("step"), default=None),
    ),
    "V16": ("quarantine", "ckptd.upkeep.is_valid", lambda state, save: save in state.checkpoints),
    "V18-kept": ("retention", "ckptd.upkeep.protection", lambda state: {}),
    "V18-two": ("retention", "ckptd.upkeep.MIN_KEEP", 1),
    "V19": ("borrowing", "ckptd.upkeep.borrowers", lambda state: {}),
    "V20-doubts": ("doubts", "ckptd.lineage.MAX_DOUBTS", 3),
    "A2-fenced": ("starts", "ckptd.history.fenced", void),
    "A2-never": ("aborts", "ckptd.history.never", void),
    "A2-void": ("starts", "ckptd.history.void", refused),
}


@pytest.mark.parametrize("rule", WEAKENED_CODE)
def test_a_rule_that_the_code_lacks_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, what, instead = WEAKENED_CODE[rule]
    monkeypatch.setattr(what, instead)
    assert _compared(monkeypatch, name, Rules())[1], f"{rule} makes no difference within the bounds of {name}"
