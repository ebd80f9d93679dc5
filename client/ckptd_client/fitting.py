"""From a found checkpoint to live objects: compare contracts, check, read, and then install.

Three steps, because all ranks vote between them: see `incarnation`. Nothing is written before all have found that the
checkpoint fits; the second step may write into live tensors, and nobody trains before the third is done on all ranks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, MutableMapping

from ckptd.errors import Invalid
from ckptd_client.blank import Blank
from ckptd_client.contract import APP_STATE, PER_RANK, Contract
from ckptd_client.counterparts import read_into_live
from ckptd_client.loading import Found
from ckptd_client.sharing import Sharing
from ckptd_client.stateful import Given, check, install
from ckptd_client.suspicion import lost_optimizer_state

log = logging.getLogger("ckptd")
Live = MutableMapping[str, object]


class Fitting:
    """A checkpoint that fits this start: compared with the live objects, and not read yet. Changes nothing.

    Every rank, on its training thread; `logs` on one of them. `Invalid` with everything that does not fit. What is
    to be read goes straight into live tensors where `counterparts` allows it.
    """

    def __init__(
        self,
        found: Found,
        contract: Contract,
        app_state: Live,
        per_rank: Live | None,
        give_up_at: float,
        *,
        rank: int,
        logs: bool,
    ) -> None:
        self._app_state, self._per_rank = app_state, per_rank
        self._shared_keys: set[str] = set()
        self._own_keys: set[str] = set()
        present = contract.fields(app_state, per_rank, found.answer.world)
        differences = contract.compare(found.manifest.contract, present)
        contract.refuse(differences, f"the checkpoint of step {found.step} ({found.save})")
        self.load = found.begin(give_up_at, per_rank=per_rank is not None)

        def fit(blank: Blank, live: Live, root: str, prefix: str) -> set[str]:
            out = contract.left_out(live, blank.state, differences, prefix)
            kept = {key: value for key, value in blank.state.items() if key not in out}
            check({key: value for key, value in live.items() if key not in out}, kept, root)
            return set(kept)

        self._shared_keys = fit(self.load.shared, app_state, "app_state", APP_STATE)
        if self.load.own is not None and per_rank is not None:
            self._own_keys = fit(self.load.own, per_rank, "per_rank", PER_RANK)
            read_into_live(self.load.own, self.load.own.state, self._kept(per_rank, self._own_keys))
        read_into_live(self.load.shared, self.load.shared.state, self._kept(app_state, self._shared_keys))
        self.load.arrange()
        self.sharing = Sharing(rank, self.load.storage, self.load.shared_chunks, self.load.own_chunks)
        for difference in differences if logs else ():  # at the end: what cannot be read yet is tried again
            level = logging.INFO if difference.severity == "info" else logging.WARNING
            log.log(level, "resume contract, step %d: %s", found.step, difference)

    @property
    def has_own(self) -> bool:
        """Whether there is state of this rank's own."""
        return self.load.own is not None

    def put_in(self) -> None:
        """Install what was read meanwhile. What is per rank goes last, random numbers above all: loading the rest may
        draw some. `Invalid` when an optimizer took its state and does not hold it."""
        _install(self._app_state, self.load.shared, self._shared_keys, "app_state")
        if self.load.own is not None and self._per_rank is not None:
            _install(self._per_rank, self.load.own, self._own_keys, "per_rank")

    @staticmethod
    def _kept(live: Live, keys: set[str]) -> Live:
        return {key: live[key] for key in keys if key in live}


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


def _install(live: Live, blank: Blank, keys: set[str], root: str) -> None:
    """Install what was loaded; parts that are only live stay as they are."""
    loaded = {key: value for key, value in blank.finished().items() if key in keys}
    chosen = {key: live[key] for key in loaded}
    install(chosen, loaded, root, given=_giver(blank.owned()))
    live.update(chosen)
    lost = lost_optimizer_state(chosen, loaded)
    if lost:
        raise Invalid(
            "state was loaded and is not there: " + "; ".join(lost),
            do="Look at the optimizer's load_state_dict: training would go on as if it had never stepped.",
        )


def _giver(owned: Mapping[int, object] | None) -> Given:
    """What was read for one place only is given away as it is; tensors that have several are copied for each part."""
    if owned is None:
        return lambda value: value
    return lambda value: copy.deepcopy(value, dict(owned))
