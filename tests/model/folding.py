"""What an accepted record changes, and all logs met so far.

Void records change nothing, so a log is told by its accepted ones: a node stands for all logs that differ in records
that lost. `Logs.append` judges, folds and checks once for each pair of a node and a record.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.model.refusals import collectable, never, requests
from tests.model.rules import (
    Fold,
    Generation,
    Ground,
    Kind,
    Record,
    Rules,
    bit,
    judge,
    save_id,
)

NONE = Fold().starts

Check = Callable[["Logs", int, Record, int], str]


def apply(rules: Rules, fold: Fold, record: Record) -> Fold:
    save = record.about
    match record.kind:
        case Kind.OPENED:
            return fold._replace(opened=fold.opened + 1)
        case Kind.STARTED:
            doubted = fold.turns[record.point]
            begun = Generation(save, record.point, record.fallback_of, record.by, doubted=doubted)
            counts = record.point and not record.fallback_of
            starts = _next(fold.starts, record.point) if counts else fold.starts
            return fold._replace(generations=(*fold.generations, begun), tip=record.point, starts=starts)
        case Kind.READY:
            point, doubted = fold.generations[save - 1].point, fold.generations[save - 1].doubted
            good = bit(point) if point and fold.turns[point] == doubted else 0  # read in full, and not doubted since
            read = fold._replace(verified=fold.verified | good, unread=fold.unread & ~good)
            return _with_current(read, ready=True)
        case Kind.COMMITTED:
            return fold._replace(
                parents=(*fold.parents, (save, fold.tip)),
                lenders=(*fold.lenders, (save, record.lender)) if record.lender else fold.lenders,
                tip=save,
                committed=fold.committed | bit(save),
                doubts=0,
                starts=NONE,
            )
        case Kind.ABORTED:
            return fold._replace(aborted=fold.aborted | bit(save))
        case Kind.QUARANTINED:
            return fold._replace(
                quarantined=fold.quarantined | bit(save),
                verified=fold.verified & ~bit(save) if rules.quarantine_unverifies else fold.verified,
                unread=fold.unread | bit(save),
                turns=_next(fold.turns, save),
                doubts=fold.doubts + (record.ground is Ground.CRASH_LOOP),
            )
        case Kind.REINSTATED:
            return fold._replace(
                quarantined=fold.quarantined & ~bit(save),
                retired=fold.retired & ~bit(save),
                purged=fold.purged & ~bit(save),
                turns=_next(fold.turns, save),
                starts=(*fold.starts[:save], 0, *fold.starts[save + 1 :]),
            )
        case Kind.ROLLED_BACK:
            closed = _with_current(fold, closed=True) if rules.rollback_closes else fold
            return closed._replace(tip=save, rollbacks=fold.rollbacks + 1, doubts=0, starts=NONE)
        case Kind.VERIFIED:
            return fold._replace(verified=fold.verified | bit(save), unread=fold.unread & ~bit(save))
        case Kind.PINNED:
            return fold._replace(pinned=fold.pinned | bit(save), pin_turns=_next(fold.pin_turns, save))
        case Kind.UNPINNED:
            return fold._replace(pinned=fold.pinned & ~bit(save), pin_turns=_next(fold.pin_turns, save))
        case Kind.RETIRED:
            return fold._replace(retired=fold.retired | bit(save))
        case Kind.PURGED:
            return fold._replace(purged=fold.purged | bit(save))


def _with_current(fold: Fold, *, ready: bool = False, closed: bool = False) -> Fold:
    current = fold.generations[-1]
    changed = current._replace(ready=current.ready or ready, closed=current.closed or closed)
    return fold._replace(generations=(*fold.generations[:-1], changed))


def _next(turns: tuple[int, ...], save: int) -> tuple[int, ...]:
    return (*turns[:save], turns[save] + 1, *turns[save + 1 :])


class Logs:
    """All logs met so far. A log is a node's number; 0 is the empty one.

    Merged, two logs that fold to the same state are one node: what an older prefix can still do is then covered by
    induction (`invariants.check_append`), and readers are those of the whole log. Not merged, a node has one past,
    and `prefixes` are what its readers may have read.
    """

    def __init__(self, rules: Rules, check: Check, *, merged: bool) -> None:
        self.rules, self.merged = rules, merged
        self._check = check
        self.folds = [Fold()]
        self.prefixes: list[tuple[int, ...]] = [(0,)]  # itself last
        self._after: list[dict[Record, tuple[int, str]]] = [{}]
        self._nodes: dict[Fold, int] = {Fold(): 0}
        self._refused: dict[int, frozenset[Record]] = {}
        self._collected: dict[int, frozenset[int]] = {}

    def append(self, log: int, record: Record) -> tuple[int, str]:
        """The log with the record, and the invariant that is broken by it; the same log if the record is void."""
        known = self._after[log].get(record)
        if known is None:
            known = (log, "")
            if judge(self.rules, self.folds[log], record):
                after = apply(self.rules, self.folds[log], record)
                node = self._node(log, after)
                known = (node, self._check(self, log, record, node))
            self._after[log][record] = known
        return known

    def refused(self, log: int) -> frozenset[Record]:
        """The requests that a reader of this log refuses for good."""
        known = self._refused.get(log)
        if known is None:
            fold = self.folds[log]
            asked = requests(fold.opened, len(fold.generations), max(fold.turns), fold.rollbacks, fold.retired)
            known = frozenset(request for request in asked if never(self.rules, fold, request))
            self._refused[log] = known
        return known

    def collected(self, log: int) -> frozenset[int]:
        """The saves that a collector which reads this log deletes what there is of."""
        known = self._collected.get(log)
        if known is None:
            fold = self.folds[log]
            saves = range(1, save_id(len(fold.generations) + 1, 1))
            known = frozenset(save for save in saves if collectable(self.rules, fold, save))
            self._collected[log] = known
        return known

    def _node(self, log: int, after: Fold) -> int:
        node = self._nodes.get(after) if self.merged else None
        if node is None:
            node = len(self.folds)
            self.folds.append(after)
            self.prefixes.append((node,) if self.merged else (*self.prefixes[log], node))
            self._after.append({})
            if self.merged:
                self._nodes[after] = node
        return node
