"""Damage reports: a second reading decides."""

from __future__ import annotations

from fastapi import APIRouter

from ckptd.second import DEADLINE_SECONDS
from ckptd.service.context import Here
from ckptd.service.routes.names import RunName
from ckptd.wire import DamageAnswer, DamageReport

router = APIRouter(tags=["damage"])


@router.post("/runs/{run}/damage")
async def report_damage(run: RunName, request: DamageReport, service: Here) -> DamageAnswer:
    """Any rank that failed to load. May take minutes: the object is read again by another process, once for
    all ranks that report it meanwhile."""
    answer = await service.readings.run_shared(
        (run, request.save, request.damage.object),
        lambda: service.ledger.report_damage(run, request),
        deadline_seconds=DEADLINE_SECONDS,
    )
    service.lookout.wake(run)
    return answer
