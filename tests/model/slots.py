"""The log slot by slot, below the model of the rules: puts that land late, twice or never, and what writers conclude.

Two replicas of one request (a client and the service) want the commit `c` of generation 1, another writer the start
`g` of generation 2, a third has a record `x` that is nobody's business. `c` counts unless `g` came before; each
counts once. A put is on its way for ever: it lands at any later time, or never. Lists show any prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

REQUESTS = ("c", "c", "g", "x")  # of each writer


class Ways(NamedTuple):
    """How writers behave. Each field is changed by one weakened variant."""

    ask_until_known: bool = True  # without, a put that was not answered is told to have failed
    same_slot: bool = True  # A3; without, the next slot is tried while this one is unknown
    keep_slots: bool = True  # without, old slots are deleted
    read_on: bool = True  # A2; without, a lost race is told to be a refusal


class Put(NamedTuple):
    slot: int
    writer: int
    prev: int  # the writer of the record before, whose bytes this one chains to; -1 at the beginning


class Writer(NamedTuple):
    """`put` is on its way and its slot unknown; `said` what the caller was told."""

    put: Put | None = None
    said: str = ""


class Slots(NamedTuple):
    log: tuple[Put, ...] = ()  # what each slot was filled with first
    trimmed: int = 0  # slots deleted, from the first
    flying: frozenset[Put] = frozenset()
    writers: tuple[Writer, ...] = (Writer(),) * len(REQUESTS)


Event = tuple[str, int, int]  # what, by which writer (-1: nobody), in which slot
Move = tuple[Event, Slots, str]


def accepted(log: tuple[Put, ...]) -> tuple[str, ...]:
    """The requests that count, in their order."""
    found: list[str] = []
    for put in log:
        request = REQUESTS[put.writer]
        if request not in found and not (request == "c" and "g" in found):
            found.append(request)
    return tuple(found)


class SlotMachine:
    def __init__(self, ways: Ways, most_slots: int = 3) -> None:
        self.ways, self.most_slots = ways, most_slots

    def start(self) -> Slots:
        return Slots()

    def moves(self, state: Slots) -> Iterator[Move]:
        for writer in range(len(REQUESTS)):
            if not state.writers[writer].said:
                yield from self._act(state, writer)
        for put in sorted(state.flying):
            yield from self._lands(state, put)
        if not self.ways.keep_slots and state.trimmed < len(state.log):
            yield ("is deleted", -1, state.trimmed + 1), state._replace(trimmed=state.trimmed + 1), ""

    def _act(self, state: Slots, writer: int) -> Iterator[Move]:
        mine = state.writers[writer]
        if mine.put is None:
            for seen in range(len(state.log) + 1):  # the prefix that its list shows
                yield from self._judge(state, writer, seen)
            return
        yield self._send(state, writer, mine.put)
        slot = mine.put.slot
        if slot <= len(state.log):  # it reads the slot
            found = state.log[slot - 1]
            if found == mine.put and self._first(state, slot):
                yield self._say(state, writer, "accepted", slot)
            elif found == mine.put or self.ways.read_on:
                yield self._free(state, writer, slot)
            else:
                yield self._say(state, writer, "refused", slot)
        elif not self.ways.same_slot and slot < self.most_slots:
            yield self._send(state, writer, Put(slot + 1, writer, writer))
        if not self.ways.ask_until_known:
            yield self._say(state, writer, "refused", slot)

    def _judge(self, state: Slots, writer: int, seen: int) -> Iterator[Move]:
        request, counted = REQUESTS[writer], accepted(state.log[:seen])
        if request in counted:
            yield self._say(state, writer, "accepted", seen)
        elif request == "c" and "g" in counted:
            yield self._say(state, writer, "refused", seen)
        elif seen < self.most_slots:
            prev = state.log[seen - 1].writer if seen else -1
            yield self._send(state, writer, Put(seen + 1, writer, prev))

    def _first(self, state: Slots, slot: int) -> bool:
        before = accepted(state.log[: slot - 1])
        return len(accepted(state.log[:slot])) > len(before)

    def _send(self, state: Slots, writer: int, put: Put) -> Move:
        after = _with(state, writer, Writer(put))._replace(flying=state.flying | {put})
        return ("is put", writer, put.slot), after, ""

    def _free(self, state: Slots, writer: int, slot: int) -> Move:
        return ("is found taken", writer, slot), _with(state, writer, Writer()), ""

    def _say(self, state: Slots, writer: int, said: str, slot: int) -> Move:
        after = _with(state, writer, Writer(said=said))
        return (f"is told {said}", writer, slot), after, self._lies(after)

    def _lands(self, state: Slots, put: Put) -> Iterator[Move]:
        event = ("lands", put.writer, put.slot)
        if put.slot > len(state.log) + 1:
            yield event, state, "I2 a slot before it is empty"
        elif put.slot == len(state.log) + 1:
            # With slots kept, what else is on its way to this one cannot land any more.
            flying = {other for other in state.flying if other.slot > put.slot or not self.ways.keep_slots}
            after = state._replace(log=(*state.log, put), flying=frozenset(flying))
            chained = put.prev == (state.log[-1].writer if state.log else -1)
            yield event, after, self._lies(after) if chained else "I3 the chain is broken"
        elif put.slot <= state.trimmed and state.log[put.slot - 1] != put:
            yield event, state, "I1 a slot that was read has other bytes"

    def _lies(self, state: Slots) -> str:
        counted = accepted(state.log)
        for writer, request in zip(state.writers, REQUESTS, strict=True):
            if writer.said == "accepted" and request not in counted:
                return "I6 it was told accepted and is not"
            if writer.said == "refused" and request in counted:
                return "I7 it was told refused and counts"
        return ""


def _with(state: Slots, number: int, writer: Writer) -> Slots:
    return state._replace(writers=(*state.writers[:number], writer, *state.writers[number + 1 :]))


def say_slot(event: Event) -> str:
    what, writer, slot = event
    name = f"{REQUESTS[writer]} of writer {writer}" if writer >= 0 else "the record"
    return f"{name} {what} (slot {slot})"
