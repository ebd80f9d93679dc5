"""Rules of the product taken away one at a time, for readers and writers alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ckptd import collecting, history, layout, ledger, lineage, retention, starting, upkeep
from ckptd.errors import Conflict, Corrupt, OutcomeUnknown, Unavailable
from ckptd.keeper import Keeper
from ckptd.log import Build, RunLog
from ckptd.manifest import ManifestRef, ObjectRef
from ckptd.records import Body, GenerationStarted
from ckptd.second import Reading
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.upkeep_records import CheckpointsRetired
from ckptd.verdicts import ACCEPTED, Verdict
from ckptd.wire import BeginRequest, CommitRequest, DamageAnswer, DamageReport

Patch = pytest.MonkeyPatch


def keep_one_verified(patch: Patch) -> None:
    """Retention leaves one verified checkpoint where it should leave two."""
    for module in (lineage, upkeep):
        patch.setattr(module, "MIN_KEEP", 1)


def retire_while_starting(patch: Patch) -> None:
    judge = upkeep._judge_retire

    def lax(state: RunState, body: CheckpointsRetired) -> Verdict:
        calm = state.snapshot()
        if calm.current is not None:
            calm.generations[-1] = replace(calm.current, ready=True, closed="")
        return judge(calm, body)

    patch.setattr(upkeep, "_judge_retire", lax)


def retire_what_is_kept(patch: Patch) -> None:
    """Pins and holds are not looked at."""

    def only_the_resume_point(state: RunState) -> dict[str, str]:
        point = lineage.resume_point(state)
        return dict.fromkeys(lineage.min_keep(state), "newest") | ({point.save: "resume point"} if point else {})

    patch.setattr(upkeep, "protection", only_the_resume_point)
    patch.setattr("ckptd.retention.protection", only_the_resume_point)


def collect_the_current_generation(patch: Patch) -> None:
    def leftovers(storage: Storage, run: str, state: RunState) -> list[str]:
        names = storage.list(layout.manifests_folder(run))
        return [name for name in names if layout.SAVE_ID.fullmatch(name) and name not in state.checkpoints]

    patch.setattr(collecting, "_leftovers", leftovers)


def collect_before_the_record(patch: Patch) -> None:
    """The bytes go first, then the record that gives them up is tried."""
    retire = Keeper.retire

    def hasty(self: Keeper, run: str, policy: Any) -> Any:
        state, storage = self.ledger.state(run), self.ledger.storage
        for decision in retention.plan(state, policy):
            if not decision.keep:
                folder = layout.payload_folder(run, decision.save)
                for name in storage.list(folder):
                    storage.delete(f"{folder}/{name}")
        return retire(self, run, policy)

    patch.setattr(Keeper, "retire", hasty)


def no_fence(patch: Patch) -> None:
    fence = history._fence

    def open_gate(state: RunState, generation: int) -> Verdict | None:
        verdict = fence(state, generation)
        return None if verdict is not None and verdict.final else verdict

    patch.setattr(history, "_fence", open_gate)


def refuse_on_an_old_prefix(patch: Patch) -> None:
    """What does not count in the prefix that was read is refused for good."""

    def refusal(self: RunLog, verdict: Verdict, body: Body) -> Conflict:
        return Conflict(verdict.reason, final=True)

    patch.setattr(RunLog, "_has", lambda self, seq: False)
    patch.setattr(RunLog, "_refusal", refusal)


def clean_up_after_an_unknown_commit(patch: Patch) -> None:
    """Whoever gets no answer to a commit takes the save for lost."""
    commit = ledger.Ledger.commit

    def tidy(self: ledger.Ledger, run: str, request: CommitRequest) -> None:
        try:
            commit(self, run, request)
        except Unavailable:
            for ref in self.manifest(request.manifest).objects():
                self.storage.delete(ref.key)
            raise

    patch.setattr(ledger.Ledger, "commit", tidy)


def call_unknown_done(patch: Patch) -> None:
    """An append whose outcome is open returns as if it had succeeded."""
    append = RunLog.append

    def optimist(self: RunLog, build: Build, *, deadline_seconds: float) -> str:
        try:
            return append(self, build, deadline_seconds=deadline_seconds)
        except OutcomeUnknown:
            return ""

    patch.setattr(RunLog, "append", optimist)


def believe_one_reader(patch: Patch) -> None:
    """Whoever reports damage is believed: the second reading finds what the first one found."""
    report_damage = ledger.Ledger.report_damage

    def credulous(self: ledger.Ledger, run: str, report: DamageReport) -> DamageAnswer:
        second = self._second_reader

        def agree(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
            return Reading(reader=second(storage, ref).reader, damage=report.damage)

        self._second_reader = agree
        try:
            return report_damage(self, run, report)
        finally:
            self._second_reader = second

    patch.setattr(ledger.Ledger, "report_damage", credulous)


def start_from_nothing(patch: Patch) -> None:
    """With no valid checkpoint left the run is taken for a new one."""
    start, judge = starting.start_body, history._judge_start

    def anew(run: str, state: RunState, request: BeginRequest) -> GenerationStarted:
        try:
            return start(run, state, request)
        except Corrupt:
            number = len(state.generations) + 1
            return GenerationStarted(
                generation=number, attempt=request.attempt, world=request.world, resume_from=None
            )

    def lax(state: RunState, body: GenerationStarted) -> Verdict:
        verdict = judge(state, body)
        return ACCEPTED if body.resume_from is None and "from zero" in verdict.reason else verdict

    patch.setattr(ledger, "start_body", anew)
    patch.setattr(history, "_judge_start", lax)


def resume_from_the_highest_step(patch: Patch) -> None:
    def highest(state: RunState, seen: object = None) -> Any:
        valid = (c for c in state.checkpoints.values() if lineage.is_valid(state, c.save))
        return max(valid, key=lambda c: c.step, default=None)

    for module in (history, ledger, starting, lineage):
        patch.setattr(module, "resume_point", highest)


@dataclass(frozen=True)
class Weakening:
    """`drop` takes the rule away; the simulator then finds that `rule` is broken, from `first_seed` on."""

    drop: Callable[[Patch], None]
    rule: str
    first_seed: int = 1


WEAKENINGS = [
    Weakening(keep_one_verified, "I14"),
    Weakening(retire_while_starting, "I14"),
    Weakening(retire_what_is_kept, "I14"),
    Weakening(collect_the_current_generation, "I13"),
    Weakening(collect_before_the_record, "I13"),
    Weakening(no_fence, "I10"),
    Weakening(refuse_on_an_old_prefix, "I7", first_seed=10),
    Weakening(clean_up_after_an_unknown_commit, "I13", first_seed=4),
    Weakening(call_unknown_done, "I6", first_seed=4),
    Weakening(believe_one_reader, "I19", first_seed=7),
    Weakening(start_from_nothing, "I17", first_seed=8),
    Weakening(resume_from_the_highest_step, "I16"),
]
