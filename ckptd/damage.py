"""What becomes of a finding of damage: a second reading decides, and whoever needs the object is given up with it.

The ledger calls this, for ranks that could not load, and for verification and scrubbing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.complete import object_of, sharing
from ckptd.errors import Conflict, NotFound
from ckptd.second import Reading, SecondReader
from ckptd.starting import damage_body
from ckptd.state import Checkpoint, RunState
from ckptd.storage.base import Storage
from ckptd.upkeep_records import CheckpointQuarantined
from ckptd.wire import DamageAnswer, DamageReport

_log = logging.getLogger("ckptd.ledger")


@dataclass(frozen=True)
class Quarantine:
    """Puts checkpoints of one run into quarantine. `state` reads its log to the end, `append` adds a record."""

    storage: Storage
    run: str
    state: Callable[[], RunState]
    append: Callable[[CheckpointQuarantined], None]

    def report(self, report: DamageReport, read: SecondReader) -> DamageAnswer:
        """Read the object again, with `read`. If that confirms the damage, every checkpoint that needs this object
        goes into quarantine at once, so that no start falls back to one of them."""
        before = self.state()
        known = before.quarantined.get(report.save)
        if known is not None:
            return DamageAnswer(confirmed=True, detail=f"in quarantine: {known.why}")
        ref = object_of(self.storage, self._checkpoint(before, report.save), report.damage.object)
        needed_by = [save for save in sharing(self.storage, before, ref) if save != report.save]
        reading = read(self.storage, ref)
        if reading.damage is None:
            return DamageAnswer(confirmed=False, detail=f"{ref.key} is whole for {reading.reader.process}")
        for save in needed_by:
            self.doubt(_body(before, save, report, reading))
        self.append(_body(before, report.save, report, reading))
        for save in sharing(self.storage, self.state(), ref):
            if save not in before.checkpoints:  # committed while the object was read; no further one can be
                self.doubt(_body(before, save, report, reading))
        return DamageAnswer(confirmed=True, detail=f"{reading.damage.object}: {reading.damage.observed}")

    def doubt(self, body: CheckpointQuarantined) -> None:
        """Give a checkpoint up, unless somebody else decided about it meanwhile."""
        try:
            self.append(body)
        except Conflict as error:
            _log.info("run %s: somebody else decided about %s: %s", self.run, body.save, error.message)
        else:
            _log.warning("run %s: %s is in quarantine: %s", self.run, body.save, body.why)

    def _checkpoint(self, state: RunState, save: str) -> Checkpoint:
        if save not in state.checkpoints or save in state.retired:
            why = f": checkpoint {save} is retired" if save in state.retired else f" has no checkpoint {save}"
            raise NotFound(f"run {self.run}{why}", run=self.run, save=save)
        return state.checkpoints[save]


def _body(before: RunState, save: str, report: DamageReport, reading: Reading) -> CheckpointQuarantined:
    damage = reading.damage if reading.damage is not None else report.damage
    return damage_body(before, save, report.reader, reading.reader, damage)
