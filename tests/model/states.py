"""What the machine is made of: how much may happen, the state of everything, and what happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.model.rules import Record


@dataclass(frozen=True)
class Bounds:
    """How much of each can happen; 0 and False: it does not."""

    incarnations: int = 2
    fallbacks: int = 0
    saves: int = 1  # of a generation
    commits: int = 99  # in all
    ranks: bool = False  # two ranks that read their answers for themselves
    rots: int = 0
    births: bool = False  # commits of damaged payload
    quarantines: int = 0
    operator: bool = False  # may quarantine anything
    faulty_reader: bool = False  # reports damage where there is none
    crash_loops: bool = False
    reinstates: int = 0
    rollbacks: int = 0
    verifies: bool = False
    pins: int = 0  # and unpins
    retires: int = 0
    borrows: int = 0
    aborts: bool = False
    objects: bool = False  # payload is there or not, and collected
    strays: int = 0  # late uploads
    history: tuple[Record, ...] = ()  # the run is under way already


class Objects(NamedTuple):
    """Bit masks of saves: the payload that the manifest names, and a second upload of it that came late."""

    main: int = 0
    uploaded: int = 0  # ever
    stray: int = 0
    strayed: int = 0  # ever


class Rank(NamedTuple):
    generation: int = 0  # whose answer it holds
    answer: int = 0


Pair = tuple[Rank, Rank]


class State(NamedTuple):
    log: int = 0
    ranks: tuple[Pair, ...] = ()  # of each incarnation
    bad: int = 0  # saves whose payload is damaged
    rots: int = 0
    seen: int = 0  # saves that two readers ever found damaged; kept only where a rule forgets when
    objects: Objects = Objects()


class Event(NamedTuple):
    """What happened: a record was accepted, or something else to a save or rank."""

    name: str
    record: Record | None = None
    about: int = 0
    more: tuple[int, ...] = ()


Move = tuple[Event, State, str]  # and the invariant that is broken by it
