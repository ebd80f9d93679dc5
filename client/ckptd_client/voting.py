"""A vote in which each rank tells what became of its step, so that all go on or none does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from ckptd.errors import CkptdError, Corrupt, Invalid, describe, from_dict
from ckptd.reading import damage_of
from ckptd_client.agreement import Agreement
from ckptd_client.ring import GaveUp

log = logging.getLogger("ckptd")


def vote(agreement: Agreement, name: str, ballot: dict[str, Any], error: CkptdError | None) -> list[dict[str, Any]]:
    """All ranks' ballots. Raises on every rank if any has an error: its own, or the other's with its rank."""
    mine = {**ballot, "error": error.to_dict()} if error is not None else ballot
    try:
        votes = agreement.vote(name, json.dumps(mine, default=str))
    except CkptdError as lost:
        if error is None:
            raise
        error.add_note(f"and not all ranks could be told: {describe(lost)}")
        raise error from lost
    if error is not None:
        raise error
    ballots: list[dict[str, Any]] = [json.loads(vote) for vote in votes]
    for rank, other in enumerate(ballots):
        if "error" in other:
            failure = dict(other["error"])
            raise from_dict({**failure, "message": f"rank {rank}: {failure['message']}"})
    return ballots


def tried(step: Callable[[], None], ballot: dict[str, Any]) -> CkptdError | None:
    """Do one step of a load. What damage it found goes into the ballot, and that another rank made it stop; any other
    error is returned, to be raised on all ranks by the vote."""
    try:
        step()
    except Corrupt as caught:
        damage = damage_of(caught)
        if damage is None:
            return caught
        ballot["damage"] = damage.model_dump()
    except CkptdError as caught:
        return caught
    except GaveUp as caught:
        log.warning("%s", caught)
        ballot["stopped"] = True
    except Exception as caught:  # noqa: BLE001 - a state_dict of the user's may raise anything
        return foreign("the checkpoint could not be loaded", caught)
    return None


def foreign(what: str, error: Exception) -> Invalid:
    """An error that is not one of ours, in a form that can be told to the other ranks."""
    told = Invalid(f"{what}: {describe(error)}", do="See the error above this one.")
    told.__cause__ = error
    return told
