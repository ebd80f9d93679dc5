"""What the routes of one service share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.service.holds import Holds
from ckptd.service.housekeeping import Housekeeper
from ckptd.service.lookout import Lookout
from ckptd.service.pinned import PinnedAnswers
from ckptd.service.presence import Presence
from ckptd.service.scrub import Scrubber
from ckptd.service.settings import ServiceSettings
from ckptd.service.threads import Threads

READING_THREADS = 2
UPKEEP_THREADS = 2
DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Service:
    """Caches and acquaintances only: whatever counts is in the storage, so a restart loses nothing.

    `readings` are the threads for second readings, which may take minutes; `upkeep` those for what people ask for and
    wait for; `probe` the one for readiness.
    """

    settings: ServiceSettings
    ledger: Ledger
    keeper: Keeper
    lookout: Lookout
    pinned: PinnedAnswers
    presence: Presence
    holds: Holds
    housekeeper: Housekeeper
    scrubber: Scrubber | None
    readings: Threads
    upkeep: Threads
    probe: Threads

    @classmethod
    def over(
        cls,
        ledger: Ledger,
        settings: ServiceSettings,
        presence: Presence | None = None,
        holds: Holds | None = None,
    ) -> Service:
        keeper = Keeper(ledger)
        holds = holds or Holds(silent_seconds=settings.hold_seconds)
        return cls(
            settings=settings,
            ledger=ledger,
            keeper=keeper,
            lookout=Lookout(
                relook_seconds=settings.relook_seconds, look_deadline_seconds=settings.storage_deadline_seconds
            ),
            pinned=PinnedAnswers(),
            presence=presence or Presence(window_seconds=settings.in_use_seconds),
            holds=holds,
            housekeeper=Housekeeper(keeper, holds, settings.policy, interval_seconds=settings.housekeeping_seconds),
            scrubber=Scrubber(
                keeper,
                mib_per_second=settings.verify_mib_per_second,
                again_seconds=settings.scrub_days * DAY_SECONDS,
                idle_seconds=settings.housekeeping_seconds,
            )
            if settings.verify_mib_per_second
            else None,
            readings=Threads("reading", READING_THREADS),
            upkeep=Threads("upkeep", UPKEEP_THREADS),
            probe=Threads("probe", 1),
        )

    def start(self) -> None:
        """What goes on in the background begins."""
        self.housekeeper.start()
        if self.scrubber is not None:
            self.scrubber.start()

    def wait_seconds(self, asked: float) -> float:
        return min(asked, self.settings.max_wait_seconds)

    def stop(self) -> None:
        self.housekeeper.stop()
        if self.scrubber is not None:
            self.scrubber.stop()
        self.lookout.stop()
        self.readings.close()
        self.upkeep.close()
        self.probe.close()


async def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(_service_of)]
