"""From a found checkpoint to live objects: compare contracts, read, check, and only then install.

`load` and `put_in` are two steps because all ranks vote in between: see `incarnation`.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from ckptd.errors import Invalid
from ckptd_client.contract import APP_STATE, PER_RANK, Contract
from ckptd_client.loading import Found, State
from ckptd_client.stateful import check, install
from ckptd_client.suspicion import lost_optimizer_state

log = logging.getLogger("ckptd")
Live = MutableMapping[str, object]


def load(
    found: Found, contract: Contract, app_state: Live, per_rank: Live | None, *, logs: bool
) -> tuple[State, State | None]:
    """What to install: saved under a contract that fits, verified, and fitting the live objects. Changes nothing.

    Every rank, on its training thread; `logs` on one of them. Shared state, and this rank's own if there is any.
    """
    present = contract.fields(app_state, per_rank, found.answer.world)
    differences = contract.compare(found.manifest.contract, present)
    contract.refuse(differences, f"the checkpoint of step {found.step} ({found.save})")

    def fitting(live: Live, loaded: State, root: str, prefix: str) -> State:
        out = contract.left_out(live, loaded, differences, prefix)
        kept = {key: value for key, value in loaded.items() if key not in out}
        check({key: value for key, value in live.items() if key not in out}, kept, root)
        return kept

    shared = fitting(app_state, found.read_shared(), "app_state", APP_STATE)
    own = found.read_per_rank() if per_rank is not None else None
    if own is not None and per_rank is not None:
        own = fitting(per_rank, own, "per_rank", PER_RANK)
    for difference in differences if logs else ():  # at the end: what cannot be read yet is tried again
        level = logging.INFO if difference.severity == "info" else logging.WARNING
        log.log(level, "resume contract, step %d: %s", found.step, difference)
    return shared, own


def put_in(app_state: Live, per_rank: Live | None, shared: State, own: State | None) -> None:
    """Install what `load` returned. What is per rank goes last, random numbers above all: loading the rest may draw
    some. `Invalid` when an optimizer took its state and does not hold it."""
    _install(app_state, shared, "app_state")
    if own is not None and per_rank is not None:
        _install(per_rank, own, "per_rank")


def tell_about_per_rank(found: Found) -> None:
    """When no rank got state of its own although it asked: none goes on with another rank's, none silently."""
    saved, world, generation = found.manifest.world, found.answer.world, found.answer.generation
    log.warning(
        "step %d has no per-rank state for this start: %s. Every rank must derive its own, "
        "e.g. seed_rank(seed, generation=%d, rank)",
        found.step,
        "none was saved" if saved == world else f"it was saved by {saved} ranks, now there are {world}",
        generation,
    )


def _install(live: Live, loaded: State, root: str) -> None:
    """Install what was loaded; parts that are only live stay as they are."""
    chosen = {key: live[key] for key in loaded}
    install(chosen, loaded, root)
    live.update(chosen)
    lost = lost_optimizer_state(chosen, loaded)
    if lost:
        raise Invalid(
            "state was loaded and is not there: " + "; ".join(lost),
            do="Look at the optimizer's load_state_dict: training would go on as if it had never stepped.",
        )
