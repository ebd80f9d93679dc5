"""The tests can fail: each rule is taken away in turn, and the audit or the machine notices.

A weakening replaces one function of the product; a history directed at it runs once with the rule, where all must be
well, and once without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ckptd import answers, collecting, history, layout, ledger, lineage, starting, upkeep
from ckptd import log as log_module
from ckptd.digests import sha256_hex
from ckptd.encoding import encode, record
from ckptd.errors import CkptdError, Conflict, Corrupt, Fenced, OutcomeUnknown, Unavailable
from ckptd.keeper import Keeper
from ckptd.log import RunLog
from ckptd.records import Body, CheckpointCommitted, GenerationStarted
from ckptd.retaining import RetainRequest, retain
from ckptd.state import Checkpoint, RunState
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faulty import FaultyStorage
from ckptd.upkeep_records import CheckpointQuarantined
from ckptd.verdicts import ACCEPTED, Verdict
from ckptd.wire import BeginRequest, CommitRequest
from tests.core.by_hand import (
    ME,
    RUN,
    A,
    B,
    HandLog,
    a_ledger,
    beginning,
    borrowing,
    live,
    opened,
    opening,
    other_reader,
    quarantined,
    save,
    write_save,
)
from tests.protocol.machine import Interruption, Run

Patch = pytest.MonkeyPatch


class World:
    """Two incarnations on one storage, the first with a view that can be unlucky, and what they were told."""

    def __init__(self) -> None:
        self.inner = MemoryStorage()
        self.view = FaultyStorage(self.inner)
        self.one, self.other = a_ledger(self.view), a_ledger(self.inner)
        self.auditor = Auditor(self.inner, RUN)
        self.acknowledged: list[str] = []
        self.refused: list[str] = []

    def commit(self, generation: int, step: int, count: int = 1) -> CommitRequest:
        request = write_save(self.inner, generation, step, count=count)
        self.send(request)
        return request

    def send(self, request: CommitRequest) -> None:
        try:
            self.one.commit(RUN, request)
        except (Fenced, Conflict) as error:
            if error.fields["final"]:
                self.refused.append(f"commit:{request.save}:{request.manifest.sha256}")
        else:
            self.acknowledged.append(request.save)

    def rules(self) -> set[str]:
        findings = self.auditor.check(acknowledged=self.acknowledged, refused=self.refused)
        return {finding.rule for finding in findings}


# Histories, each of them harmless as long as its rule holds.


def overtaken(world: World) -> None:
    """Between the judgement of a commit and its put another incarnation begins."""
    live(world.one)
    world.commit(1, 5)

    def begin() -> None:
        world.other.open(RUN, opening(B))
        world.other.begin(RUN, beginning(B))

    overtake = Interruption("put", begin)
    world.view._plan(overtake)
    world.commit(1, 6)
    assert overtake.fired


def left_behind(world: World) -> None:
    """Step 9 was given up; training went on from 5."""
    live(world.one)
    world.commit(1, 5)
    world.commit(1, 9)
    HandLog(world.inner).add(quarantined(save(1, 9)))
    world.other.open(RUN, opening(B))
    with suppress(Conflict):
        world.other.begin(RUN, beginning(B))


def saved_twice(world: World) -> None:
    live(world.one)
    world.commit(1, 5)
    world.commit(1, 5, 2)


def hasty(world: World) -> None:
    """A commit before the generation is ready."""
    world.one.open(RUN, opening(A))
    world.one.begin(RUN, beginning(A))
    world.commit(1, 5)


def old_listing(world: World) -> None:
    """A commit whose writer's listing is too old to show that the generation is ready."""
    live(world.other)
    hidden = world.view.hide("log", last=1)
    request = world.commit(1, 5)
    hidden.heal()
    world.other.commit(RUN, request)


def wakes_up_late(world: World) -> None:
    """An incarnation opens, sleeps, and begins after a younger one."""
    world.one.open(RUN, opening(A))
    live(world.other, B)
    with suppress(Fenced):
        world.one.begin(RUN, beginning(A))


def all_damaged(world: World) -> None:
    live(world.one)
    world.commit(1, 5)
    HandLog(world.inner).add(quarantined(save(1, 5)))
    world.other.open(RUN, opening(B))
    with suppress(Corrupt):
        world.other.begin(RUN, beginning(B))


def accuses_alone(world: World) -> None:
    live(world.one)
    world.commit(1, 5)
    HandLog(world.inner).add(quarantined(save(1, 5), confirmed_by=ME))


