"""The rules of the log once more, written from docs/PROTOCOL.md and not from the code: the second opinion.

Small integers instead of names: incarnations are counted in the order in which they were opened, generations from 1,
and a save is `(generation - 1) * SAVES + k`. `judge` says whether a record counts after a fold; `refusals.never`
whether the request behind it can still count in any later one; `folding.apply` what it changes. `Rules` has a switch
for each rule that the model can do without, to see what breaks.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

SAVES = 3  # of a generation, at most
GENERATIONS = 7


class Kind(IntEnum):
    OPENED = 0
    STARTED = 1
    READY = 2
    COMMITTED = 3
    ABORTED = 4
    QUARANTINED = 5
    REINSTATED = 6
    ROLLED_BACK = 7
    VERIFIED = 8
    PINNED = 9
    UNPINNED = 10
    RETIRED = 11
    PURGED = 12


class Ground(IntEnum):
    DAMAGE = 0  # two readers saw it
    ONE_READER = 1
    OPERATOR = 2
    CRASH_LOOP = 3


class Record(NamedTuple):
    """`about` is the incarnation, generation or save; `turn` how often the topic was decided before. Of a start also
    `number`, `point` (0: from nothing), `fallback_of` (0: none) and `by`, the incarnation that really wrote it, which
    no rule can see. Of a commit `lender`, the save whose payload it needs, too (0: none)."""

    kind: Kind
    about: int
    turn: int = 0
    number: int = 0
    point: int = 0
    fallback_of: int = 0
    by: int = 0
    ground: Ground = Ground.DAMAGE
    lender: int = 0


class Rules(NamedTuple):
    """The protocol. Each field is changed by one weakened variant."""

    fence: bool = True  # V8 by the reader; without, only by the writer, before it writes
    age_by_opening: bool = True  # V2; without, by the time of the begin
    unique_attempts: bool = True  # S1; without, the restart count, which starts again at 0
    ready_before_commit: bool = True  # V7
    fallback_before_ready: bool = True  # V6
    frozen_answer: bool = True  # V4; without, each rank asks where to resume
    steps_rise: bool = True  # V10
    along_the_line: bool = True  # V11; without, the highest step
    never_from_nothing: bool = True  # V5
    two_readers: bool = True  # V12
    turns: bool = True  # a topic that comes up again is numbered; without, a quarantine is accepted once, ever
    turn_before_reading: bool = True  # the turn is that of the time of the evidence, not of the write
    rollback_closes: bool = True
    reader_judges_retirement: bool = True  # without, only the writer, on the prefix it read
    retire_when_ready: bool = True
    resume_point_stays: bool = True
    pins_stay: bool = True
    only_verified_count: bool = True
    quarantine_unverifies: bool = True
    min_keep: int = 2
    reinstate_purged: bool = False
    doubt_the_last: bool = False  # crash-loop: also the only valid one
    crash_loop_starts: int = 2  # fewer than the product's, to be reached soon
    max_doubts: int = 2
    collect_ended_only: bool = True  # of generations that ended; without, by age
    collect_again: bool = True  # look at what was purged again, for late uploads
    lenders_stay: bool = True  # V19, K3; without, what is retired is collected though others borrow from it
    lenders_are_kept: bool = True  # V21; without, what is retired may be borrowed from
    clean_up_unknown: bool = False  # the writer deletes its payload when a commit was not answered


class Generation(NamedTuple):
    attempt: int
    point: int
    fallback_of: int
    by: int
    ready: bool = False
    closed: bool = False
    doubted: int = 0  # the turn of the quarantine of `point` when it started


class Fold(NamedTuple):
    """What holds after the accepted records. Sets of saves are bit masks."""

    opened: int = 0
    generations: tuple[Generation, ...] = ()
    parents: tuple[tuple[int, int], ...] = ()  # (save, parent), in the order of the commits
    lenders: tuple[tuple[int, int], ...] = ()  # (save, lender), of those that borrow
    tip: int = 0
    committed: int = 0
    aborted: int = 0
    quarantined: int = 0
    verified: int = 0
    unread: int = 0  # quarantined, and not read in full since: for the invariants, no rule looks at it
    pinned: int = 0
    retired: int = 0
    purged: int = 0
    turns: tuple[int, ...] = (0,) * (SAVES * GENERATIONS + 1)  # of quarantine and its end, by save
    pin_turns: tuple[int, ...] = (0,) * (SAVES * GENERATIONS + 1)
    rollbacks: int = 0
    doubts: int = 0
    starts: tuple[int, ...] = (0,) * (SAVES * GENERATIONS + 1)  # from each save, since the last commit


def bit(save: int) -> int:
    return 1 << save


def save_id(generation: int, k: int) -> int:
    """The k-th save of a generation, k from 1."""
    return (generation - 1) * SAVES + k


def generation_of(save: int) -> int:
    return (save - 1) // SAVES + 1


def saves_in(mask: int) -> list[int]:
    return [save for save in range(1, mask.bit_length()) if mask >> save & 1]


def line(fold: Fold, save: int) -> list[int]:
    """`save` and its ancestors, newest first."""
    parents = dict(fold.parents)
    found = []
    while save:
        found.append(save)
        save = parents[save]
    return found


def step_of(fold: Fold, save: int) -> int:
    """Each generation goes on from the step it resumed at, the first in strides of two: so the highest step is not
    the newest one."""
    if not save:
        return -1
    generation = generation_of(save)
    point = fold.generations[generation - 1].point
    k = save - save_id(generation, 0)
    return max(step_of(fold, point), 0) + k * (2 if generation == 1 else 1)


def valid(fold: Fold, save: int) -> bool:
    return bool(fold.committed & ~fold.quarantined & ~fold.retired & bit(save))


def needed(fold: Fold, save: int) -> bool:
    """Whether a checkpoint that is not retired needs the payload of this save, its own or borrowed."""
    users = [save, *(borrower for borrower, lender in fold.lenders if lender == save)]
    return any(fold.committed & ~fold.retired & bit(user) for user in users)


def lends(fold: Fold, save: int) -> bool:
    """Whether a commit may borrow from it: its bytes are not doubted, and stay."""
    return bool(fold.committed & ~fold.quarantined & bit(save)) and needed(fold, save)


def resume_point(rules: Rules, fold: Fold) -> int:
    if not rules.along_the_line:
        good = [save for save, _ in fold.parents if valid(fold, save)]
        return max(good, key=lambda save: step_of(fold, save), default=0)
    return next((save for save in line(fold, fold.tip) if valid(fold, save)), 0)


def newest_verified(rules: Rules, fold: Fold) -> list[int]:
    """The verified valid checkpoints of the line, newest first."""
    counted = fold.verified if rules.only_verified_count else fold.committed
    return [save for save in line(fold, fold.tip) if valid(fold, save) and counted & bit(save)]


def judge(rules: Rules, fold: Fold, record: Record) -> bool:
    """Whether the record counts."""
    save = record.about
    current = fold.generations[-1] if fold.generations else None
    match record.kind:
        case Kind.OPENED:
            return save == fold.opened
        case Kind.STARTED:
            return _judge_start(rules, fold, record)
        case Kind.READY:
            return current is not None and save == len(fold.generations) and not (current.ready or current.closed)
        case Kind.COMMITTED:
            return _judge_commit(rules, fold, record)
        case Kind.ABORTED:
            taken = (fold.committed | fold.aborted) & bit(save)
            return _in_force(rules, fold, generation_of(save)) and not taken
        case Kind.QUARANTINED:
            return _judge_quarantine(rules, fold, record)
        case Kind.REINSTATED:
            given_up = fold.quarantined & ~fold.retired | (fold.purged if rules.reinstate_purged else 0)
            return bool(given_up & bit(save)) and record.turn == fold.turns[save]
        case Kind.ROLLED_BACK:
            return current is not None and valid(fold, save) and record.turn == fold.rollbacks
        case Kind.VERIFIED:
            return valid(fold, save) and not fold.verified & bit(save) and record.turn == fold.turns[save]
        case Kind.PINNED | Kind.UNPINNED:
            kept = bool(fold.committed & ~fold.retired & bit(save))
            pinned = bool(fold.pinned & bit(save))
            return kept and pinned == (record.kind is Kind.UNPINNED) and record.turn == fold.pin_turns[save]
        case Kind.RETIRED:
            return bool(fold.committed & ~fold.retired & bit(save)) and (
                not rules.reader_judges_retirement or may_retire(rules, fold, save)
            )
        case Kind.PURGED:
            return bool(fold.retired & ~fold.purged & bit(save)) and not (rules.lenders_stay and needed(fold, save))


def _judge_start(rules: Rules, fold: Fold, record: Record) -> bool:
    if record.about >= fold.opened or too_late(rules, fold, record):
        return False
    if record.fallback_of > len(fold.generations) or record.number != len(fold.generations) + 1:
        return False
    if record.point == 0 and fold.tip and rules.never_from_nothing:
        return False
    return record.point == resume_point(rules, fold)


def too_late(rules: Rules, fold: Fold, record: Record) -> bool:
    """Whether this incarnation is too late to begin, for good."""
    if not fold.generations:
        return False
    current = fold.generations[-1]
    if not record.fallback_of:
        if rules.age_by_opening:
            return record.about <= current.attempt
        return any(g.attempt == record.about for g in fold.generations)
    if len(fold.generations) != record.fallback_of:
        return len(fold.generations) > record.fallback_of
    return current.attempt != record.about or (current.ready and rules.fallback_before_ready)


def _in_force(rules: Rules, fold: Fold, number: int) -> bool:
    """Whether records of this generation count: it is the current one, and no roll-back closed it."""
    if not 0 < number <= len(fold.generations) or (rules.fence and number != len(fold.generations)):
        return False
    return not fold.generations[number - 1].closed


def _judge_commit(rules: Rules, fold: Fold, record: Record) -> bool:
    save, lender = record.about, record.lender
    number = generation_of(save)
    if lender and not (fold.committed & bit(lender) if not rules.lenders_are_kept else lends(fold, lender)):
        return False
    if (fold.committed | fold.aborted) & bit(save) or not _in_force(rules, fold, number):
        return False
    if rules.ready_before_commit and not fold.generations[number - 1].ready:
        return False
    return not rules.steps_rise or step_of(fold, save) >= step_of(fold, fold.tip)


def _judge_quarantine(rules: Rules, fold: Fold, record: Record) -> bool:
    save = record.about
    if not valid(fold, save) or record.turn != (fold.turns[save] if rules.turns else 0):
        return False
    if not rules.turns and fold.turns[save]:
        return False  # its rid was accepted before
    if record.ground is Ground.ONE_READER:
        return not rules.two_readers
    return record.ground is not Ground.CRASH_LOOP or in_crash_loop(rules, fold) == save


def in_crash_loop(rules: Rules, fold: Fold) -> int:
    """The resume point, if so many generations started from it without a commit that it is doubted; else 0."""
    point = resume_point(rules, fold)
    if not point or fold.starts[point] < rules.crash_loop_starts or fold.doubts >= rules.max_doubts:
        return 0
    another = any(valid(fold, save) for save in line(fold, fold.tip) if save != point)
    return point if another or rules.doubt_the_last else 0


def may_retire(rules: Rules, fold: Fold, save: int) -> bool:
    if not valid(fold, save) and not fold.quarantined & ~fold.retired & bit(save):
        return False
    current = fold.generations[-1] if fold.generations else None
    if current is None or current.closed or (rules.retire_when_ready and not current.ready):
        return False
    if rules.resume_point_stays and save == resume_point(rules, fold):
        return False
    newest = newest_verified(rules, fold)[: rules.min_keep]
    if len(newest) < rules.min_keep or save in newest:
        return False
    return not (rules.pins_stay and fold.pinned & bit(save))
