"""The model's words in the product's: all records that can be asked for, each as the body of a real one, and a real
state as a fold.

Nothing here knows a rule. What the model has no word for, the counts of verifications, retirements and purges, is
taken from the real state, as a writer would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from ckptd import layout
from ckptd.manifest import ManifestRef
from ckptd.records import (
    AttemptOpened,
    Body,
    CheckpointCommitted,
    Damage,
    GenerationReady,
    GenerationStarted,
    Observer,
    SaveAborted,
)
from ckptd.state import Checkpoint, RunState
from ckptd.upkeep_records import (
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReinstated,
    CheckpointsPurged,
    CheckpointsRetired,
    CheckpointUnpinned,
    CheckpointVerified,
    RolledBack,
)
from tests.model.rules import Fold, Generation, Ground, Kind, Record, bit, generation_of, save_id, saves_in, step_of

WHO = "somebody"
DAMAGE = Damage(object="runs/modelled/data", chunk=0, expected="these bytes", observed="others")
READERS = (Observer(host="a", process="1"), Observer(host="b", process="2"))
COUNTED = {Kind.VERIFIED: "verify:{save}", Kind.RETIRED: "retire", Kind.PURGED: "purge"}


def body_of(fold: Fold, record: Record, state: RunState) -> Body:
    """What `record`, asked for after `fold`, says in the real log, whose state is `state`."""
    kind, about = record.kind, record.about
    if kind is Kind.OPENED:
        return _opened(about)
    if kind is Kind.STARTED:
        point = _name(fold, record.point) if record.point else None
        return _started(record.number, about, point, record.fallback_of or None)
    if kind is Kind.READY:
        owner = fold.generations[about - 1].attempt if about <= len(fold.generations) else 0
        return _ready(about, owner)
    save = _name(fold, about)
    if kind is Kind.COMMITTED:
        return _committed(save, _name(fold, record.lender) if record.lender else None)
    if kind in COUNTED:
        counted = state.turns.get(COUNTED[kind].format(save=save), 0)
        return _counted(kind, save, counted, record.turn)
    return _decided(kind, save, record.turn, record.ground)


def asked(fold: Fold, saves: int) -> Iterator[Record]:
    """The records that anybody could have asked for by now, in time or late, right or wrong; `saves` are of a
    generation. Left out is what is late twice: fallbacks of long ago, and borrowing in a generation that ended."""
    yield Record(Kind.OPENED, fold.opened)
    number = len(fold.generations)
    points = (0, *saves_in(fold.committed))
    for point in points:
        for attempt in range(fold.opened):
            for next_number in {number, number + 1} - {0}:
                yield Record(Kind.STARTED, attempt, number=next_number, point=point, by=attempt)
            for given_up in {number - 1, number} - {-1, 0}:
                yield Record(Kind.STARTED, attempt, number=number + 1, point=point, fallback_of=given_up, by=attempt)
    for generation in range(1, number + 2):
        yield Record(Kind.READY, generation)
        for save in (save_id(generation, k) for k in range(1, saves + 1)):
            yield Record(Kind.ABORTED, save)
            for lender in points if generation == number else (0,):
                if lender != save:
                    yield Record(Kind.COMMITTED, save, lender=lender)
    for save in saves_in(fold.committed | fold.aborted):
        yield from _asked_about(fold, save)


def _asked_about(fold: Fold, save: int) -> Iterator[Record]:
    for turn in range(fold.turns[save] + 1):
        for ground in Ground:
            yield Record(Kind.QUARANTINED, save, turn, ground=ground)
        yield Record(Kind.REINSTATED, save, turn)
        yield Record(Kind.VERIFIED, save, turn)
    for turn in range(fold.pin_turns[save] + 1):
        yield Record(Kind.PINNED, save, turn)
        yield Record(Kind.UNPINNED, save, turn)
    for turn in range(fold.rollbacks + 1):
        yield Record(Kind.ROLLED_BACK, save, turn)
    yield Record(Kind.RETIRED, save)
    yield Record(Kind.PURGED, save)


def fold_of(state: RunState) -> Fold:
    """What the model keeps of a real state. `unread` is for its invariants and stays 0; a generation's `by`, which no
    rule can see, is its attempt."""
    quarantines, pins, starts = ([0] * len(Fold().turns) for _ in range(3))
    for save in state.checkpoints:
        quarantines[_id(save)] = state.turns.get(f"quarantine:{save}", 0)
        pins[_id(save)] = state.turns.get(f"pin:{save}:{WHO}", 0)
        starts[_id(save)] = state.starts.get(save, 0)
    return Fold(
        opened=len(state.attempts),
        generations=tuple(_generation(state, number) for number in range(len(state.generations))),
        parents=tuple((_id(c.save), _id(c.parent)) for c in state.checkpoints.values()),
        lenders=tuple((_id(c.save), _lender(c)) for c in state.checkpoints.values() if c.borrows),
        tip=_id(state.tip),
        committed=_mask(state.checkpoints),
        aborted=_mask(state.aborted),
        quarantined=_mask(state.quarantined),
        verified=_mask(state.verified),
        pinned=_mask(state.pinned),
        retired=_mask(state.retired),
        purged=_mask(state.purged),
        turns=tuple(quarantines),
        pin_turns=tuple(pins),
        rollbacks=state.turns.get("rollback", 0),
        doubts=state.doubts,
        starts=tuple(starts),
    )


def _generation(state: RunState, index: int) -> Generation:
    real = state.generations[index]
    attempt = int(real.attempt, 16)
    return Generation(
        attempt=attempt,
        point=_id(real.resume_from),
        fallback_of=real.fallback_of or 0,
        by=attempt,
        doubted=real.quarantines,
        ready=real.ready,
        closed=bool(real.closed),
    )


def _lender(checkpoint: Checkpoint) -> int:
    (lender,) = checkpoint.borrows
    return _id(lender)


def _mask(saves: Iterable[str]) -> int:
    return sum(bit(_id(save)) for save in saves)


@cache
def _id(save: str | None) -> int:
    return save_id(layout.generation_of(save), int(save.rpartition("-a")[2])) if save else 0


def _name(fold: Fold, save: int) -> str:
    """Of a generation that did not start yet nobody knows the step: any will do, it is in no log."""
    number = generation_of(save)
    count = save - save_id(number, 0)
    return _named(number, step_of(fold, save) if number <= len(fold.generations) else count, count)


@cache
def _named(number: int, step: int, count: int) -> str:
    return layout.save_id(number, step, all_ranks=True, count=count)


def _attempt(number: int) -> str:
    return f"{number:032x}"


# The same bodies are asked for again and again: each is built and checked once.


@cache
def _opened(attempt: int) -> Body:
    return AttemptOpened(attempt=_attempt(attempt), job="job", host="host")


@cache
def _started(number: int, attempt: int, point: str | None, fallback_of: int | None) -> Body:
    return GenerationStarted(
        generation=number, attempt=_attempt(attempt), world=2, resume_from=point, fallback_of=fallback_of
    )


@cache
def _ready(number: int, attempt: int) -> Body:
    return GenerationReady(generation=number, attempt=_attempt(attempt))


@cache
def _committed(save: str, lender: str | None) -> Body:
    sha256 = "a" * 64
    return CheckpointCommitted(
        generation=layout.generation_of(save),
        save=save,
        step=layout.step_of(save),
        manifest=ManifestRef(key=layout.manifest_key("modelled", save, sha256), size=1, sha256=sha256),
        payload_bytes=1,
        writers=2,
        borrows=(lender,) if lender else (),
        borrowed_bytes=1 if lender else 0,
    )


@cache
def _counted(kind: Kind, save: str, turn: int, quarantines: int) -> Body:
    if kind is Kind.VERIFIED:
        return CheckpointVerified(save=save, turn=turn, reader=READERS[0], quarantines=quarantines)
    return (CheckpointsRetired if kind is Kind.RETIRED else CheckpointsPurged)(saves=(save,), turn=turn)


@cache
def _decided(kind: Kind, save: str, turn: int, ground: Ground) -> Body:
    match kind:
        case Kind.ABORTED:
            return SaveAborted(generation=layout.generation_of(save), save=save, reason="called off")
        case Kind.QUARANTINED if ground in (Ground.DAMAGE, Ground.ONE_READER):
            confirmed_by = READERS[ground is Ground.DAMAGE]
            return CheckpointQuarantined(
                save=save, turn=turn, damage=DAMAGE, reported_by=READERS[0], confirmed_by=confirmed_by
            )
        case Kind.QUARANTINED:
            word = "operator" if ground is Ground.OPERATOR else "crash-loop"
            return CheckpointQuarantined.model_validate({"save": save, "turn": turn, "ground": word, "who": WHO})
        case Kind.REINSTATED:
            return CheckpointReinstated(save=save, turn=turn, who=WHO)
        case Kind.ROLLED_BACK:
            return RolledBack(to=save, turn=turn, who=WHO)
        case Kind.PINNED:
            return CheckpointPinned(save=save, turn=turn, who=WHO)
        case Kind.UNPINNED:
            return CheckpointUnpinned(save=save, turn=turn, who=WHO)
    raise TypeError(f"no body for {kind.name}")
