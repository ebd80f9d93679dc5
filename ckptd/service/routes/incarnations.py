"""An incarnation of a job starts: open, begin, join, ready; and the sign of life that keeps its run for it."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ckptd.service.context import Here
from ckptd.service.door import pinned_answer
from ckptd.service.routes.names import AttemptName, FallbackOf, Generation, RunName, Wait
from ckptd.wire import Answer, BeginRequest, Heartbeat, HeartbeatAnswer, OpenRequest, ReadyRequest

router = APIRouter(tags=["incarnations"])


@router.post("/runs/{run}/attempts", status_code=204)
def open_attempt(run: RunName, request: OpenRequest, service: Here) -> None:
    """Rank 0, when its client is made: the attempt gets its age. Creates the run if it is new."""
    service.ledger.open(run, request)
    service.presence.opened(run, request.job, request.host)


@router.post("/runs/{run}/generations")
def begin(run: RunName, request: BeginRequest, service: Here) -> Answer:
    """Rank 0, once all ranks are there: start a generation. Its answer is frozen and the same for all ranks."""
    answer = service.ledger.join(run, request.attempt, request.fallback_of)
    if answer is not None:
        return answer  # begun before: it is only told again, and nothing is taken from anybody
    if not request.takeover:
        service.presence.refuse_other(run, request.job)
    answer = service.ledger.begin(run, request)
    service.presence.heard(run, request.job)
    service.lookout.wake(run)
    return answer


@router.get(
    "/runs/{run}/attempts/{attempt}/answer",
    response_model=Answer,
    responses={204: {"description": "Not begun within the wait: ask again"}},
)
async def answer(
    run: RunName, attempt: AttemptName, service: Here, fallback_of: FallbackOf = None, wait_seconds: Wait = 0.0
) -> Response:
    """Any rank: the answer of this attempt's generation, as soon as rank 0 has begun it."""
    return await pinned_answer(service, run, attempt, fallback_of, wait_seconds)


@router.post("/runs/{run}/generations/{generation}/ready", status_code=204)
def ready(run: RunName, generation: Generation, request: ReadyRequest, service: Here) -> None:
    """Rank 0, when all ranks hold the answer's state: from here on commits count."""
    service.ledger.ready(run, request.attempt, generation)
    service.lookout.wake(run)


@router.post("/runs/{run}/heartbeat")
def heartbeat(run: RunName, request: Heartbeat, service: Here) -> HeartbeatAnswer:
    """Rank 0, every few seconds. The answer tells a fenced job early; one that is fenced, or that a person ended,
    keeps nobody out."""
    current = service.ledger.current(run)
    if current.attempt == request.attempt and not current.ended:
        service.presence.heard(run, request.job, request.host)
    return current
