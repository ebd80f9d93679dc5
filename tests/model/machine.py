"""Everything that can happen to a run, one thing at a time.

Processes are as bad as can be. A record that its writer could have sent at any time may land now, again, or never:
so lost answers, late writes, duplicates, stopped and killed processes need no state of their own. What a writer puts
into a record, and what a collector deletes, may rest on any prefix of the log. Ranks read whatever prefix they like.
The storage may hold damage from birth (`births`) or get it later (`rots`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.folding import Logs
from tests.model.invariants import check_append
from tests.model.refusals import collectable
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
    line,
    may_retire,
    needed,
    resume_point,
    save_id,
    saves_in,
    valid,
)
from tests.model.states import Bounds, Event, Move, Objects, Rank, State


class Machine:
    def __init__(self, rules: Rules, bounds: Bounds, *, merged: bool = True) -> None:
        self.rules, self.bounds = rules, bounds
        self.logs = Logs(rules, check_append, merged=merged)
        self._sendable: dict[int, list[Record]] = {}

    def start(self) -> State:
        log = 0
        for record in self.bounds.history:
            log, broken = self.logs.append(log, record)
            assert not broken, broken
        fold = self.logs.folds[log]
        there = fold.committed if self.bounds.objects else 0
        return State(log, ((Rank(), Rank()),) * fold.opened, objects=Objects(there, there))

    def moves(self, state: State) -> Iterator[Move]:
        for record in self._records(state):
            yield from self._land(state, record)
        if self.bounds.ranks:
            yield from self._joins(state)
        if self.bounds.rots or self.bounds.births:
            yield from self._damage(state)
        if self.bounds.objects:
            yield from self._payload(state)

    # Records land.

    def _records(self, state: State) -> list[Record]:
        """What could be sent now or could have been at any time before."""
        found = self._sendable.get(state.log)
        if found is None:
            fold = self.logs.folds[state.log]
            every = [*self._starts(state.log), *self._of_training(fold), *self._upkeep(state.log)]
            found = [r for r in every if judge(self.rules, fold, r)]
            self._sendable[state.log] = found
        return [record for record in found if self._sent(state, record)]

    def _starts(self, log: int) -> Iterator[Record]:
        fold = self.logs.folds[log]
        if fold.opened < self.bounds.incarnations:
            yield Record(Kind.OPENED, fold.opened)
        if len(fold.generations) == GENERATIONS:
            return
        prefixes = [self.logs.folds[k] for k in self.logs.prefixes[log]]
        built = {(len(f.generations) + 1, resume_point(self.rules, f)) for f in prefixes}
        built.update((len(fold.generations) + 1, save) for save in saves_in(fold.committed))  # read long ago
        built.add((len(fold.generations) + 1, 0))  # by one who took an error for "none"
        fallbacks = sum(g.fallback_of > 0 for g in fold.generations)
        for number, point in sorted(built):
            for by in range(fold.opened):
                attempt = by if self.rules.unique_attempts else 0
                yield Record(Kind.STARTED, attempt, number=number, point=point, by=by)
            if number > 1 and fallbacks < self.bounds.fallbacks and number == len(fold.generations) + 1:
                given_up = fold.generations[-1]
                yield Record(Kind.STARTED, given_up.attempt, 0, number, point, fallback_of=number - 1, by=given_up.by)

    def _of_training(self, fold: Fold) -> Iterator[Record]:
        for number in range(1, len(fold.generations) + 1):
            yield Record(Kind.READY, number)
            for k in range(1, self.bounds.saves + 1):
                if fold.committed.bit_count() < self.bounds.commits:
                    yield Record(Kind.COMMITTED, save_id(number, k))
                    if len(fold.lenders) < self.bounds.borrows:
                        for lender in saves_in(fold.committed):
                            yield Record(Kind.COMMITTED, save_id(number, k), lender=lender)
                if self.bounds.aborts:
                    yield Record(Kind.ABORTED, save_id(number, k))

    def _upkeep(self, log: int) -> Iterator[Record]:
        fold, bounds = self.logs.folds[log], self.bounds
        quarantines, reinstates = sum((t + 1) // 2 for t in fold.turns), sum(t // 2 for t in fold.turns)
        grounds = [Ground.DAMAGE]
        grounds += [Ground.ONE_READER] if bounds.faulty_reader else []
        grounds += [Ground.OPERATOR] if bounds.operator else []
        grounds += [Ground.CRASH_LOOP] if bounds.crash_loops else []
        for save in saves_in(fold.committed):
            turn = fold.turns[save]
            if quarantines < bounds.quarantines:
                for ground in grounds:
                    yield Record(Kind.QUARANTINED, save, turn if self.rules.turns else 0, ground=ground)
            if reinstates < bounds.reinstates:
                yield Record(Kind.REINSTATED, save, turn)
            if fold.rollbacks < bounds.rollbacks:
                yield Record(Kind.ROLLED_BACK, save, fold.rollbacks)
            if bounds.verifies:
                yield Record(Kind.VERIFIED, save, turn)
            if sum(fold.pin_turns) < bounds.pins:
                yield Record(Kind.PINNED, save, fold.pin_turns[save])
                yield Record(Kind.UNPINNED, save, fold.pin_turns[save])
            if fold.retired.bit_count() < bounds.retires and self._planned(log, save):
                yield Record(Kind.RETIRED, save)
            if bounds.objects:
                yield Record(Kind.PURGED, save)

    def _planned(self, log: int, save: int) -> bool:
        """Whether somebody wanted to retire this save, having read some prefix."""
        prefixes = (self.logs.folds[k] for k in self.logs.prefixes[log])
        return any(may_retire(self.rules, fold, save) for fold in prefixes)

    def _sent(self, state: State, record: Record) -> bool:
        """Whether the processes and the storage let it be sent."""
        save, fold = record.about, self.logs.folds[state.log]
        match record.kind:
            case Kind.READY:
                generation = fold.generations[save - 1]
                holding = not self.bounds.ranks or all(rank.generation == save for rank in state.ranks[generation.by])
                return holding and not state.bad & bit(generation.point)
            case Kind.COMMITTED | Kind.ABORTED if self.bounds.ranks:
                number = generation_of(save)
                return state.ranks[fold.generations[number - 1].by][0].generation >= number
            case Kind.COMMITTED if self.bounds.objects:
                return bool(state.objects.uploaded & bit(save))
            case Kind.QUARANTINED if record.ground is Ground.DAMAGE:
                return bool((state.bad | state.seen) & bit(save))
            case Kind.VERIFIED:
                return not state.bad & bit(save)
            case Kind.PURGED:
                return not state.objects.main & bit(save)
            case _:
                return True

    def _land(self, state: State, record: Record) -> Iterator[Move]:
        log, broken = self.logs.append(state.log, record)
        after = state._replace(log=log)
        save, event = record.about, Event("record", record)
        if record.kind is Kind.OPENED:
            after = after._replace(ranks=(*state.ranks, (Rank(), Rank())))
        elif record.kind is Kind.QUARANTINED and record.ground is Ground.DAMAGE and not state.bad & bit(save):
            broken = broken or "I19 quarantined for damage that nobody saw since it was reinstated"
        elif record.kind is Kind.COMMITTED and self.bounds.births:
            yield Event("bad", record), self._see(after._replace(bad=state.bad | bit(save))), broken
        elif record.kind is Kind.RETIRED:
            after = after._replace(bad=state.bad & ~bit(save))  # nobody reads it any more
        yield event, after, broken or self._lasting(after)

    # Ranks read their answers.

    def _joins(self, state: State) -> Iterator[Move]:
        fold = self.logs.folds[state.log]
        for number, generation in enumerate(fold.generations, 1):
            for mine, pair in enumerate(state.ranks):
                if generation.attempt != (mine if self.rules.unique_attempts else 0):
                    continue
                for r in (0, 1):
                    if pair[r].generation < number:
                        yield from self._join(state, mine, r, number)

    def _join(self, state: State, mine: int, r: int, number: int) -> Iterator[Move]:
        generation = self.logs.folds[state.log].generations[number - 1]
        other = state.ranks[mine][1 - r]
        for answer in self._answers(state.log, number):
            if answer and state.bad & bit(answer):
                continue  # it is read in full before it is held
            rank = Rank(number, answer)
            pair = (rank, other) if r == 0 else (other, rank)
            ranks = (*state.ranks[:mine], pair, *state.ranks[mine + 1 :])
            broken = ""
            if generation.by != mine:
                broken = "I8 two incarnations are one generation"
            elif other.generation == number and other.answer != answer:
                broken = "I9 the ranks of a generation resume from different checkpoints"
            yield Event("join", None, answer, (mine, r, number)), state._replace(ranks=ranks), broken

    def _answers(self, log: int, number: int) -> set[int]:
        if self.rules.frozen_answer:
            return {self.logs.folds[log].generations[number - 1].point}
        prefixes = (self.logs.folds[k] for k in self.logs.prefixes[log])
        return {resume_point(self.rules, f) for f in prefixes if len(f.generations) >= number}

    # The storage.

    def _damage(self, state: State) -> Iterator[Move]:
        fold = self.logs.folds[state.log]
        for save in saves_in(fold.committed & ~fold.retired):
            if not state.bad & bit(save) and state.rots < self.bounds.rots:
                after = self._see(state._replace(bad=state.bad | bit(save), rots=state.rots + 1))
                yield Event("rot", None, save), after, self._lasting(after)
            if state.bad & fold.quarantined & bit(save) and self.bounds.reinstates:
                yield Event("repair", None, save), state._replace(bad=state.bad & ~bit(save)), ""

    def _see(self, state: State) -> State:
        return state if self.rules.turn_before_reading else state._replace(seen=state.seen | state.bad)

    def _lasting(self, state: State) -> str:
        """I12 and I21: what must hold of storage and log together."""
        fold = self.logs.folds[state.log]
        if self.bounds.objects and any(needed(fold, save) for save in saves_in(fold.committed & ~state.objects.main)):
            return "I12 a checkpoint without its payload"
        if not state.bad:
            return ""
        point = resume_point(self.rules, fold)
        if point and state.bad & bit(point):
            record = Record(Kind.QUARANTINED, point, fold.turns[point] if self.rules.turns else 0)
            if not judge(self.rules, fold, record):
                return "I21 the resume point is damaged and cannot be quarantined"
        if fold.retired and state.rots <= 1 and not fold.rollbacks and not self.bounds.operator:
            rest = (save for save in line(fold, fold.tip) if valid(fold, save))
            if all(state.bad & bit(save) for save in rest):
                return "I21 one damaged checkpoint too many was relied on: nobody can start"
        return ""

    def _payload(self, state: State) -> Iterator[Move]:
        fold, there = self.logs.folds[state.log], state.objects
        every = [save_id(g, k) for g in range(1, len(fold.generations) + 1) for k in range(1, self.bounds.saves + 1)]
        for save in every:
            if not there.uploaded & bit(save):
                put = there._replace(main=there.main | bit(save), uploaded=there.uploaded | bit(save))
                yield Event("upload", None, save), state._replace(objects=put), ""
            elif not there.strayed & bit(save) and there.strayed.bit_count() < self.bounds.strays:
                put = there._replace(stray=there.stray | bit(save), strayed=there.strayed | bit(save))
                after = state._replace(objects=put)
                yield Event("late upload", None, save), after, self._left(after, save)
            if (there.main | there.stray) & bit(save):
                yield from self._deletion(state, save)

    def _deletion(self, state: State, save: int) -> Iterator[Move]:
        fold, there = self.logs.folds[state.log], state.objects
        kept = needed(fold, save)
        prefixes = (self.logs.folds[k] for k in self.logs.prefixes[state.log])
        if any(collectable(self.rules, f, save) for f in prefixes):
            if there.main & bit(save):
                gone = there._replace(main=there.main & ~bit(save))
                broken = "I13 an object of a checkpoint is deleted" if kept else ""
                yield Event("collect", None, save), state._replace(objects=gone), broken
            if there.stray & bit(save):
                gone = there._replace(stray=there.stray & ~bit(save))
                yield Event("collect late", None, save), state._replace(objects=gone), ""
        if self.rules.clean_up_unknown and there.main & bit(save) and not fold.committed & bit(save):
            gone = there._replace(main=there.main & ~bit(save))
            yield Event("clean up", None, save), state._replace(objects=gone), ""

    def _left(self, state: State, save: int) -> str:
        fold = self.logs.folds[state.log]
        if fold.purged & bit(save) and not collectable(self.rules, fold, save):
            return "leak a late upload that nobody may ever collect"
        return ""
