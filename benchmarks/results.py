"""What a benchmark found: samples by contender, figures by goal. Plain values that go through JSON unchanged."""

from __future__ import annotations

import statistics
from typing import Self

from pydantic import BaseModel, ConfigDict

from benchmarks.goals import GOALS, Goal


class Value(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Row(Value):
    """One contender. `samples` holds one number per round under each name: `seconds`, `cpu_seconds`, `peak_bytes`, ..
    `missing` says why there are none."""

    name: str
    samples: dict[str, tuple[float, ...]] = {}
    missing: str = ""

    def median(self, key: str) -> float:
        return statistics.median(self.samples[key])

    def best(self, key: str) -> float:
        return min(self.samples[key])

    def only(self, *keys: str) -> Row:
        """Without what says nothing about this contender, such as the CPU seconds of a process that only looks on."""
        return self.model_copy(update={"samples": {key: self.samples[key] for key in keys if key in self.samples}})


class Table(Value):
    """Contenders that took turns in one run. Seconds are shown as multiples of the row `reference`, too."""

    group: str
    title: str
    rows: tuple[Row, ...]
    reference: str = ""
    note: str = ""

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


class Figure(Value):
    """What a goal asks for, by medians and, where that means something, by minima."""

    figure: str
    at: str
    value: float
    best: float | None = None


class Part(Value):
    """What one job of the plan found."""

    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]


class Verdict(Value):
    """A goal beside its figure. `held` is None when nothing was measured."""

    text: str
    at: str
    limit: float
    unit: str
    value: float | None
    best: float | None
    measured_at: str
    held: bool | None


class Report(Value):
    """A whole run of the command."""

    mode: str
    started: str
    seconds: float
    machine: dict[str, str]
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    problems: tuple[str, ...] = ()

    def verdicts(self) -> list[Verdict]:
        """Every goal in order. Of several figures for it the worst one counts; one that was measured at another size
        only is shown with the last such figure."""
        return [self._verdict(goal) for goal in GOALS]

    def _verdict(self, goal: Goal) -> Verdict:
        found = [figure for figure in self.figures if figure.figure == goal.figure]
        exact = [figure for figure in found if goal.at in ("", figure.at)]
        figure = max(exact, key=lambda one: one.value) if exact else next(reversed(found), None)
        return Verdict(
            text=goal.text,
            at=goal.at,
            limit=goal.limit,
            unit=goal.unit,
            value=figure.value if figure else None,
            best=figure.best if figure else None,
            measured_at=figure.at if figure else "",
            held=figure.value <= goal.limit if figure else None,
        )

    @classmethod
    def of(cls, parts: list[Part], **about: object) -> Self:
        tables = tuple(table for part in parts for table in part.tables)
        figures = tuple(figure for part in parts for figure in part.figures)
        return cls.model_validate({"tables": tables, "figures": figures, **about})


def ratio(name: str, at: str, one: Row, other: Row, key: str = "seconds") -> tuple[Figure, ...]:
    """`one` over `other`, both of one interleaved run; nothing if one of them could not run."""
    if one.missing or other.missing:
        return ()
    value = one.median(key) / other.median(key)
    return (Figure(figure=name, at=at, value=value, best=one.best(key) / other.best(key)),)