def lost_put(world: World) -> None:
    """The put of a commit never lands, and its writer is told nothing."""
    live(world.one)
    request = write_save(world.inner, 1, 5)
    world.view.fail_before("put", layout.log_key(RUN, 5), times=None)
    with suppress(Unavailable, Corrupt):
        world.send(request)


def lost_answer(world: World) -> None:
    """A commit lands, and its writer hears nothing but errors until its deadline."""
    live(world.one)
    request = write_save(world.inner, 1, 5)
    world.view.fail_before("get", layout.log_key(RUN, 5), nth=2, times=None)
    with suppress(OutcomeUnknown):
        world.send(request)


def steps_back(world: World) -> None:
    live(world.one)
    world.commit(1, 5)
    world.commit(1, 4)


def incomplete(world: World) -> None:
    live(world.one)
    request = write_save(world.inner, 1, 5)
    world.inner.delete(world.one.manifest(request.manifest).objects()[1].key)
    with suppress(Corrupt):
        world.send(request)


def borrowed_and_retired(world: World) -> None:
    """Step 3 borrows from step 1, which retention gives up."""
    live(world.one)
    lender = world.commit(1, 1)
    world.commit(1, 2)
    borrowed = borrowing(world.one.manifest(lender.manifest))
    for step in (3, 4):
        world.send(write_save(world.inner, 1, step, borrowed=borrowed))
    with suppress(Conflict):
        retain(Keeper(world.one, reader=other_reader), RUN, RetainRequest(keep_last=2))


def borrowed_too_late(world: World) -> None:
    """A save borrows from step 1, which is retired and collected before its commit."""
    live(world.one)
    lender = world.commit(1, 1)
    for step in (2, 3):
        world.commit(1, step)
    late = write_save(world.inner, 1, 4, borrowed=borrowing(world.one.manifest(lender.manifest)))
    retain(Keeper(world.one, reader=other_reader), RUN, RetainRequest(keep_last=2))
    with suppress(Corrupt):
        world.send(late)


# Weakenings.


def judged_only_before(patch: Patch) -> None:
    """The fence is judged once, by the writer; then the record goes into the first free slot and counts."""
    judge = history.judge

    def believe(state: RunState, body: Body) -> Verdict:
        return ACCEPTED if isinstance(body, CheckpointCommitted) else judge(state, body)

    def append(self: RunLog, build: Callable[[RunState], Body], *, deadline_seconds: float) -> str:
        state = self.replay()
        body = build(state)
        if body.rid in state.accepted:
            return body.rid
        verdict = judge(state, body)
        if not verdict.accepted:
            raise self._refusal(verdict, body)
        while body.rid not in state.accepted:
            item = record(state.seq + 1, state.digest, body, actor="weak", time="")
            self._fill(item.seq, encode(item), body.rid, self._clock() + deadline_seconds)
            body = build(self.replay())
        return body.rid

    patch.setattr(history, "judge", believe)
    patch.setattr(RunLog, "append", append)


def _resume_from(patch: Patch, choose: Callable[[RunState], Checkpoint | None]) -> None:
    for module in (history, ledger, answers, lineage, starting):
        patch.setattr(module, "resume_point", lambda state, seen=None: choose(state))


def resume_from_the_highest_step(patch: Patch) -> None:
    _resume_from(patch, lambda state: max(state.checkpoints.values(), key=lambda c: c.step, default=None))


def resume_from_the_first_of_a_step(patch: Patch) -> None:
    _resume_from(
        patch,
        lambda state: max(
            (c for c in state.checkpoints.values() if c.save not in state.quarantined),
            key=lambda c: (c.step, -c.seq),
            default=None,
        ),
    )


def _let_pass(patch: Patch, kind: type[Body]) -> None:
    """Readers and writers let every record of a kind count."""
    judge = history.judge

    def lax(state: RunState, body: Body) -> Verdict:
        return ACCEPTED if isinstance(body, kind) and body.rid not in state.accepted else judge(state, body)

    for module in (history, log_module, ledger):
        patch.setattr(module, "judge", lax)


def commit_whenever(patch: Patch) -> None:
    _let_pass(patch, CheckpointCommitted)


def begin_whenever(patch: Patch) -> None:
    _let_pass(patch, GenerationStarted)


def quarantine_alone(patch: Patch) -> None:
    _let_pass(patch, CheckpointQuarantined)


def start_from_nothing(patch: Patch) -> None:
    """With no valid checkpoint left the run is taken for a new one."""
    start = starting.start_body

    def anew(run: str, state: RunState, request: BeginRequest) -> GenerationStarted:
        try:
            return start(run, state, request)
        except Corrupt:
            return GenerationStarted(generation=len(state.generations) + 1, attempt=B, world=2, resume_from=None)

    patch.setattr(ledger, "start_body", anew)
    _let_pass(patch, GenerationStarted)


