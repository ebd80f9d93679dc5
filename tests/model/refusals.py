"""What is final: requests that can be refused for good, and payload that can be deleted.

Whoever read an old log acts on it later, so what is final must stay so in every later log.
"""

from __future__ import annotations

from functools import cache

from tests.model.rules import (
    Fold,
    Kind,
    Record,
    Rules,
    bit,
    generation_of,
    needed,
    save_id,
    saves_in,
    step_of,
    too_late,
)


def never(rules: Rules, fold: Fold, record: Record) -> bool:
    """Whether the request can be refused for good: no later state accepts it, whatever its writer builds then."""
    save = record.about
    gone = bool(fold.retired & bit(save)) and not rules.reinstate_purged
    match record.kind:
        case Kind.STARTED:
            return too_late(rules, fold, record)
        case Kind.READY:
            return save < len(fold.generations) or _closed(fold, save)
        case Kind.COMMITTED:
            number = generation_of(save)
            if fold.aborted & bit(save) or number < len(fold.generations) or _closed(fold, number):
                return True
            if (
                record.lender
                and fold.retired & bit(record.lender)
                and not needed(fold, record.lender)
                and rules.lenders_are_kept
                and not rules.reinstate_purged
            ):
                return True
            started = number <= len(fold.generations)
            return rules.steps_rise and started and step_of(fold, save) < step_of(fold, fold.tip)
        case Kind.ABORTED:
            number = generation_of(save)
            return bool(fold.committed & bit(save)) or number < len(fold.generations) or _closed(fold, number)
        case Kind.QUARANTINED | Kind.REINSTATED:
            return gone or record.turn < fold.turns[save]
        case Kind.ROLLED_BACK:
            return gone or record.turn < fold.rollbacks
        case Kind.PINNED | Kind.UNPINNED:
            return gone or record.turn < fold.pin_turns[save]
        case Kind.VERIFIED | Kind.RETIRED:
            return gone
        case Kind.PURGED:
            return bool(fold.purged & bit(save)) and not rules.reinstate_purged
        case _:
            return False


def _closed(fold: Fold, number: int) -> bool:
    return 0 < number <= len(fold.generations) and fold.generations[number - 1].closed


@cache
def requests(opened: int, generations: int, turns: int, rollbacks: int, retired: int) -> tuple[Record, ...]:
    """What anybody could have asked for in a run of that size, as far as `never` looks at it."""
    numbers = range(1, generations + 1)
    saves = range(1, save_id(generations + 1, 1))
    return (
        *(Record(Kind.STARTED, a, fallback_of=f) for a in range(opened) for f in (0, *numbers)),
        *(Record(Kind.READY, number) for number in numbers),
        *(Record(kind, save) for kind in (Kind.COMMITTED, Kind.ABORTED, Kind.VERIFIED) for save in saves),
        *(Record(Kind.COMMITTED, save, lender=lender) for save in saves for lender in saves_in(retired)),
        *(Record(Kind.QUARANTINED, save, turn) for save in saves for turn in range(turns + 1)),
        *(Record(Kind.ROLLED_BACK, save, turn) for save in saves for turn in range(rollbacks + 1)),
    )


def request_of(record: Record) -> Record:
    """The request behind a record, told like those of `requests`."""
    kind = record.kind
    if kind is Kind.REINSTATED:
        kind = Kind.QUARANTINED
    if kind in (Kind.PINNED, Kind.UNPINNED, Kind.RETIRED):
        kind = Kind.VERIFIED
    turned = kind in (Kind.QUARANTINED, Kind.ROLLED_BACK)
    turn = record.turn if turned else 0
    return Record(kind, record.about, turn, fallback_of=record.fallback_of, lender=record.lender)


def collectable(rules: Rules, fold: Fold, save: int) -> bool:
    """Whether a collector that read this much of the log deletes what there is of the save."""
    if fold.committed & bit(save):
        again = rules.collect_again or not fold.purged & bit(save)
        return bool(fold.retired & bit(save)) and again and not (rules.lenders_stay and needed(fold, save))
    return not rules.collect_ended_only or generation_of(save) < len(fold.generations)
