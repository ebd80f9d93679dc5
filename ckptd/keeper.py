"""What is done to checkpoints after they were committed: verified, kept, given up, and their bytes collected.

The service calls it in the background and for people; the command line does the same without a service. Everything
here is a record first and a deletion, if any, later: killed anywhere, the next pass goes on where this one stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ckptd import layout
from ckptd.collecting import Collected, collect
from ckptd.errors import Conflict, Corrupt, Invalid, NotFound
from ckptd.ledger import Ledger
from ckptd.lineage import MIN_KEEP, is_valid, lineage, min_keep
from ckptd.log import Build
from ckptd.manifest import Manifest, ManifestRef, ObjectRef
from ckptd.reading import damage_of, read_manifest
from ckptd.retention import Decision, Policy, plan
from ckptd.second import SecondReader, read_in_new_process, this_process
from ckptd.state import Checkpoint, RunState
from ckptd.upkeep import as_next
from ckptd.upkeep_records import (
    MAX_RETIRED,
    AboutTopic,
    CheckpointHeld,
    CheckpointPinned,
    CheckpointQuarantined,
    CheckpointReinstated,
    CheckpointReleased,
    CheckpointsRetired,
    CheckpointUnpinned,
    CheckpointVerified,
    RolledBack,
    RunClosed,
    RunReopened,
)
from ckptd.wire import ActOnRun, ActRequest, CheckpointInfo, DamageAnswer, DamageReport, RunInfo, RunVerb, Verb

TRIES = 8  # of a record that others may get in the way of


class Keeper:
    """The upkeep of the runs of one ledger. Callable from any thread."""

    def __init__(self, ledger: Ledger, *, reader: SecondReader = read_in_new_process) -> None:
        self.ledger = ledger
        self._reader = reader

    # People's decisions, and readers'.

    def act(self, run: str, step: int, verb: Verb, request: ActRequest) -> CheckpointInfo:
        """Any of the decisions below about a checkpoint of `step`; what it is like afterwards."""
        save = self.chosen(run, step, request.save).save
        who, reason = request.who, request.reason
        acts: dict[Verb, Callable[[], object]] = {
            "quarantine": lambda: self.quarantine(run, save, who=who, reason=reason),
            "reinstate": lambda: self.reinstate(run, save, who=who, reason=reason),
            "rollback": lambda: self.rollback(run, save, who=who, reason=reason),
            "pin": lambda: self.pin(run, save, who),
            "unpin": lambda: self.unpin(run, save, who),
            "hold": lambda: self.hold(run, save, who),
            "release": lambda: self.release(run, save, who),
        }
        acts[verb]()
        return self.chosen(run, step, save)

    def act_on_run(self, run: str, verb: RunVerb, request: ActOnRun) -> RunInfo:
        """Close or reopen a run; what it is like afterwards."""
        (self.close if verb == "close" else self.reopen)(run, who=request.who, reason=request.reason)
        return self.ledger.run_info(run)

    def chosen(self, run: str, step: int, save: str | None = None) -> CheckpointInfo:
        """The newest checkpoint of `step`, the one on the line if there are several, unless `save` names one."""
        return self.ledger.checkpoint_at(run, step, save)

    def quarantine(self, run: str, save: str, *, who: str, reason: str) -> None:
        """Give a checkpoint up by a person's word. Nothing is deleted; `reinstate` takes it back."""
        body = CheckpointQuarantined(save=save, ground="operator", who=who, reason=reason)
        self._decide(run, save, lambda state: save in state.quarantined, body, tries=1)

    def reinstate(self, run: str, save: str, *, who: str, reason: str) -> None:
        """Take a quarantine back."""
        body = CheckpointReinstated(save=save, who=who, reason=reason)
        self._decide(run, save, lambda state: save not in state.quarantined, body, tries=1)

    def rollback(self, run: str, to: str, *, who: str, reason: str) -> None:
        """The next start resumes from `to`. A job that is running is told that it is fenced."""
        state = self._state(run, to)
        if state.tip == to and is_valid(state, to) and state.current is not None and state.current.closed:
            return  # by an earlier call, perhaps, that was not answered
        self.ledger.append(run, _always(as_next(state, RolledBack(to=to, who=who, reason=reason))))

    def pin(self, run: str, save: str, who: str) -> None:
        """Keep a checkpoint until it is unpinned."""
        body = CheckpointPinned(save=save, who=who)
        self._decide(run, save, lambda state: who in state.pinned.get(save, ()), body)

    def unpin(self, run: str, save: str, who: str) -> None:
        body = CheckpointUnpinned(save=save, who=who)
        self._decide(run, save, lambda state: who not in state.pinned.get(save, ()), body)

    def hold(self, run: str, save: str, who: str, *, again: bool = False) -> int | None:
        """Keep a checkpoint while `who` reads it; the turn of the record that was written for that, None if there was
        one. `again` writes one although there is one, for all services to see that the reader is there."""
        body = CheckpointHeld(save=save, who=who)
        before = self._state(run, save).turns.get(body.topic, 0) if again else -1

        def held(state: RunState) -> bool:
            return who in state.held.get(save, ()) and state.turns.get(body.topic, 0) != before

        written = self._decide(run, save, held, body)
        return written.turn if written is not None else None

    def release(self, run: str, save: str, who: str) -> None:
        """The reader itself is done with it."""
        body = CheckpointReleased(save=save, who=who)
        self._decide(run, save, lambda state: who not in state.held.get(save, ()), body)

    def release_silent(self, run: str, save: str, who: str, turn: int) -> None:
        """End the hold whose end is `turn` of its topic: its reader fell silent. One that ended is left alone, and so
        is one that began, or was said again, since."""
        body = CheckpointReleased(save=save, who=who, turn=turn)
        self.ledger.append(run, _always(body))

    def close(self, run: str, *, who: str, reason: str) -> None:
        """End the run: a job that is running is fenced, and nothing starts until `reopen`. All else goes on."""
        self._decide(run, None, lambda state: state.closed is not None, RunClosed(who=who, reason=reason), tries=1)

    def reopen(self, run: str, *, who: str, reason: str) -> None:
        """Take a closing back: the next start goes on from the resume point."""
        self._decide(run, None, lambda state: state.closed is None, RunReopened(who=who, reason=reason), tries=1)

    # Verification.

    def verify(self, run: str, save: str, *, reader: SecondReader | None = None) -> DamageAnswer | None:
        """Read every byte of a checkpoint, in another process unless `reader` does it. None: whole, and the log says
        so now, unless it is in quarantine. Else what became of the finding: a second reading, in a process of its
        own, decides about quarantine."""
        state, read = self._state(run, save), reader or self._reader
        if save in state.retired:
            raise _retired(run, save)
        observer, quarantines = this_process(), state.turns.get(f"quarantine:{save}", 0)
        for ref in self._objects(state.checkpoints[save]):
            reading = read(self.ledger.storage, ref)
            if reading.damage is not None:
                report = DamageReport(save=save, damage=reading.damage, reader=reading.reader)
                return self.ledger.report_damage(run, report)
            observer = reading.reader
        body = CheckpointVerified(save=save, reader=observer, quarantines=quarantines)
        before = self._state(run, save).verified.get(save, 0)
        self._decide(run, save, lambda state: save in state.quarantined or state.verified.get(save, 0) > before, body)
        return None

    def unverified(self, run: str, policy: Policy, *, passing: Collection[str] = ()) -> str | None:
        """The checkpoint to verify next, for retention to go on: the newest valid one of the line; then those before
        it, until as many are verified as there must be. None if there is no more to do. `passing` are passed over."""
        state = self.ledger.state(run)
        line = [c.save for c in lineage(state) if is_valid(state, c.save)]
        whole = min_keep(state)
        if set(whole) <= set(line[: policy.keep_last]) and all(d.keep for d in plan(state, policy)):
            return None  # nothing is kept that need not be
        unread = [save for save in line if save not in state.verified and save not in passing]
        return unread[0] if unread and (unread[0] == line[0] or len(whole) < MIN_KEEP) else None

    def _objects(self, checkpoint: Checkpoint) -> list[ManifestRef | ObjectRef]:
        """What there is to read of it: the manifest alone if that is damaged."""
        try:
            manifest: Manifest = read_manifest(self.ledger.storage, checkpoint.manifest)
        except Corrupt as error:
            if damage_of(error) is None:
                raise
            return [checkpoint.manifest]
        return [checkpoint.manifest, *manifest.objects()]

    # Retention and collection.

    def plan(self, run: str, policy: Policy) -> list[Decision]:
        """What the policy would keep and retire now, with the rule for each. Changes nothing."""
        return plan(self.ledger.state(run), policy)

    def retire(self, run: str, policy: Policy) -> list[Decision]:
        """Retire what the policy does not keep; the decisions that were carried out. `Conflict` while that cannot be
        (a generation is starting, fewer than two checkpoints are verified): the next pass will."""
        state = self.ledger.state(run)
        given_up = [decision for decision in plan(state, policy) if not decision.keep][:MAX_RETIRED]
        if given_up:
            body = CheckpointsRetired(
                saves=tuple(decision.save for decision in given_up),
                rule=f"keep_last={policy.keep_last} keep_every={policy.keep_every}",
            )
            self.ledger.append(run, _always(as_next(state, body)))
        return given_up

    def collect(self, run: str) -> Collected:
        """Delete what nothing needs any more; see `ckptd.collecting`."""
        return collect(self.ledger, run)

    # How.

    def _state(self, run: str, save: str) -> RunState:
        state = self.ledger.state(run)
        if save not in state.checkpoints:
            raise NotFound(f"run {run} has no checkpoint {save}", do="`ckptd ls` lists them.", run=run, save=save)
        return state

    def _decide(
        self, run: str, save: str | None, done: Callable[[RunState], bool], body: AboutTopic, *, tries: int = TRIES
    ) -> AboutTopic | None:
        """Append `body`, about `save`, as its topic's next turn, unless it is `done`, by us or by somebody else; what
        was appended. With one try nothing is decided about a state that nobody saw."""
        refusal: Conflict | None = None
        for number in range(tries + 1):
            state = self._state(run, layout.check_save(save)) if save is not None else self.ledger.state(run)
            if done(state):
                return None
            if number == tries:
                break
            if save is not None and save in state.retired:
                raise _retired(run, save)
            try:
                fixed = as_next(state, body)
                self.ledger.append(run, _always(fixed))
                return fixed
            except Conflict as error:
                refusal = error
        assert refusal is not None
        raise refusal


def _retired(run: str, save: str) -> Invalid:
    return Invalid(f"run {run}: checkpoint {save} is retired", do="Choose another.", save=save)


def _always(body: AboutTopic) -> Build:
    """The same record whatever the state became: a repeat then finds it by its name."""
    return lambda state: body
