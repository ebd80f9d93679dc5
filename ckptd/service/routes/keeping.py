"""Verification, retention, collection and checking, for whoever waits for it; and what goes on in the background."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from ckptd.fsck import fsck
from ckptd.retaining import RetainRequest, retain, verify
from ckptd.service.context import Here
from ckptd.service.following import MEDIA_TYPE, Followed, followed
from ckptd.service.housekeeping import HousekeepingInfo
from ckptd.service.routes.names import RunName, Step
from ckptd.service.scrub import ScrubInfo
from ckptd.wire import VerifyRequest

router = APIRouter(tags=["keeping"])
_LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Lines of JSON, the last one with the answer",
        "model": Followed,
        "content": {MEDIA_TYPE: {}},
    }
}


class BackgroundInfo(BaseModel):
    """`scrub` is None where it is off."""

    housekeeping: HousekeepingInfo
    scrub: ScrubInfo | None


@router.get("/housekeeping")
def housekeeping(service: Here) -> BackgroundInfo:
    """What housekeeping and scrubbing have done since the service started, and what failed last."""
    scrub = service.scrubber.info() if service.scrubber is not None else None
    return BackgroundInfo(housekeeping=service.housekeeper.info(), scrub=scrub)


@router.post("/runs/{run}/checkpoints/{step}/verify", response_class=Response, responses=_LINES)
async def verify_checkpoint(run: RunName, step: Step, request: VerifyRequest, service: Here) -> Response:
    """Read every byte of a checkpoint; the answer is a `VerifyAnswer`, after lines that tell how far it is."""
    return await followed(service.upkeep, lambda watch: verify(service.keeper, run, step, request.save, watch))


@router.post("/runs/{run}/retain", response_class=Response, responses=_LINES)
async def retain_run(run: RunName, request: RetainRequest, service: Here) -> Response:
    """Verify what is needed, retire what the policy does not keep, collect; the answer is a `RetainAnswer`."""
    return await followed(service.upkeep, lambda watch: retain(service.keeper, run, request, watch))


@router.post("/runs/{run}/collect", response_class=Response, responses=_LINES)
async def collect(run: RunName, service: Here) -> Response:
    """Delete the bytes of retired checkpoints and what ended generations left; the answer is `Collected`."""
    return await followed(service.upkeep, lambda watch: service.keeper.collect(run))


@router.post("/runs/{run}/fsck", response_class=Response, responses=_LINES)
async def check(
    run: RunName, service: Here, deep: bool = Query(default=False, description="Read every byte of payload, too")
) -> Response:
    """Check the log, the manifests and the objects of a run. Changes nothing; the answer is an `FsckAnswer`."""
    return await followed(service.upkeep, lambda watch: fsck(service.ledger.storage, run, deep=deep, watch=watch))
