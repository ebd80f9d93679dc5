"""The protocol with one rule taken away, for each rule: what breaks, and where.

A variant that the model does not catch is a rule that the model does not need, or a model that sees too little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.model.configurations import STARTS, UNDER_WAY
from tests.model.machine import Machine
from tests.model.rules import Rules
from tests.model.search import explore
from tests.model.slots import SlotMachine, Ways, say_slot
from tests.model.states import Bounds
from tests.model.telling import say

WHOLE, CAREFUL = Rules(), Ways()


@dataclass(frozen=True)
class Variant:
    """`breaks` are the invariants of which the shortest trace may break any; `rule` is what was taken away."""

    name: str
    rule: str
    breaks: str
    bounds: Bounds | None = None  # None: the log slot by slot
    rules: Rules = WHOLE
    ways: Ways = CAREFUL

    def search(self) -> tuple[str, str]:
        """The invariant that breaks first, "" for none, and the shortest way there."""
        if self.bounds is None:
            slots = explore(SlotMachine(self.ways))
            return slots.invariant, slots.told(say_slot)
        found = explore(Machine(self.rules, self.bounds, merged=False))
        return found.invariant, found.told(say)


# Small: here each log keeps its own past.
TWO = replace(STARTS, incarnations=2, saves=1)
DAMAGED = Bounds(rots=1, quarantines=2, faulty_reader=True, reinstates=1, commits=2, history=UNDER_WAY)
ALL_DAMAGED = Bounds(rots=2, quarantines=2, commits=2, history=UNDER_WAY)
LOOPING = Bounds(incarnations=3, crash_loops=True, quarantines=1, commits=1, history=UNDER_WAY[:4])
ROLLED_BACK = Bounds(rollbacks=1, saves=3, commits=3, history=UNDER_WAY)
KEPT = Bounds(saves=3, commits=3, rots=1, quarantines=1, verifies=True, retires=1, history=UNDER_WAY)
UNREAD = replace(KEPT, births=True)
DOUBTED = replace(KEPT, rots=0, operator=True, reinstates=1)
PINNED = replace(KEPT, rots=0, quarantines=0, pins=1)
GONE = Bounds(saves=3, commits=3, verifies=True, retires=1, objects=True, strays=1, history=UNDER_WAY)
BORROWING = Bounds(
    incarnations=1, saves=3, commits=3, verifies=True, retires=1, borrows=1, objects=True, history=UNDER_WAY
)
LATE_BORROWING = replace(BORROWING, incarnations=2, saves=2, commits=4)

VARIANTS = (
    # Storage and append
    Variant("trimmed-log", "slots are never deleted", "I1", ways=Ways(keep_slots=False)),
    Variant("next-slot-while-this-is-unknown", "A3", "I2", ways=Ways(same_slot=False)),
    Variant("unanswered-is-refused", "A5", "I7", ways=Ways(ask_until_known=False)),
    Variant("lost-race-is-refused", "A2", "I7", ways=Ways(read_on=False)),
    # Starts
    Variant("fence-checked-by-the-writer-only", "V8", "I10", TWO, Rules(fence=False)),
    Variant("age-by-begin", "V2", "I8", TWO, Rules(age_by_opening=False)),
    Variant("attempt-is-the-restart-count", "S1", "I8", TWO, Rules(unique_attempts=False)),
    Variant("each-rank-asks-where-to-resume", "V4", "I9", TWO, Rules(frozen_answer=False)),
    Variant("fallback-after-ready", "V6", "I9", TWO, Rules(fallback_before_ready=False)),
    Variant("commit-before-ready", "V7", "I11", TWO, Rules(ready_before_commit=False)),
    Variant("commit-below-the-tip", "V10", "I15", replace(TWO, saves=2), Rules(steps_rise=False)),
    # Quarantine
    Variant("one-reader-quarantines", "V12", "I19", DAMAGED, Rules(two_readers=False)),
    Variant("quarantine-once-ever", "V15", "I21", DAMAGED, Rules(turns=False)),
    Variant("turn-of-the-write", "V15", "I19", DAMAGED, Rules(turn_before_reading=False)),
    Variant("from-nothing-when-all-are-quarantined", "V5", "I17", ALL_DAMAGED, Rules(never_from_nothing=False)),
    Variant("crash-loop-takes-the-last", "V20", "I21", LOOPING, Rules(doubt_the_last=True)),
    # Roll-back
    Variant("highest-step", "V11", "I16", ROLLED_BACK, Rules(along_the_line=False)),
    Variant("rollback-keeps-the-generation", "V16", "I16", ROLLED_BACK, Rules(rollback_closes=False)),
    # Retention
    Variant("retirement-judged-by-the-writer-only", "V18", "I14", KEPT, Rules(reader_judges_retirement=False)),
    Variant("retirement-while-loading", "V18", "I14", KEPT, Rules(retire_when_ready=False)),
    Variant("retired-resume-point", "V18", "I15", KEPT, Rules(resume_point_stays=False)),
    Variant("pins-are-for-show", "V17", "I13", PINNED, Rules(pins_stay=False)),
    Variant("keep-last-1", "V18", "I21", KEPT, Rules(min_keep=1)),
    Variant("unverified-ones-count", "V18", "I21", UNREAD, Rules(only_verified_count=False)),
    Variant("verified-before-quarantine", "V18", "I21", DOUBTED, Rules(quarantine_unverifies=False)),
    # Collection
    Variant("clean-up-after-an-unknown-commit", "W5", "I12", GONE, Rules(clean_up_unknown=True)),
    Variant("collect-by-age", "K2", "I13", GONE, Rules(collect_ended_only=False)),
    Variant("purged-is-forgotten", "K2", "leak", GONE, Rules(collect_again=False)),
    Variant("collected-though-borrowed", "K3", "I13", BORROWING, Rules(lenders_stay=False)),
    Variant("borrowed-though-retired", "V21", "I12", LATE_BORROWING, Rules(lenders_are_kept=False)),
    Variant("reinstate-purged", "V15", "I12", replace(GONE, reinstates=1), Rules(reinstate_purged=True)),
)
