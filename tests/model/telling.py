"""Traces for people."""

from __future__ import annotations

from tests.model.rules import Ground, Kind, Record, generation_of, save_id
from tests.model.states import Event

GROUNDS = {
    Ground.DAMAGE: "two readers found it damaged",
    Ground.ONE_READER: "one reader says so",
    Ground.OPERATOR: "a person says so",
    Ground.CRASH_LOOP: "starts from it come to nothing",
}
WORDS = {
    Kind.COMMITTED: "is committed",
    Kind.ABORTED: "is aborted",
    Kind.REINSTATED: "is reinstated",
    Kind.VERIFIED: "is verified",
    Kind.PINNED: "is pinned",
    Kind.UNPINNED: "is unpinned",
    Kind.RETIRED: "is retired",
    Kind.PURGED: "is purged",
}


def say(event: Event) -> str:
    if event.record is not None:
        return _record(event.record) + (", its payload damaged" if event.name == "bad" else "")
    if event.name == "join":
        mine, rank, number = event.more
        return f"rank {rank} of incarnation {mine} holds the answer of generation {number}: {_save(event.about)}"
    words = {
        "rot": "gets damaged on the storage",
        "repair": "is repaired on the storage",
        "upload": "has its payload written",
        "late upload": "is written once more by a process that was stopped",
        "collect": "has its payload deleted by a collector that read some older log",
        "collect late": "has the late payload deleted by a collector",
        "clean up": "was not answered, and its writer deletes the payload",
    }
    return f"{_save(event.about)} {words[event.name]}"


def _save(save: int) -> str:
    if not save:
        return "nothing"
    number = generation_of(save)
    return f"save {save - save_id(number, 0)} of generation {number}"


def _record(record: Record) -> str:
    match record.kind:
        case Kind.OPENED:
            return f"incarnation {record.about} is opened"
        case Kind.STARTED:
            which = f"incarnation {record.by} begins generation {record.number} from {_save(record.point)}"
            return which + (f", giving up generation {record.fallback_of}" if record.fallback_of else "")
        case Kind.READY:
            return f"generation {record.about} is ready"
        case Kind.ROLLED_BACK:
            return f"the run is rolled back to {_save(record.about)}"
        case Kind.QUARANTINED:
            return f"{_save(record.about)} is quarantined: {GROUNDS[record.ground]}"
        case Kind.COMMITTED if record.lender:
            return f"{_save(record.about)} is committed, and borrows from {_save(record.lender)}"
        case _:
            return f"{_save(record.about)} {WORDS[record.kind]}"
