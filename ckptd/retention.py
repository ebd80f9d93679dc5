"""Which checkpoints to keep: pure policies. Checkpoints in; keep or retire, with the rule that decided, out.

No policy can take what must stay: the resume point, the newest verified ones of the line, what is pinned or held. The
log's own verdict protects these a second time (`ckptd.upkeep`), so a wrong policy costs space and never a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from ckptd.lineage import MIN_KEEP, borrowers, is_valid, lineage, protection
from ckptd.manifest import Frozen, SaveId, Step
from ckptd.state import RunState


class Policy(Frozen):
    """`keep_last` valid checkpoints of the line, newest first, and as many of all by order of their commits, so that
    what a roll-back left behind does not go at once. `keep_every` N: the first checkpoint of every N steps, for good.
    """

    keep_last: Annotated[int, Field(ge=MIN_KEEP, le=10**6)] = 5
    keep_every: Annotated[int, Field(ge=1, le=10**12)] | None = None


class Decision(Frozen):
    """`keep` or retire, and the rule that said so."""

    save: SaveId
    step: Step
    keep: bool
    rule: str


def plan(state: RunState, policy: Policy) -> list[Decision]:
    """A decision for every checkpoint that is not retired, in the order of their commits."""
    rules = protection(state)
    alive = [c for c in state.checkpoints.values() if c.save not in state.retired]
    line = [c for c in lineage(state) if is_valid(state, c.save)]
    for checkpoint in line[: policy.keep_last]:
        rules.setdefault(checkpoint.save, f"one of the last {policy.keep_last} of the line")
    for checkpoint in alive[-policy.keep_last :]:
        rules.setdefault(checkpoint.save, f"one of the last {policy.keep_last} commits")
    if policy.keep_every is not None:
        buckets = {c.step // policy.keep_every: c.save for c in line}  # newest first, so the oldest of each stays
        for bucket, save in buckets.items():
            rules.setdefault(save, f"the first of the {policy.keep_every} steps from {bucket * policy.keep_every} on")
    decisions = [
        Decision(save=c.save, step=c.step, keep=c.save in rules, rule=rules.get(c.save, "no rule keeps it"))
        for c in alive
    ]
    needed = {lender: [save for save in saves if save in rules] for lender, saves in borrowers(state).items()}
    return [d if d.keep or not needed.get(d.save) else _lent(state, d, needed[d.save]) for d in decisions]


def _lent(state: RunState, decision: Decision, saves: Sequence[str]) -> Decision:
    """The decision to retire one whose bytes others need."""
    needed_by = [state.checkpoints[save].step for save in saves]
    sake = f"its bytes stay for the sake of {len(needed_by)} that borrow from it, the newest of step {needed_by[-1]}"
    return decision.model_copy(update={"rule": f"{decision.rule}; {sake}"})
