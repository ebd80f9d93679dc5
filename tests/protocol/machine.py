"""A run under every kind of bad luck: the machine that Hypothesis drives.

Three incarnations with a ledger each, a service, and an outsider work on one storage in memory. Each sees it through
a view of its own that loses answers, delays puts and shows old listings. After every step an auditor reads the
storage, and what the callers were told is compared with what the log says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckptd import layout
from ckptd.complete import glance
from ckptd.errors import Conflict, Corrupt, Fenced, Unavailable
from ckptd.lineage import lineage, resume_point
from ckptd.log import RunLog
from ckptd.manifest import Manifest
from ckptd.records import Damage
from ckptd.slots import last_slot
from ckptd.state import RunState
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faults import Delayed, Fault
from ckptd.testing.faulty import FaultyStorage, Operation
from ckptd.wire import AbortRequest, Answer, CommitRequest, DamageReport
from tests.core.by_hand import (
    ME,
    RUN,
    HandLog,
    a_ledger,
    beginning,
    borrowing,
    committed,
    live,
    opening,
    overwrite,
    write_save,
)

T = TypeVar("T")
INCARNATIONS = 3
ACTORS = INCARNATIONS + 1  # the last one is the service
MAX_CALLS = 400
DEADLINE_SECONDS = 0.2

incarnations = st.integers(0, INCARNATIONS - 1)
actors = st.integers(0, ACTORS - 1)
by_service = st.booleans()
picks = st.integers(0, 1 << 16)


def in_log(key: str) -> bool:
    return key.startswith(layout.log_folder(RUN))


class Interruption(Fault):
    """Just before a call something else happens, once: another actor was faster."""

    def __init__(self, operation: str, action: Callable[[], object]) -> None:
        super().__init__(operation, in_log)
        self.action = action

    def before(self, key: str) -> None:
        self.fire()
        self.action()


class Actor:
    """A ledger and its view of the storage."""

    def __init__(self, inner: MemoryStorage) -> None:
        self.view = FaultyStorage(inner)
        self.ledger = a_ledger(self.view, deadline_seconds=DEADLINE_SECONDS)

    def settle(self) -> None:
        self.view.heal()
        self.view.faults.clear()


class Incarnation(Actor):
    """An actor that is a job, and what it knows of its own generation."""

    def __init__(self, inner: MemoryStorage, number: int) -> None:
        super().__init__(inner)
        self.attempt = f"{number + 1:032x}"
        self.generation: int | None = None

    def learn(self, answer: Answer) -> None:
        self.generation = max(answer.generation, self.generation or 0)


class Run(RuleBasedStateMachine):
    """The rules; see `test_invariants` for which invariant is checked where."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MemoryStorage()
        self.jobs = [Incarnation(self.inner, number) for number in range(INCARNATIONS)]
        self.service = Actor(self.inner)
        self.outsider = Actor(self.inner)
        self.actors: list[Actor] = [*self.jobs, self.service, self.outsider]
        self.auditor = Auditor(self.inner, RUN)
        self.follower = RunLog(self.inner, RUN, actor="follower")
        self.requests: list[CommitRequest] = []
        self.incomplete: set[str] = set()
        self.ok: set[str] = set()
        self.refused: set[str] = set()
        self.acknowledged: set[str] = set()
        self.damaged: set[str] = set()
        self.answers: dict[tuple[str, int | None], bytes] = {}
        self.late: list[Delayed] = []
        self.count = 0

    # How calls are made, and what their outcome obliges to.

    def truth(self) -> RunState:
        return RunLog(self.inner, RUN, actor="truth").replay()

    def actor(self, job: int, service: bool) -> Actor:
        return self.service if service else self.jobs[job]

    @contextmanager
    def bounded(self, actor: Actor) -> Iterator[None]:
        """I22: however bad the storage is, a request makes a bounded number of calls."""
        before = actor.view.calls.total()
        yield
        made = actor.view.calls.total() - before
        assert made < MAX_CALLS + 4 * self.truth().seq, f"I22: {made} calls for one request"

    def request(self, actor: Actor, rid: str, call: Callable[[], T]) -> T | None:
        """I6 and I7: remembers what was promised and what was refused for good. None when it did neither."""
        with self.bounded(actor):
            try:
                result = call()
            except Unavailable:
                return None
            except (Fenced, Conflict) as error:
                if error.fields["final"]:
                    self.refused.add(rid)
                return None
        self.ok.add(rid)
        return result

    def answered(self, job: Incarnation, fallback_of: int | None, answer: Answer) -> None:
        """I9, I17 and I18."""
        known = self.answers.setdefault((job.attempt, fallback_of), answer.stored())
        assert answer.stored() == known, "I9: two answers for one attempt and fallback"
        state = self.truth()
        started = state.generations[answer.generation - 1]
        before = [c for c in state.checkpoints.values() if c.generation < started.number]
        assert (answer.answer == "none") == (not before), "I17: none for a run with commits, or the other way round"
        job.learn(answer)

    @initialize(steps=st.integers(0, 3))
    def a_run_so_far(self, steps: int) -> None:
        """Nothing, or a healthy generation with a checkpoint or two."""
        if steps:
            generation = live(self.outsider.ledger, "e" * 32)
            for step in range(1, steps):
                self._commit(self.outsider, self._write(generation, step))

    # An incarnation starts.

    @rule(job=incarnations, service=by_service)
    def start(self, job: int, service: bool) -> None:
        """What a client does, one after the other, as far as it gets."""
        self.open(job, service)
        self.begin(job, service, False)
        self._ready(job, service)

    @rule(job=incarnations, service=by_service, damaged=st.booleans(), gone=st.booleans())
    def start_and_fall_back(self, job: int, service: bool, damaged: bool, gone: bool) -> None:
        """What a client does whose ranks cannot load what they were promised."""
        actor, me = self.actor(job, service), self.jobs[job]
        self.open(job, service)
        self.begin(job, service, False)
        point = resume_point(self.truth())
        if me.generation is None or point is None or point.save not in self.acknowledged:
            return
        if damaged:
            self._spoil(point.save, writer=1, gone=gone)
        self._report(actor, point.save, writer=1)
        self.begin(job, service, True)
        self._ready(job, service)

    @rule(job=incarnations)
    def reborn(self, job: int) -> None:
        """The job is submitted again: a new attempt that knows nothing."""
        self.count += 1
        self.jobs[job].attempt, self.jobs[job].generation = f"{self.count:031x}{job}", None

    @rule(job=incarnations, service=by_service)
    def open(self, job: int, service: bool) -> None:
        actor, me = self.actor(job, service), self.jobs[job]
        self.request(actor, f"open:{me.attempt}", lambda: actor.ledger.open(RUN, opening(me.attempt)))

    @rule(job=incarnations, service=by_service, fallback=st.booleans())
    def begin(self, job: int, service: bool, fallback: bool) -> None:
        actor, me = self.actor(job, service), self.jobs[job]
        fallback_of = me.generation if fallback else None
        rid = f"begin:{me.attempt}:{fallback_of or 0}"
        try:
            answer = self.request(
                actor, rid, lambda: actor.ledger.begin(RUN, beginning(me.attempt, fallback_of=fallback_of))
            )
        except Corrupt:
            state = self.truth()
            assert state.tip is not None, "corrupt for a run without a commit"
            assert resume_point(state) is None, "corrupt for a run with a valid checkpoint"
            return
        if answer is not None:
            self.answered(me, fallback_of, answer)

    @rule(job=incarnations, service=by_service, fallback=st.booleans())
    def join(self, job: int, service: bool, fallback: bool) -> None:
        actor, me = self.actor(job, service), self.jobs[job]
        known = [generation for attempt, generation in self.answers if attempt == me.attempt]
        fallback_of = max((g for g in known if g is not None), default=None) if fallback else None
        with self.bounded(actor):
            try:
                answer = actor.ledger.join(RUN, me.attempt, fallback_of)
            except Unavailable:
                return
            except Fenced:
                if fallback_of is None:
                    self.refused.add(f"begin:{me.attempt}:0")
                return
        if answer is not None:
            self.answered(me, fallback_of, answer)

    @precondition(lambda self: any(job.generation for job in self.jobs))
    @rule(pick=picks, service=by_service)
    def ready(self, pick: int, service: bool) -> None:
        self._ready(self._begun(pick), service)

    def _ready(self, job: int, service: bool) -> None:
        actor, me, generation = self.actor(job, service), self.jobs[job], self.jobs[job].generation
        if generation is not None:
            rid = f"ready:{me.attempt}:{generation}"
            self.request(actor, rid, lambda: actor.ledger.ready(RUN, me.attempt, generation))

    def _begun(self, pick: int) -> int:
        begun = [index for index, job in enumerate(self.jobs) if job.generation]
        return begun[pick % len(begun)]

    # A save becomes a checkpoint, or not.

    @precondition(lambda self: any(job.generation for job in self.jobs))
    @rule(pick=picks, step=st.integers(0, 9), lacks=st.sampled_from([None, None, None, 0, 1]))
    def write(self, pick: int, step: int, lacks: int | None) -> None:
        """A complete save, or one that lacks the payload of a writer."""
        request = self._write(self.jobs[self._begun(pick)].generation or 1, step)
        if lacks is not None:
            self.incomplete.add(request.save)
            self.inner.delete(self._objects(request)[lacks])

    @precondition(lambda self: any(job.generation for job in self.jobs))
    @rule(pick=picks, ahead=st.integers(0, 2), service=by_service, lender=st.one_of(st.none(), picks))
    def save(self, pick: int, ahead: int, service: bool, lender: int | None) -> None:
        """What a client does: a save at the step it has come to, perhaps a borrowing one, and its commit."""
        job = self._begun(pick)
        tip = self.truth().tip
        step = int(tip.split("-")[1]) if tip else 0
        request = self._write(self.jobs[job].generation or 1, step + ahead, lender)
        self._commit(self.actor(job, service), request)

    def _write(self, generation: int, step: int, lender: int | None = None) -> CommitRequest:
        self.count += 1
        lenders = sorted(self.acknowledged) if lender is not None else []
        chosen = [lenders[(lender or 0) % len(lenders)]] if lenders else []
        borrowed = borrowing(*(self._manifest(self._saved(save)) for save in chosen))
        request = write_save(self.inner, generation, step, count=self.count, borrowed=borrowed)
        self.requests.append(request)
        return request

    def _manifest(self, request: CommitRequest) -> Manifest:
        return self.outsider.ledger.manifest(request.manifest)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, job=incarnations, service=by_service)
    def commit(self, pick: int, job: int, service: bool) -> None:
        self._commit(self.actor(job, service), self.requests[pick % len(self.requests)])

    def _commit(self, actor: Actor, request: CommitRequest) -> None:
        rid = f"commit:{request.save}:{request.manifest.sha256}"
        try:
            self.request(actor, rid, lambda: actor.ledger.commit(RUN, request))
        except Corrupt:
            gone = self.incomplete | self.damaged
            assert gone & {request.save, *self._manifest(request).borrows}, "a complete save was called incomplete"
            return
        if rid in self.ok:
            assert request.save not in self.incomplete, "I12: an incomplete save was committed"
            self.acknowledged.add(request.save)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, job=incarnations, service=by_service)
    def abort(self, pick: int, job: int, service: bool) -> None:
        actor, request = self.actor(job, service), self.requests[pick % len(self.requests)]
        body = AbortRequest(generation=request.generation, reason="a rank failed")
        rid = f"abort:{request.save}"
        self.request(actor, rid, lambda: actor.ledger.abort(RUN, request.save, body))
        if rid in self.ok:
            self.refused.add(f"commit:{request.save}:{request.manifest.sha256}")

    @precondition(lambda self: self.requests)
    @rule(pick=picks, job=incarnations, service=by_service)
    def status(self, pick: int, job: int, service: bool) -> None:
        """What a rank is told about a save is so, and stays so."""
        actor, request = self.actor(job, service), self.requests[pick % len(self.requests)]
        with self.bounded(actor):
            try:
                status = actor.ledger.save_status(RUN, request.save).status
            except Unavailable:
                return
        rid = f"commit:{request.save}:{request.manifest.sha256}"
        if status == "durable":
            assert rid in self.truth().accepted, "I6: durable, and no record of it counts"
        elif status in ("aborted", "fenced"):
            self.refused.add(rid)

    # Damage.

    def _objects(self, request: CommitRequest) -> list[str]:
        return [ref.key for ref in self._manifest(request).objects()]

    @precondition(lambda self: self.acknowledged - self.damaged)
    @rule(pick=picks, gone=st.booleans(), writer=st.integers(0, 1))
    def damage(self, pick: int, gone: bool, writer: int) -> None:
        """The medium loses a checkpoint: an object vanishes, or one of its bytes flips."""
        whole = sorted(self.acknowledged - self.damaged)
        self._spoil(whole[pick % len(whole)], writer, gone)

    def _spoil(self, save: str, writer: int, gone: bool) -> None:
        key = self._objects(self._saved(save))[writer]
        if save in self.damaged:
            return
        self.damaged.add(save)
        data = bytearray(self.inner.get(key, 1 << 20))
        data[20] ^= 1
        if gone:
            self.inner.delete(key)
        else:
            overwrite(self.inner, key, bytes(data))

    def _saved(self, save: str) -> CommitRequest:
        return next(request for request in self.requests if request.save == save)

    @precondition(lambda self: self.acknowledged)
    @rule(pick=picks, writer=st.integers(0, 2), job=incarnations, service=by_service)
    def report(self, pick: int, writer: int, job: int, service: bool) -> None:
        saves = sorted(self.acknowledged)
        self._report(self.actor(job, service), saves[pick % len(saves)], writer)

    def _report(self, actor: Actor, save: str, writer: int) -> None:
        """I19: a rank that finds fault is believed only if another reader finds it, too. Object 2 is a borrowed one,
        if there is one; all that need it are given up with it."""
        key = self._objects(self._saved(save))[writer:][:1] or self._objects(self._saved(save))[:1]
        found = Damage(object=key[0], chunk=0, expected="aa", observed="bb")
        report = DamageReport(save=save, damage=found, reader=ME)

        def call() -> bool:
            if not actor.ledger.report_damage(RUN, report).confirmed:
                raise Unavailable("not confirmed: nothing was promised")
            return True

        if self.request(actor, f"quarantine:{save}:0", call):
            needs = {save, *self._manifest(self._saved(save)).borrows}
            assert needs & self.damaged, "I19: a whole checkpoint was quarantined"

    # Questions.

    @rule(job=incarnations, service=by_service)
    def latest(self, job: int, service: bool) -> None:
        """I17 and I18: the answer is right, or there is none."""
        actor = self.actor(job, service)
        with self.bounded(actor):
            try:
                latest = actor.ledger.latest(RUN)
            except Unavailable:
                return
        state = self.truth()
        looks = ((c.save, glance(self.inner, c)) for c in lineage(state))
        seen = {name: damage for name, damage in looks if damage is not None}
        point = resume_point(state, seen)
        assert latest.answer == ("found" if point else "corrupt" if state.checkpoints else "none"), "I17, I18"
        assert (latest.checkpoint and latest.checkpoint.save) == (point and point.save)

    # Bad luck.

    @rule(
        who=actors,
        what=st.sampled_from(["put", "put", "get", "list", "sync", "size", "reader"]),
        lost=st.booleans(),
        nth=st.integers(1, 3),
        times=st.sampled_from([1, 2, 5, 100]),
    )
    def fail(self, who: int, what: Operation, lost: bool, nth: int, times: int) -> None:
        view = self._unlucky(who)
        where = in_log if what in ("put", "get", "list", "sync") else ""
        plan = view.fail_after if lost else view.fail_before
        plan(what, where, nth=nth, times=times)

    @rule(who=actors, silent=st.booleans())
    def delay(self, who: int, silent: bool) -> None:
        """A put is on its way; `silent` means that its writer reaches nobody until it gives up."""
        view = self._unlucky(who)
        self.late.append(view.delay_put(in_log))
        if silent:
            view.fail_before("put", in_log, nth=2, times=100)

    def _unlucky(self, who: int) -> FaultyStorage:
        """The view of an actor, free of what went wrong long ago."""
        view = self.actors[who].view
        if len(view.faults) > 2:
            self.actors[who].settle()
        return view

    @precondition(lambda self: self.late)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        self.late.pop(pick % len(self.late)).release()

    @rule(who=actors, last=st.integers(1, 8))
    def look_at_an_old_listing(self, who: int, last: int) -> None:
        self._unlucky(who).hide(in_log, last=last)

    @rule(who=actors)
    def recover(self, who: int) -> None:
        self.actors[who].settle()

    @rule(who=actors)
    def restart(self, who: int) -> None:
        """A process dies and comes back: it knows nothing but what is in the storage."""
        actor = self.actors[who]
        actor.ledger = a_ledger(actor.view, deadline_seconds=DEADLINE_SECONDS)

    @rule(who=actors, at=st.sampled_from(["put", "get", "list", "sync"]), job=incarnations, pick=picks)
    def interrupt(self, who: int, at: str, job: int, pick: int) -> None:
        """In the middle of the next call of an actor, another incarnation opens and begins, or commits."""
        attempt = self.jobs[job].attempt

        def action() -> None:
            ledger = self.outsider.ledger
            try:
                if pick % 2 and self.requests:
                    self._commit(self.outsider, self.requests[pick % len(self.requests)])
                else:
                    ledger.open(RUN, opening(attempt))
                    ledger.begin(RUN, beginning(attempt))
            except (Fenced, Conflict, Corrupt):
                return

        self._unlucky(who)._plan(Interruption(at, action))

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def write_without_asking(self, pick: int) -> None:
        """A writer that judges nothing puts its commit into the log. The readers judge."""
        request = self.requests[pick % len(self.requests)]
        if request.save not in self.incomplete and last_slot(self.inner, RUN):
            body = committed(request.generation, request.step, borrows=self._manifest(request).borrows)
            HandLog(self.inner).add(
                body.model_copy(update={"save": request.save, "manifest": request.manifest, "writers": 2})
            )

    def calm(self) -> None:
        """I21: when all is well again, a contender comes through to a checkpoint of its own."""
        for actor in self.actors:
            actor.settle()
        for late in self.late:
            late.release()
        self.late.clear()
        attempt = f"d{self.count:031x}"
        try:
            generation = live(self.outsider.ledger, attempt)
        except Corrupt:
            assert resume_point(self.truth()) is None
            return
        point = resume_point(self.truth())
        request = self._write(generation, point.step if point else 0)
        self._commit(self.outsider, request)
        assert request.save in self.acknowledged, "I21: nobody gets through"

    # What holds after every step.

    @invariant()
    def audit(self) -> None:
        """From the stored bytes: I1, I2, I3, I5, I8, I10 to I13, I15 to I17. With what was told: I6, I7."""
        self.auditor.assert_clean(
            acknowledged=sorted(self.acknowledged), refused=sorted(self.refused), damaged=sorted(self.damaged)
        )

    @invariant()
    def only_what_is_damaged_is_given_up(self) -> None:
        """I19, for all that one finding gives up at once."""
        for save in self.truth().quarantined:
            needs = {save, *self._manifest(self._saved(save)).borrows}
            assert needs & self.damaged, f"I19: {save} needs nothing that is damaged"

    @invariant()
    def promises(self) -> None:
        """I4: one who read along and one who reads it all now agree. I6: what was promised counts."""
        state = self.truth()
        assert self.follower.replay() == state, "I4: two readers disagree"
        assert self.ok <= state.accepted.keys(), f"I6: {self.ok - state.accepted.keys()}"

    @invariant()
    def nothing_is_lost_or_misplaced(self) -> None:
        """I13 and I14: no actor deletes anything. I20: every key stays inside the run."""
        for actor in self.actors:
            assert actor.view.calls["delete"] == 0, "I14: something was deleted"
        for key in self.inner._objects:
            assert key == layout.ROOT_MARKER or key.startswith(f"runs/{RUN}/"), f"I20: {key}"

    def teardown(self) -> None:
        self.calm()
        self.audit()
        self.promises()
