"""Health, open to everybody and saying nothing about runs."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from ckptd.service.context import Here

READY_SECONDS = 5.0
router = APIRouter(prefix="/health", tags=["health"])


class Health(BaseModel):
    status: str


@router.get("/live")
async def live() -> Health:
    """The process is up."""
    return Health(status="live")


@router.get("/ready")
async def ready(service: Here) -> Health:
    """The storage root answers; a problem with the reason otherwise."""
    check = service.ledger.storage.check_root
    await service.probe.run_shared("root", check, deadline_seconds=READY_SECONDS)
    return Health(status="ready")
