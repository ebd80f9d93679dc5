"""What people decide about checkpoints, what readers hold, and why a run is where it is."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path

from ckptd.service.context import Here
from ckptd.service.routes.names import RunName, Step
from ckptd.service.routes.runs import readable
from ckptd.why import Why, why
from ckptd.wire import ActOnRun, ActRequest, CheckpointInfo, HoldAnswer, RunInfo, RunVerb

REFRESHES = 4  # so many words of a reader fit into the silence after which it is taken for gone
Act = Annotated[
    Literal["quarantine", "reinstate", "rollback", "pin", "unpin", "release"],
    Path(description="What is decided"),
]
ActOfRun = Annotated[RunVerb, Path(description="What is decided")]
router = APIRouter(tags=["people"])


@router.get("/runs/{run}/why")
def explain(run: RunName, service: Here) -> Why:
    """The answer a start would get, candidate by candidate, what is off the line and why, and who has the run."""
    with readable(service, run):
        found = why(service.ledger, run)
    last = service.presence.last(run)
    if found.generation is None or last is None or last[0] != found.generation.job:
        return found
    generation = found.generation.model_copy(update={"seconds_ago": round(last[1], 1)})
    return found.model_copy(update={"generation": generation})


@router.post("/runs/{run}/{act}")
def decide_about_run(run: RunName, act: ActOfRun, request: ActOnRun, service: Here) -> RunInfo:
    """Close a run, or reopen it. Closing fences the running job, and nothing starts in the run until it is reopened;
    all else goes on: questions, pins, verification, retention."""
    info = service.keeper.act_on_run(run, act, request)
    service.lookout.wake(run)
    return info


@router.post("/runs/{run}/checkpoints/{step}/hold")
def hold(run: RunName, step: Step, request: ActRequest, service: Here) -> HoldAnswer:
    """A reader, such as an evaluation: keep this checkpoint while I read it. To be said again within
    `refresh_seconds`; a reader that falls silent is taken for gone."""
    save, who = service.keeper.chosen(run, step, request.save).save, request.who
    turn = service.keeper.hold(run, save, who)
    if service.holds.heard(run, save, who) and turn is None:
        turn = service.keeper.hold(run, save, who, again=True)
    if turn is not None:
        service.holds.wrote(run, save, who, turn)
    info = service.keeper.chosen(run, step, save)
    return HoldAnswer(checkpoint=info, refresh_seconds=service.holds.silent_seconds / REFRESHES)


@router.post("/runs/{run}/checkpoints/{step}/{act}")
def decide(run: RunName, step: Step, act: Act, request: ActRequest, service: Here) -> CheckpointInfo:
    """Quarantine, reinstate, roll back to, pin, unpin or release a checkpoint; what it is like afterwards.

    The newest one of the step, the one on the line if there are several, unless `save` names another. A roll-back
    fences the running job: its restart resumes from there.
    """
    info = service.keeper.act(run, step, act, request)
    service.lookout.wake(run)
    return info
