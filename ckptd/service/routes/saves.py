"""A save becomes a checkpoint: parts, commit or abort, and the waiting for either."""

from __future__ import annotations

from fastapi import APIRouter, Response

from ckptd import layout
from ckptd.errors import Invalid
from ckptd.service.context import Here
from ckptd.service.door import status_of_save
from ckptd.service.routes.names import RunName, SaveName, Wait, Writers
from ckptd.wire import AbortRequest, CommitRequest, PartReport, PartsAnswer, SaveStatus

router = APIRouter(tags=["saves"])


@router.post("/runs/{run}/saves/{save}/parts", status_code=204)
async def report_part(run: RunName, save: SaveName, request: PartReport, service: Here) -> None:
    """Any writer, when its part manifest lies in the storage: a hint to those who wait, to look now."""
    service.lookout.wake(run)


@router.get("/runs/{run}/saves/{save}/parts")
async def parts(
    run: RunName, save: SaveName, service: Here, writers: Writers, wait_seconds: Wait = 0.0
) -> PartsAnswer:
    """Rank 0: the parts of writers 0 to `writers` - 1 once all lie in the storage, else those that do by then."""

    def complete(answer: PartsAnswer) -> bool:
        return sum(int(writer) < writers for writer in answer.parts) >= writers

    return await service.lookout.ask(
        run,
        ("parts", save, writers),
        lambda: service.ledger.parts(run, save),
        complete,
        service.wait_seconds(wait_seconds),
    )


@router.post("/runs/{run}/saves/{save}/commit")
def commit(run: RunName, save: SaveName, request: CommitRequest, service: Here) -> SaveStatus:
    """Rank 0: make a complete save a checkpoint. The answer says durable, or it is a problem."""
    if request.save != save:
        raise Invalid(f"the body is about save {request.save}, the path about {save}", field="save")
    service.ledger.commit(run, request)
    service.lookout.wake(run)
    return SaveStatus(save=save, status="durable")


@router.post("/runs/{run}/saves/{save}/abort", status_code=204)
def abort(run: RunName, save: SaveName, request: AbortRequest, service: Here) -> None:
    """Rank 0: this save is off; everybody who waits for it learns why."""
    if layout.generation_of(save) != request.generation:
        raise Invalid(f"save {save} is not of generation {request.generation}", field="generation")
    service.ledger.abort(run, save, request)
    service.lookout.wake(run)


@router.get("/runs/{run}/saves/{save}", response_model=SaveStatus)
async def status(run: RunName, save: SaveName, service: Here, wait_seconds: Wait = 0.0) -> Response:
    """Any rank: what became of a save, as soon as it is decided."""
    return await status_of_save(service, run, save, wait_seconds)
