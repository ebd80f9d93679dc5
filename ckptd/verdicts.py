"""What becomes of a record: it counts, or it is void, and whether that is for good."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """ACCEPTED counts. VOID does not, though the same request may count in another state. NEVER cannot count in
    any later state either; FENCED is NEVER because a younger incarnation took over."""

    ACCEPTED = "accepted"
    VOID = "void"
    NEVER = "never"
    FENCED = "fenced"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    reason: str = ""

    @property
    def accepted(self) -> bool:
        return self.outcome is Outcome.ACCEPTED

    @property
    def final(self) -> bool:
        """Whether no later state of the run can accept this request: only then may it be refused for good."""
        return self.outcome in (Outcome.NEVER, Outcome.FENCED)


ACCEPTED = Verdict(Outcome.ACCEPTED)


def void(reason: str) -> Verdict:
    return Verdict(Outcome.VOID, reason)


def never(reason: str) -> Verdict:
    return Verdict(Outcome.NEVER, reason)


def fenced(reason: str) -> Verdict:
    return Verdict(Outcome.FENCED, reason)
