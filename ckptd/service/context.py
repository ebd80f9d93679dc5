"""What the routes of one service share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ckptd.ledger import Ledger
from ckptd.service.lookout import Lookout
from ckptd.service.presence import Presence
from ckptd.service.settings import ServiceSettings
from ckptd.service.threads import Threads

READING_THREADS = 2


@dataclass(frozen=True)
class Service:
    """Caches and acquaintances only: whatever counts is in the storage, so a restart loses nothing.

    `readings` are the threads for second readings, which may take minutes; `probe` the one for readiness.
    """

    settings: ServiceSettings
    ledger: Ledger
    lookout: Lookout
    presence: Presence
    readings: Threads
    probe: Threads

    @classmethod
    def over(cls, ledger: Ledger, settings: ServiceSettings, presence: Presence | None = None) -> Service:
        return cls(
            settings=settings,
            ledger=ledger,
            lookout=Lookout(
                relook_seconds=settings.relook_seconds, look_deadline_seconds=settings.storage_deadline_seconds
            ),
            presence=presence or Presence(window_seconds=settings.in_use_seconds),
            readings=Threads("reading", READING_THREADS),
            probe=Threads("probe", 1),
        )

    def wait_seconds(self, asked: float) -> float:
        return min(asked, self.settings.max_wait_seconds)

    def stop(self) -> None:
        self.lookout.stop()
        self.readings.close()
        self.probe.close()


async def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(_service_of)]
