"""Breadth first over all states: the first broken invariant met has a shortest trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class Moves(Protocol[S, E_co]):
    def start(self) -> S: ...

    def moves(self, state: S) -> Iterator[tuple[E_co, S, str]]: ...


@dataclass(frozen=True)
class Found(Generic[E]):
    """What a search met: `broken` and the shortest way there, or nothing and all states. `seconds` are of the CPU."""

    states: int
    depth: int
    seconds: float
    broken: str
    trace: tuple[E, ...]

    @property
    def invariant(self) -> str:
        return self.broken.split(maxsplit=1)[0] if self.broken else ""

    def told(self, say: Callable[[E], str]) -> str:
        """The trace, a line for each event."""
        lines = [f"{number:3}. {say(event)}" for number, event in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"     -> {self.broken or 'nothing is broken'}"])


def explore(machine: Moves[S, E], *, most_states: int = 10_000_000) -> Found[E]:
    """All reachable states, or up to the first broken invariant. `MemoryError` beyond `most_states`."""
    began = time.process_time()
    first = machine.start()
    came: dict[S, tuple[S, E] | None] = {first: None}
    level, depth = [first], 0
    while level:
        depth += 1
        following = []
        for state in level:
            for event, after, broken in machine.moves(state):
                if broken:
                    trace = (*_way(came, state), event)
                    return Found(len(came), depth, time.process_time() - began, broken, trace)
                if after not in came:
                    came[after] = (state, event)
                    following.append(after)
        if len(came) > most_states:
            raise MemoryError(f"more than {most_states} states at depth {depth}: the bounds are too wide")
        level = following
    return Found(len(came), depth - 1, time.process_time() - began, "", ())


def _way(came: dict[S, tuple[S, E] | None], state: S) -> list[E]:
    events: list[E] = []
    while (before := came[state]) is not None:
        state, event = before
        events.append(event)
    return events[::-1]
