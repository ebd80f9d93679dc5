"""Questions about the storage and its runs. They change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Response

from ckptd import __version__
from ckptd.errors import Corrupt, NotFound
from ckptd.manifest import Manifest
from ckptd.service.context import Here, Service
from ckptd.service.pinned import body_of
from ckptd.service.readable import tell_readable
from ckptd.service.routes.names import RunName, SaveOf, Step
from ckptd.wire import CheckpointInfo, HeartbeatAnswer, Latest, RunInfo, StorageInfo

router = APIRouter(tags=["runs"])


@router.get("/storage")
def storage(service: Here) -> StorageInfo:
    """Where the service keeps runs; payload goes there straight from the trainer."""
    return StorageInfo(url=service.ledger.storage.url, uuid=service.ledger.uuid, version=__version__)


@router.get("/runs")
def runs(service: Here) -> list[RunInfo]:
    """All runs, each in one line; one with a damaged log says so in `problem`."""
    found = []
    for name in service.ledger.runs():
        try:
            found.append(service.ledger.run_info(name))
        except NotFound:
            continue  # a folder, and no record in it: not a run yet
    return found


@router.get("/runs/{run}")
def run(run: RunName, service: Here) -> RunInfo:
    """One run; with a damaged log, what holds before the damage."""
    return service.ledger.run_info(run)


@router.get("/runs/{run}/latest", response_model=Latest)
async def latest(run: RunName, service: Here) -> Response:
    """Where a start would resume now, with a reason for each candidate. For people: it pins nothing. All who ask at
    the same time share one look at the storage, which begins after they came."""

    def look() -> bytes:
        with readable(service, run):
            return body_of(service.ledger.latest(run))

    body = await service.lookout.ask(run, ("latest",), look, lambda body: False, 0.0)
    return Response(body, media_type="application/json")


@router.get("/runs/{run}/checkpoints")
def checkpoints(run: RunName, service: Here) -> list[CheckpointInfo]:
    """All checkpoints of a run, in the order of their commits."""
    with readable(service, run):
        return service.ledger.checkpoints(run)


@router.get("/runs/{run}/checkpoints/{step}")
def checkpoint(run: RunName, step: Step, service: Here, save: SaveOf = None) -> CheckpointInfo:
    """The newest checkpoint of a step, the one on the current line if there are several, unless `save` names one."""
    with readable(service, run):
        return service.ledger.checkpoint_at(run, step, save)


@router.get("/runs/{run}/checkpoints/{step}/manifest", response_model=Manifest)
def manifest(run: RunName, step: Step, service: Here, save: SaveOf = None) -> Response:
    """The manifest of that checkpoint, checked against its commit: the stored bytes."""
    ref = checkpoint(run, step, service, save).manifest
    return Response(service.ledger.manifest(ref).stored(), media_type="application/json")


@router.get("/runs/{run}/generation")
def generation(run: RunName, service: Here) -> HeartbeatAnswer:
    """The current generation, 0 before the first."""
    return service.ledger.current(run)


@contextmanager
def readable(service: Service, run: str) -> Iterator[None]:
    """Lets the error of a damaged log tell what can still be read."""
    try:
        yield
    except Corrupt as error:
        raise tell_readable(service.ledger.storage, run, error) from error
