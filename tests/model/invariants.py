"""What must hold of every log. Each check names the invariant of docs/TESTING.md that is broken, or is silent.

They are written from what the records do to people's data, not from the rules: who trained on what, what was promised
to whom. `Machine` adds the ones that need to know what lies on the storage.
"""

from __future__ import annotations

from tests.model.folding import Logs
from tests.model.refusals import never, request_of
from tests.model.rules import (
    Fold,
    Ground,
    Kind,
    Record,
    bit,
    generation_of,
    line,
    newest_verified,
    resume_point,
    save_id,
    saves_in,
    step_of,
)

# By these the resume point may move back.
DECISIONS = (Kind.QUARANTINED, Kind.REINSTATED, Kind.ROLLED_BACK)


def check_append(logs: Logs, log: int, record: Record, node: int) -> str:
    """What is broken by this record being accepted after this log, which makes it the log `node`."""
    before, after = logs.folds[log], logs.folds[node]
    if _was_accepted(before, record):
        return "I5 a record was accepted twice"
    by_kind = {
        Kind.STARTED: _start,
        Kind.COMMITTED: _commit,
        Kind.QUARANTINED: _quarantine,
        Kind.RETIRED: _retirement,
        Kind.REINSTATED: _reinstated,
    }.get(record.kind)
    broken = by_kind(logs, before, record, after) if by_kind is not None else ""
    return broken or _refused(logs, log, record, node) or _going_back(logs, before, record, after)


def _was_accepted(before: Fold, record: Record) -> bool:
    """Whether a record of the same rid is in the log."""
    about = bit(record.about)
    match record.kind:
        case Kind.STARTED:
            return (record.about, record.fallback_of) in {(g.attempt, g.fallback_of) for g in before.generations}
        case Kind.READY:
            return before.generations[record.about - 1].ready
        case Kind.COMMITTED:
            return bool(before.committed & about)
        case Kind.ABORTED:
            return bool(before.aborted & about)
        case Kind.QUARANTINED | Kind.REINSTATED:
            return record.turn < before.turns[record.about]
        case Kind.PINNED | Kind.UNPINNED:
            return record.turn < before.pin_turns[record.about]
        case Kind.ROLLED_BACK:
            return record.turn < before.rollbacks
        case Kind.RETIRED:
            return bool(before.retired & about)
        case _:
            return False


def _refused(logs: Logs, log: int, record: Record, node: int) -> str:
    """What a reader of an older log refused for good, or collects, must stay refused and nobody's.

    With merged logs by induction: nothing that is refused now is accepted now or no longer refused after."""
    if not logs.merged:
        refused = any(never(logs.rules, logs.folds[prefix], record) for prefix in logs.prefixes[log])
        return "I7 it was refused for good to a reader of an older log" if refused else ""
    if request_of(record) in logs.refused(log) or not logs.refused(log) <= logs.refused(node):
        return "I7 what was refused for good can be accepted later"
    if not logs.collected(log) <= logs.collected(node):
        return "I13 a collector that read an older log deletes what is needed"
    return ""


def _start(logs: Logs, before: Fold, record: Record, after: Fold) -> str:
    if record.point == 0 and before.committed:
        return "I17 a run that has commits starts from nothing"
    if record.point and record.point not in line(before, before.tip):
        return "I16 a start from a checkpoint that is not on the line"
    if not record.fallback_of and any(record.by <= g.by for g in before.generations):
        return "I8 an incarnation fences one that was opened after it"
    if record.fallback_of and before.generations[record.fallback_of - 1].ready:
        return "I9 ranks train on the answer that their incarnation gives up"
    return ""


def _commit(logs: Logs, before: Fold, record: Record, after: Fold) -> str:
    save, number = record.about, generation_of(record.about)
    if number < len(before.generations):
        return "I10 a commit counts after a newer generation started"
    generation = before.generations[number - 1]
    if not generation.ready:
        return "I11 a commit counts before its generation is ready"
    trained = {k for k in range(save_id(number, 1), save) if before.committed & bit(k)}
    if generation.point:
        trained.add(generation.point)
    if not trained <= set(line(after, save)):
        return "I16 what was trained on is not on the line"
    return ""


def _quarantine(logs: Logs, before: Fold, record: Record, after: Fold) -> str:
    if record.ground is Ground.ONE_READER:
        return "I19 one reader alone quarantines"
    if record.ground is Ground.CRASH_LOOP and not resume_point(logs.rules, after):
        return "I21 nobody can start, though nothing is damaged"
    return ""


def _retirement(logs: Logs, before: Fold, record: Record, after: Fold) -> str:
    if not before.generations[-1].ready:
        return "I14 what a starting generation may fall back to is retired"
    if before.pinned & bit(record.about):
        return "I13 a pinned checkpoint is retired"
    if any(before.unread & bit(save) for save in newest_verified(logs.rules, before)[: logs.rules.min_keep]):
        return "I21 retention relies on a checkpoint that nobody read since its quarantine"
    return ""


def _reinstated(logs: Logs, before: Fold, record: Record, after: Fold) -> str:
    if before.purged & bit(record.about):
        return "I12 a checkpoint without its payload"
    return ""


def _going_back(logs: Logs, before: Fold, record: Record, after: Fold) -> str:
    if record.kind in DECISIONS:
        return ""
    point, was = resume_point(logs.rules, after), resume_point(logs.rules, before)
    if step_of(after, point) < step_of(before, was):
        return "I15 the resume point moves back, and nobody decided so"
    if any(before.turns) or before.rollbacks or not before.committed:
        return ""
    newest = max(step_of(after, save) for save in saves_in(after.committed))
    if step_of(after, point) < newest:
        return "I15 an acknowledged step is behind the resume point no more"
    return ""
