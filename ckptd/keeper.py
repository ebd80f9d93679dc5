"""What is done to checkpoints after they were committed: verified, kept, given up, and their bytes collected.

The service calls it in the background and for people; the command line does the same without a service. Everything
here is a record first and a deletion, if any, later: killed anywhere, the next pass goes on where this one stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptd import layout
from ckptd.errors import Conflict, Corrupt, Invalid, NotFound
from ckptd.ledger import Ledger
from ckptd.log import Build
from ckptd.manifest import Manifest, ManifestRef, ObjectRef
from ckptd.reading import damage_of, read_manifest
from ckptd.retention import Decision, Policy, plan
from ckptd.second import SecondReader, read_in_new_process, this_process
from ckptd.state import Checkpoint, RunState
from ckptd.upkeep_records import (
    MAX_RETIRED,
    AboutTopic,
    CheckpointHeld,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReinstated,
    CheckpointReleased,
    CheckpointsPurged,
    CheckpointsRetired,
    CheckpointUnpinned,
    CheckpointVerified,
    RolledBack,
)
from ckptd.wire import DamageAnswer, DamageReport

TRIES = 8  # of a record that others may get in the way of


@dataclass(frozen=True)
class Collected:
    """Objects that were deleted, and the saves that were purged by that."""

    objects: int
    purged: tuple[str, ...]


class Keeper:
    """The upkeep of the runs of one ledger. Callable from any thread."""

    def __init__(self, ledger: Ledger, *, reader: SecondReader = read_in_new_process) -> None:
        self._ledger = ledger
        self._reader = reader

    # People's decisions.

    def quarantine(self, run: str, save: str, *, who: str, reason: str) -> None:
        """Give a checkpoint up by a person's word. Nothing is deleted; `reinstate` takes it back."""

        def body(state: RunState) -> AboutTopic:
            turn = state.turns.get(f"quarantine:{save}", 0)
            return CheckpointQuarantined(save=save, turn=turn, ground="operator", who=who, reason=reason)

        self._ensure(run, save, lambda state: save in state.quarantined, body)

    def reinstate(self, run: str, save: str, *, who: str, reason: str) -> None:
        """Take a quarantine back."""

        def body(state: RunState) -> AboutTopic:
            turn = state.turns.get(f"quarantine:{save}", 0)
            return CheckpointReinstated(save=save, turn=turn, who=who, reason=reason)

        self._ensure(run, save, lambda state: save not in state.quarantined, body)

    def rollback(self, run: str, to: str, *, who: str, reason: str) -> None:
        """The next start resumes from `to`. A job that is running is told that it is fenced."""
        turn = self._state(run, to).turns.get("rollback", 0)
        body = RolledBack(to=to, turn=turn, who=who, reason=reason)
        self._ledger.append(run, _always(body))

    def pin(self, run: str, save: str, who: str) -> None:
        """Keep a checkpoint until it is unpinned."""
        self._ensure(
            run,
            save,
            lambda state: who in state.pinned.get(save, ()),
            lambda state: CheckpointPinned(save=save, who=who, turn=state.turns.get(f"pin:{save}:{who}", 0)),
        )

    def unpin(self, run: str, save: str, who: str) -> None:
        self._ensure(
            run,
            save,
            lambda state: who not in state.pinned.get(save, ()),
            lambda state: CheckpointUnpinned(save=save, who=who, turn=state.turns.get(f"pin:{save}:{who}", 0)),
        )

    def hold(self, run: str, save: str, who: str) -> None:
        """Keep a checkpoint while `who` reads it."""
        self._ensure(
            run,
            save,
            lambda state: who in state.held.get(save, ()),
            lambda state: CheckpointHeld(save=save, who=who, turn=state.turns.get(f"hold:{save}:{who}", 0)),
        )

    def release(self, run: str, save: str, who: str) -> None:
        self._ensure(
            run,
            save,
            lambda state: who not in state.held.get(save, ()),
            lambda state: CheckpointReleased(save=save, who=who, turn=state.turns.get(f"hold:{save}:{who}", 0)),
        )

    # Verification.

    def verify(self, run: str, save: str) -> DamageAnswer | None:
        """Read every byte of a checkpoint in another process. None: whole, and the log says so now. Else what became
        of the finding: a second reading, in yet another process, decides about quarantine."""
        checkpoint = self._state(run, save).checkpoints[save]
        reader = this_process()
        for ref in self._objects(checkpoint):
            reading = self._reader(self._ledger.storage, ref)
            if reading.damage is not None:
                report = DamageReport(save=save, damage=reading.damage, reader=reading.reader)
                return self._ledger.report_damage(run, report)
            reader = reading.reader

        def body(state: RunState) -> AboutTopic:
            return CheckpointVerified(save=save, turn=state.turns.get(f"verify:{save}", 0), reader=reader)

        before = self._state(run, save).verified.get(save, 0)
        self._ensure(run, save, lambda state: state.verified.get(save, 0) > before, body)
        return None

    def unverified(self, run: str, policy: Policy) -> str | None:
        """The checkpoint to verify next: of those that stay, the newest never verified one of the line. None if there
        is no more to do before retention can work."""
        decisions = {decision.save for decision in self.plan(run, policy) if decision.keep}
        state = self._ledger.state(run)
        for checkpoint in reversed(state.checkpoints.values()):
            if checkpoint.save in decisions and checkpoint.save not in state.verified | state.quarantined.keys():
                return checkpoint.save
        return None

    def _objects(self, checkpoint: Checkpoint) -> list[ManifestRef | ObjectRef]:
        """What there is to read of it: the manifest alone if that is damaged."""
        try:
            manifest: Manifest = read_manifest(self._ledger.storage, checkpoint.manifest)
        except Corrupt as error:
            if damage_of(error) is None:
                raise
            return [checkpoint.manifest]
        return [checkpoint.manifest, *manifest.objects()]

    # Retention and collection.

    def plan(self, run: str, policy: Policy) -> list[Decision]:
        """What the policy would keep and retire now, with the rule for each. Changes nothing."""
        return plan(self._ledger.state(run), policy)

    def retire(self, run: str, policy: Policy) -> list[Decision]:
        """Retire what the policy does not keep; the decisions that were carried out. `Conflict` while that cannot be
        (a generation is starting, fewer than two checkpoints are verified): the next pass will."""
        state = self._ledger.state(run)
        given_up = [decision for decision in plan(state, policy) if not decision.keep][:MAX_RETIRED]
        if given_up:
            body = CheckpointsRetired(
                saves=tuple(decision.save for decision in given_up),
                turn=state.turns.get("retire", 0),
                rule=f"keep_last={policy.keep_last} keep_every={policy.keep_every}",
            )
            self._ledger.append(run, _always(body))
        return given_up

    def collect(self, run: str) -> Collected:
        """Delete the bytes of retired checkpoints, and what uncommitted saves of ended generations left.

        Of a generation that ended nothing can be committed any more, so what it did not commit is nobody's; no ages
        and no clocks. What a process of it writes later is found by the next pass.
        """
        state = self._ledger.state(run)
        storage = self._ledger.storage
        retired = [save for save in state.retired if save not in state.purged][:MAX_RETIRED]
        objects = 0
        for save in [*retired, *self._leftovers(run, state)]:
            for folder in (layout.manifest_folder(run, save), layout.payload_folder(run, save)):
                for name in storage.list(folder):
                    storage.delete(f"{folder}/{name}")
                    objects += 1
        if retired:
            body = CheckpointsPurged(saves=tuple(retired), turn=state.turns.get("purge", 0))
            self._ledger.append(run, _always(body))
        return Collected(objects=objects, purged=tuple(retired))

    def _leftovers(self, run: str, state: RunState) -> list[str]:
        """Saves of ended generations that have files and no commit."""
        storage, current = self._ledger.storage, state.current
        if current is None:
            return []
        names = set(storage.list(layout.manifests_folder(run)))
        for folder in storage.list(layout.data_folder(run)):
            generation = layout.generation_of_folder(folder)
            if generation is not None and generation < current.number:
                names.update(storage.list(f"{layout.data_folder(run)}/{folder}"))
        saves = filter(layout.SAVE_ID.fullmatch, names)
        return sorted(
            save for save in saves if layout.generation_of(save) < current.number and save not in state.checkpoints
        )

    # How.

    def _state(self, run: str, save: str) -> RunState:
        state = self._ledger.state(run)
        if save not in state.checkpoints:
            raise NotFound(f"run {run} has no checkpoint {save}", do="`ckptd ls` lists them.", run=run, save=save)
        return state

    def _ensure(
        self,
        run: str,
        save: str,
        done: Callable[[RunState], bool],
        body: Callable[[RunState], AboutTopic],
    ) -> None:
        """Append `body` unless it is `done`, by us or by somebody else."""
        layout.check_save(save)
        refusal: Conflict | None = None
        for _ in range(TRIES):
            state = self._state(run, save)
            if done(state):
                return
            if save in state.retired:
                raise Invalid(f"run {run}: checkpoint {save} is retired", do="Choose another.", save=save)
            fixed = body(state)
            try:
                self._ledger.append(run, _always(fixed))
                return
            except Conflict as error:
                refusal = error
        assert refusal is not None
        raise refusal


def _always(body: AboutTopic) -> Build:
    """The same record whatever the state became: a repeat then finds it by its name."""
    return lambda state: body
