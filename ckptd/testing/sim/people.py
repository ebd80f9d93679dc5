"""Who else works on a run: keepers that verify, retire and collect; people who decide; readers and askers."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.errors import CkptdError
from ckptd.keeper import Keeper
from ckptd.lineage import is_valid, lineage, resume_point
from ckptd.reading import observe, observe_manifest, read_manifest
from ckptd.retention import Policy
from ckptd.state import RunState
from ckptd.testing.sim.baton import Process
from ckptd.testing.sim.cluster import RUN, Cluster, SimLedger

Ledgers = Callable[[], SimLedger]


class Somebody:
    """A process that does something now and then, until it dies."""

    title = "somebody"

    def __init__(self, cluster: Cluster, process: Process, ledger: Ledgers | None = None) -> None:
        self.process = process
        self._cluster = cluster
        self._given = ledger
        self._own: SimLedger | None = None
        self._rng = cluster.rng

    def live(self) -> None:
        pauses = self._rng.choice((4.0, 15.0, 60.0))
        while True:
            self._cluster.baton.pause(pauses * self._rng.random())
            self.turn()

    def turn(self) -> None:
        """What it does, in one go."""

    @property
    def ledger(self) -> SimLedger:
        if self._given is not None:
            return self._given()
        if self._own is None:
            self._own = SimLedger(self._cluster, self.process)
        return self._own

    @property
    def keeper(self) -> Keeper:
        return Keeper(self.ledger, reader=self._cluster.second_reader)

    def attempt(self, what: str, call: Callable[[], object]) -> bool:
        """Whether it went well; how it went is counted."""
        try:
            call()
        except CkptdError as error:
            self._cluster.count(self.process.name, what, error)
            return False
        self._cluster.count(self.process.name, what)
        return True

    def pick(self, wanted: Callable[[RunState, str], bool]) -> str | None:
        """A checkpoint that this process knows of."""
        state = self.ledger.state(RUN)
        saves = [save for save in state.checkpoints if wanted(state, save)]
        return self._rng.choice(saves) if saves else None


class TheKeeper(Somebody):
    """The pass that a service makes in the background."""

    title = "keeper"

    def turn(self) -> None:
        manners, keeper = self._cluster.manners, self.attempt
        policy = Policy(keep_last=manners.keep_last, keep_every=manners.keep_every)
        chance = self._rng.random()

        def verify() -> None:
            save = self.keeper.unverified(RUN, policy)
            if save is not None:
                self.keeper.verify(RUN, save)

        if chance < 0.8:
            keeper("verify", verify)
        if chance > 0.2:
            keeper("retire", lambda: self.keeper.retire(RUN, policy))
        if chance > 0.3:
            keeper("collect", lambda: self.keeper.collect(RUN))


class Operator(Somebody):
    """Quarantines, reinstates, rolls back, pins, unpins; and helps when no checkpoint is valid any more."""

    title = "operator"

    def turn(self) -> None:
        actions = (self._pin, self._unpin, self._quarantine, self._reinstate, self._reinstate, self._roll_back)
        if self.attempt("look", self._look):
            self.attempt("decide", self._rng.choice(actions))

    def _look(self) -> None:
        if self.ledger.latest(RUN).answer == "corrupt":
            self.help()

    def help(self) -> None:
        """No checkpoint of the line can be loaded: bring the files back, and choose one."""
        self.attempt("rescue", self._rescue)

    def _rescue(self) -> None:
        self._cluster.drive.repair()
        state = self.ledger.state(RUN)
        if resume_point(state) is not None or state.tip is None:
            return
        for checkpoint in lineage(state):
            if checkpoint.save in state.quarantined and checkpoint.save not in state.retired:
                return self.keeper.reinstate(RUN, checkpoint.save, who="operator", reason="it was brought back")
        valid = [save for save in state.checkpoints if is_valid(state, save)]
        bad = [save for save in state.quarantined if save not in state.retired]
        if valid:
            self.keeper.rollback(RUN, valid[-1], who="operator", reason="the line is lost")
        elif bad:
            self.keeper.reinstate(RUN, bad[-1], who="operator", reason="the line is lost")

    def _pin(self) -> None:
        save = self.pick(lambda state, save: save not in state.retired)
        if save is not None:
            self.keeper.pin(RUN, save, self.process.name)
            self._cluster.truth.kept(save, self.process.name)

    def _unpin(self) -> None:
        save = self.pick(lambda state, save: self.process.name in state.pinned.get(save, ()))
        if save is not None:
            self.keeper.unpin(RUN, save, self.process.name)

    def _quarantine(self) -> None:
        save = self.pick(is_valid)
        if save is not None and self._rng.random() < 0.5:
            self.keeper.quarantine(RUN, save, who="operator", reason="looks odd")

    def _reinstate(self) -> None:
        save = self.pick(lambda state, save: save in state.quarantined)
        if save is not None:
            self.keeper.reinstate(RUN, save, who="operator", reason="looks well")

    def _roll_back(self) -> None:
        save = self.pick(is_valid)
        if save is not None and self._rng.random() < 0.5:
            self.keeper.rollback(RUN, save, who="operator", reason="the loss went up")


class ReaderOfCheckpoints(Somebody):
    """Holds a checkpoint, reads every byte, lets go."""

    title = "checkpoint reader"

    def turn(self) -> None:
        self.attempt("hold", self._hold)

    def _hold(self) -> None:
        save = self.pick(is_valid)
        if save is None:
            return
        who, storage = self.process.name, self.ledger.storage
        self.keeper.hold(RUN, save, who)
        self._cluster.truth.kept(save, who)
        try:
            ref = self.ledger.state(RUN).checkpoints[save].manifest
            damage = observe_manifest(storage, ref)
            if damage is None:
                found = [observe(storage, part) for part in read_manifest(storage, ref).objects()]
                damage = next((one for one in found if one is not None), None)
            if damage is not None and damage.observed == "missing":
                self._cluster.truth.missing(save, damage.object)
        finally:
            if not self.process.dead:
                self.attempt("release", lambda: self.keeper.release(RUN, save, who))


class Asker(Somebody):
    """Only asks."""

    title = "asker"

    def turn(self) -> None:
        self.attempt("ask", self._rng.choice((self._latest, self._latest, self._list, self._status)))

    def _latest(self) -> None:
        truth = self._cluster.truth
        commits = len(truth.state.checkpoints)
        if self.ledger.latest(RUN).answer == "none" and not self._cluster.drive.weather.negative:
            truth.none_since(commits)

    def _list(self) -> None:
        self.ledger.checkpoints(RUN)
        self.ledger.run_info(RUN)

    def _status(self) -> None:
        saves = [*self._cluster.truth.state.checkpoints, *self._cluster.truth.state.aborted]
        if saves:
            self._cluster.truth.told(self.ledger.save_status(RUN, self._rng.choice(saves)))
