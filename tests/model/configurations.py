"""What the model is run on: each configuration leaves no state out within its bounds."""

from __future__ import annotations

from dataclasses import replace

from tests.model.rules import Kind, Record
from tests.model.states import Bounds

# Generation 1 is ready and committed two checkpoints.
UNDER_WAY = (
    Record(Kind.OPENED, 0),
    Record(Kind.STARTED, 0, number=1),
    Record(Kind.READY, 1),
    Record(Kind.COMMITTED, 1),
    Record(Kind.COMMITTED, 2),
)

STARTS = Bounds(incarnations=3, fallbacks=1, saves=2, ranks=True)
QUARANTINE = Bounds(
    fallbacks=1,
    saves=2,
    commits=3,
    ranks=True,
    rots=2,
    quarantines=2,
    faulty_reader=True,
    reinstates=1,
    history=UNDER_WAY,
)
CRASH_LOOPS = Bounds(
    incarnations=4,
    fallbacks=1,
    commits=3,
    quarantines=2,
    crash_loops=True,
    reinstates=1,
    rollbacks=1,
    history=UNDER_WAY,
)
RETENTION = Bounds(
    fallbacks=1, saves=3, commits=4, rots=1, births=True, quarantines=1, verifies=True, retires=2, history=UNDER_WAY
)
PEOPLE = Bounds(
    saves=3,
    commits=3,
    quarantines=1,
    operator=True,
    reinstates=1,
    rollbacks=1,
    verifies=True,
    pins=1,
    retires=1,
    history=UNDER_WAY,
)
COLLECTION = Bounds(
    saves=3, commits=3, aborts=True, verifies=True, retires=1, objects=True, strays=1, history=UNDER_WAY
)
BORROWING = Bounds(saves=3, commits=4, verifies=True, retires=2, borrows=1, objects=True, strays=1, history=UNDER_WAY)

CONFIGURATIONS = {
    "starts": STARTS,
    "quarantine": QUARANTINE,
    "crash loops": CRASH_LOOPS,
    "retention": RETENTION,
    "people": PEOPLE,
    "collection": COLLECTION,
    "borrowing": BORROWING,
}
DEEP = {
    "starts": replace(STARTS, fallbacks=2),
    "aborts": replace(STARTS, incarnations=2, fallbacks=1, aborts=True),
    "quarantine": replace(QUARANTINE, rollbacks=1, operator=True),
    "crash loops": replace(CRASH_LOOPS, incarnations=5, quarantines=3),
    "retention": replace(RETENTION, quarantines=2),
    "people": replace(PEOPLE, fallbacks=1, pins=2),
    "collection": replace(COLLECTION, commits=4, retires=2),
    "borrowing": replace(BORROWING, borrows=2),
}