def refuse_on_an_old_prefix(patch: Patch) -> None:
    """What does not count in the prefix that was read is refused for good."""

    def refusal(self: RunLog, verdict: Verdict, body: Body) -> Conflict:
        return Conflict(verdict.reason, final=True)

    patch.setattr(RunLog, "_has", lambda self, seq: False)
    patch.setattr(RunLog, "_refusal", refusal)


def skip_an_open_slot(patch: Patch) -> None:
    """A writer that does not know what became of its slot takes the next one."""
    fill = RunLog._fill

    def impatient(self: RunLog, seq: int, data: bytes, rid: str, give_up_at: float) -> bool:
        try:
            return fill(self, seq, data, rid, give_up_at)
        except OutcomeUnknown:
            item = record(seq + 1, sha256_hex(data), opened(B), actor="weak", time="")
            return fill(self, seq + 1, encode(item), rid, give_up_at)

    patch.setattr(RunLog, "_fill", impatient)


def clean_up_after_an_unknown_commit(patch: Patch) -> None:
    commit = ledger.Ledger.commit

    def tidy(self: ledger.Ledger, run: str, request: CommitRequest) -> None:
        try:
            commit(self, run, request)
        except OutcomeUnknown:
            for ref in self.manifest(request.manifest).objects():
                self.storage.delete(ref.key)
            raise

    patch.setattr(ledger.Ledger, "commit", tidy)


def call_unknown_done(patch: Patch) -> None:
    """An append whose outcome is open returns as if it had succeeded."""
    append = RunLog.append

    def optimist(self: RunLog, build: Callable[[RunState], Body], *, deadline_seconds: float) -> str:
        try:
            return append(self, build, deadline_seconds=deadline_seconds)
        except OutcomeUnknown:
            return ""

    patch.setattr(RunLog, "append", optimist)


def commit_unseen(patch: Patch) -> None:
    patch.setattr(ledger, "check_complete", lambda storage, run, request, manifest, checkpoints: None)


def collect_though_borrowed(patch: Patch) -> None:
    """Whoever is retired goes, whoever borrows from it."""
    for module in (collecting, upkeep):
        patch.setattr(module, "borrowers", lambda state: {})


def borrow_from_anybody(patch: Patch) -> None:
    patch.setattr(history, "_judge_borrowing", lambda state, body: None)
    commit_unseen(patch)


def believe_listings(patch: Patch) -> None:
    """The end of the listing is taken for the end of the log."""
    patch.setattr(RunLog, "_has", lambda self, seq: False)


CASES: list[tuple[Callable[[World], None], Callable[[Patch], None], str]] = [
    (overtaken, judged_only_before, "I10"),
    (left_behind, resume_from_the_highest_step, "I16"),
    (saved_twice, resume_from_the_first_of_a_step, "I16"),
    (hasty, commit_whenever, "I11"),
    (overtaken, commit_whenever, "I10"),
    (steps_back, commit_whenever, "I15"),
    (old_listing, refuse_on_an_old_prefix, "I7"),
    (wakes_up_late, begin_whenever, "I8"),
    (all_damaged, start_from_nothing, "I17"),
    (accuses_alone, quarantine_alone, "I19"),
    (lost_put, skip_an_open_slot, "I2"),
    (lost_put, call_unknown_done, "I6"),
    (lost_answer, clean_up_after_an_unknown_commit, "I12"),
    (incomplete, commit_unseen, "I12"),
    (borrowed_and_retired, collect_though_borrowed, "I13"),
    (borrowed_too_late, borrow_from_anybody, "I12"),
]


@pytest.mark.parametrize(
    ("happens", "weaken", "rule"), CASES, ids=[f"{c[2]}-{c[0].__name__}-{c[1].__name__}" for c in CASES]
)
def test_a_rule_that_is_dropped_is_missed(
    happens: Callable[[World], None], weaken: Callable[[Patch], None], rule: str, monkeypatch: Patch
) -> None:
    healthy = World()
    happens(healthy)
    assert healthy.rules() == set()
    weaken(monkeypatch)
    weakened = World()
    happens(weakened)
    assert rule in weakened.rules()


@pytest.mark.parametrize(
    "weaken",
    [commit_whenever, begin_whenever, believe_listings, call_unknown_done],
)
def test_the_machine_finds_a_dropped_rule_by_itself(weaken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    weaken(monkeypatch)
    search = settings(
        max_examples=400,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, CkptdError, BaseExceptionGroup)):
        run_state_machine_as_test(Run, settings=search)
