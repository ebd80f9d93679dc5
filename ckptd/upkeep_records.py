"""What the records of a run's log can say about what is kept: quarantine, roll-back, pins, holds, retention.

What may be said again of one thing (pinned, unpinned, pinned) carries a `turn`: how many records of its topic counted
before. `ckptd.upkeep` has the rules.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ckptd.digests import canonical_json, sha256_hex
from ckptd.manifest import SaveId
from ckptd.records import Body, Damage, Label, Observer, Reason

Ended = Literal["", "rolled back", "closed"]  # what became of a generation that a person ended
MAX_RETIRED = 500  # of one record, which has at most 64 KiB


class AboutTopic(Body):
    """A record of a topic that may come up again. It counts only as the topic's next turn."""

    turn: Annotated[int, Field(ge=0)] = 0

    @property
    def topic(self) -> str:
        raise TypeError(f"{type(self).__name__} has no topic")

    @property
    def decides(self) -> str:
        """What tells two records apart that would both be the topic's next turn and say different things."""
        return ""

    @property
    def rid(self) -> str:
        return f"{self.topic}:{self.turn}{self.decides}"


class CheckpointQuarantined(AboutTopic):
    """A checkpoint is given up, and nothing of it deleted. `ground` says what that rests on: `damage`, two readings
    by two processes; `crash-loop`, starts from it that came to nothing; `operator`, a person's word."""

    kind = "checkpoint-quarantined"
    save: SaveId
    ground: Literal["damage", "crash-loop", "operator"] = "damage"
    reason: Reason = ""
    who: Label = ""
    damage: Damage | None = None
    reported_by: Observer | None = None
    confirmed_by: Observer | None = None

    @model_validator(mode="after")
    def _damage_was_read_twice(self) -> Self:
        readings = (self.damage, self.reported_by, self.confirmed_by)
        if self.ground == "damage" and None in readings:
            raise ValueError("damage is a finding of two readers; all three are needed")
        return self

    @property
    def topic(self) -> str:
        return f"quarantine:{self.save}"

    @property
    def why(self) -> str:
        """For people, in a line."""
        if self.damage is None:
            return self.reason
        return f"{self.damage.object}, expected {self.damage.expected}, observed {self.damage.observed}"


class CheckpointReinstated(AboutTopic):
    """A person takes a quarantine back."""

    kind = "checkpoint-reinstated"
    save: SaveId
    who: Label
    reason: Reason = ""

    @property
    def topic(self) -> str:
        return f"quarantine:{self.save}"


class RolledBack(AboutTopic):
    """A person moves the tip to a valid checkpoint. The generation that is running is closed by it, because what it
    trains on is left behind."""

    kind = "rolled-back"
    to: SaveId
    who: Label
    reason: Reason = ""

    @property
    def topic(self) -> str:
        return "rollback"

    @property
    def decides(self) -> str:
        return f":{self.to}"


class RunClosed(AboutTopic):
    """Somebody ends the run: what is running is fenced, and nothing starts, until it is reopened."""

    kind = "run-closed"
    who: Label
    reason: Reason = ""

    @property
    def topic(self) -> str:
        return "closing"


class RunReopened(RunClosed):
    kind = "run-reopened"


class Keeping(AboutTopic):
    """Somebody wants a checkpoint kept, or no longer."""

    save: SaveId
    who: Label


class CheckpointPinned(Keeping):
    """Kept until it is unpinned: for people."""

    kind = "checkpoint-pinned"

    @property
    def topic(self) -> str:
        return f"pin:{self.save}:{self.who}"


class CheckpointUnpinned(CheckpointPinned):
    kind = "checkpoint-unpinned"


class CheckpointHeld(Keeping):
    """Kept while a reader reads it; said again now and then, it shows to all services that the reader is there. A
    record ends a hold, too: the service writes it for readers that fell silent."""

    kind = "checkpoint-held"

    @property
    def topic(self) -> str:
        return f"hold:{self.save}:{self.who}"


class CheckpointReleased(CheckpointHeld):
    kind = "checkpoint-released"

    @property
    def decides(self) -> str:
        return ":end"  # the next turn may also be the same reader's word that it is there


class CheckpointVerified(AboutTopic):
    """Every byte of a checkpoint was read and compared with its digests. `quarantines` is the turn of its quarantine
    when the reading began: what was found damaged meanwhile was not read since."""

    kind = "checkpoint-verified"
    save: SaveId
    reader: Observer
    quarantines: Annotated[int, Field(ge=0)] = 0

    @property
    def topic(self) -> str:
        return f"verify:{self.save}"


class CheckpointsRetired(AboutTopic):
    """Retention gives checkpoints up: nobody resumes from them, and their bytes may go. `rule` is for people."""

    kind = "checkpoints-retired"
    saves: Annotated[tuple[SaveId, ...], Field(min_length=1, max_length=MAX_RETIRED)]
    rule: Reason = ""

    @property
    def topic(self) -> str:
        return "retire"

    @property
    def decides(self) -> str:
        return f":{sha256_hex(canonical_json(list(self.saves)))}"


class CheckpointsPurged(AboutTopic):
    """The bytes of retired checkpoints are gone."""

    kind = "checkpoints-purged"
    saves: Annotated[tuple[SaveId, ...], Field(min_length=1, max_length=MAX_RETIRED)]

    @property
    def topic(self) -> str:
        return "purge"

    @property
    def decides(self) -> str:
        return f":{sha256_hex(canonical_json(list(self.saves)))}"
