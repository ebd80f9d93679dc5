"""One run put in order: verify what retention stands on, retire what the policy does not keep, collect the bytes.

The service does it in the background, `ckptd retain` and `ckptd verify` for people. A step that cannot be done now
is tried again by the next one who comes along; nothing here waits.
"""

from __future__ import annotations

from ckptd import layout
from ckptd.collecting import Lent
from ckptd.keeper import Keeper
from ckptd.manifest import Frozen, SaveId
from ckptd.retention import Decision, Policy
from ckptd.storage.root import refill_reserve
from ckptd.watched import Watch, unwatched, watched_reader
from ckptd.wire import VerifyAnswer


class RetainRequest(Policy):
    """With `dry_run` nothing is read and nothing changes."""

    dry_run: bool = False


class RetainAnswer(Frozen):
    """`decisions` are about the checkpoints as they were; `retired` were given up, the bytes of `purged` are gone,
    those of `lent` stay for the sake of others."""

    decisions: tuple[Decision, ...]
    verified: tuple[VerifyAnswer, ...] = ()
    retired: tuple[SaveId, ...] = ()
    purged: tuple[SaveId, ...] = ()
    lent: tuple[Lent, ...] = ()
    objects: int = 0


def verify(keeper: Keeper, run: str, step: int, save: str | None = None, watch: Watch = unwatched) -> VerifyAnswer:
    """Read every byte of a checkpoint in this process and say what became of it. `watch` follows."""
    info = keeper.chosen(run, step, save)
    finding = keeper.verify(run, info.save, reader=watched_reader(watch))
    quarantined = finding is None and info.status == "quarantined"
    return VerifyAnswer(
        save=info.save,
        step=info.step,
        payload_bytes=info.payload_bytes + info.borrowed_bytes,
        result="whole" if finding is None else "damaged" if finding.confirmed else "unconfirmed",
        recorded=finding is None and not quarantined,
        detail=finding.detail if finding is not None else "in quarantine" if quarantined else "",
    )


def retain(keeper: Keeper, run: str, request: RetainRequest, watch: Watch = unwatched) -> RetainAnswer:
    """All of it. `Conflict` if there is something to retire and that cannot be now: a generation is starting, or too
    few checkpoints are whole. What was verified until then stays verified."""
    decisions = keeper.plan(run, request)
    if request.dry_run:
        return RetainAnswer(decisions=tuple(decisions))
    answers: list[VerifyAnswer] = []
    retired: list[str] = []
    while (save := keeper.unverified(run, request, passing=[answer.save for answer in answers])) is not None:
        answers.append(verify(keeper, run, layout.step_of(save), save, watch))
    if answers:
        decisions = keeper.plan(run, request)
    while given_up := keeper.retire(run, request):
        retired += [decision.save for decision in given_up]
    collected = keeper.collect(run)
    refill_reserve(keeper.ledger.storage)
    return RetainAnswer(
        decisions=tuple(decisions),
        verified=tuple(answers),
        retired=tuple(retired),
        purged=collected.purged,
        lent=collected.lent,
        objects=collected.objects,
    )
