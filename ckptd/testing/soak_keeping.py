"""What is done to the checkpoints of a soak: people decide, readers hold, retention retires, bytes rot and go.

What somebody means to do to a checkpoint is written down before it is done where only that makes it right: damage,
a quarantine by hand and its end, a roll-back, and letting go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptd.errors import AlreadyExists, Conflict, Corrupt, Fenced, Invalid, NotFound
from ckptd.keeper import Keeper
from ckptd.records import Damage
from ckptd.retention import Policy
from ckptd.second import this_process
from ckptd.testing.soak_hand import Hand
from ckptd.testing.soak_saves import overwrite
from ckptd.wire import ActRequest, CheckpointInfo, DamageReport, Verb

KEEP_VALID = 2
MAX_KEPT = 6  # pins and holds of one process at a time


class Keeping:
    """The people, the readers and the retention of one process."""

    def __init__(self, hand: Hand) -> None:
        self._hand, self._journal, self._random = hand, hand.journal, hand.random
        self._kept: dict[Verb, list[tuple[str, CheckpointInfo, str]]] = {"pin": [], "hold": []}
        self._count = 0

    # Readers and people who keep

    def pin(self) -> None:
        self._keep("pin")

    def unpin(self) -> None:
        self._let_go("pin", "unpin")

    def hold(self) -> None:
        """Some holds are never released: their readers fell silent."""
        self._keep("hold")

    def release(self) -> None:
        self._let_go("hold", "release")

    def _keep(self, verb: Verb) -> None:
        run, kept = self._hand.run(), self._kept[verb]
        info = self._one(run, "valid", "quarantined")
        if info is None or len(kept) >= MAX_KEPT:
            return
        self._count += 1
        who, began = f"{self._hand.seed}/{self._count}", time.time()
        if not self._act(run, info, verb, who):
            return
        self._journal.told(run, verb, info.save, who, began)
        if verb == "pin" or self._random.random() < 0.7:
            kept.append((run, info, who))

    def _let_go(self, verb: Verb, back: Verb) -> None:
        kept = self._kept[verb]
        if kept:
            run, info, who = kept.pop(self._random.randrange(len(kept)))
            self._journal.means(run, back, info.save, who)
            if self._act(run, info, back, who):
                self._journal.told(run, back, info.save, who, time.time())

    # People who decide

    def quarantine(self) -> None:
        self._decide("quarantine", "valid")

    def reinstate(self) -> None:
        """What is in quarantine for other reasons than its bytes."""
        run = self._hand.run()
        in_doubt = [
            info
            for info in self._hand.checkpoints(run, "quarantined")
            if self._hand.straight.state(run).quarantined[info.save].ground != "damage"
        ]
        self._decide("reinstate", "quarantined", run, in_doubt)

    def rollback(self) -> None:
        self._decide("rollback", "valid")

    def _decide(
        self, verb: Verb, status: str, run: str | None = None, infos: list[CheckpointInfo] | None = None
    ) -> None:
        run = run or self._hand.run()
        infos = infos if infos is not None else self._hand.checkpoints(run, status)
        if not infos or (verb == "quarantine" and len(infos) <= KEEP_VALID):
            return
        info = self._random.choice(infos)
        self._journal.means(run, verb, info.save, self._hand.name)
        if self._act(run, info, verb, self._hand.name):
            self._journal.told(run, verb, info.save, self._hand.name, time.time())

    def _act(self, run: str, info: CheckpointInfo, verb: Verb, who: str) -> bool:
        """Whether it was done; anything else must have a reason in the log."""
        request = ActRequest(who=who, reason="soak", save=info.save)
        try:
            found = self._hand.insist(self._hand.any(), lambda side: side.act(run, info.step, verb, request))
        except Conflict:
            self._journal.event(f"{verb} refused")
            return False
        except Invalid:
            if not self._hand.is_retired(run, info.save):
                raise
            self._journal.event(f"{verb} came too late")
            return False
        if verb == "pin" and who not in found.pinned_by:
            self._journal.finding(run, f"{info.save} was pinned for {who}, and then pinned by {found.pinned_by}")
        return True

    # Retention

    def verify(self) -> None:
        run = self._hand.run()
        info = self._one(run, "valid", "quarantined")
        if info is None:
            return
        with self._unless_retired(run, info.save):
            answer = self._hand.insist(self._hand.any(), lambda side: side.verify(run, info.step, info.save))
            self._journal.event(f"verified: {answer.result}")

    def retain(self) -> None:
        """All of it at once, as a service does it in the background."""
        policy = self._policy()
        self._count_retired(
            lambda run: len(self._hand.insist(self._hand.any(), lambda s: s.retain(run, policy)).retired)
        )

    def retire(self) -> None:
        """The record alone; the bytes wait for the next one who collects."""
        keeper, policy = Keeper(self._hand.straight), self._policy()
        self._count_retired(lambda run: len(keeper.retire(run, policy)))

    def collect(self) -> None:
        run = self._hand.run()
        try:
            self._hand.insist(self._hand.any(), lambda side: side.collect(run))
        except NotFound:
            return  # no run yet
        except Conflict:
            self._journal.event("collected by two at once")

    def _count_retired(self, call: Callable[[str], int]) -> None:
        run = self._hand.run()
        try:
            for _ in range(call(run)):
                self._journal.event("told of one retired")
        except NotFound:
            return  # no run yet, or what was to be verified was retired by somebody else
        except (Conflict, Invalid):
            self._journal.event("retention has to wait")

    def _policy(self) -> Policy:
        return Policy(keep_last=self._random.randint(2, 4), keep_every=self._random.choice([None, 10, 25]))

    # Damage

    def damage(self) -> None:
        """A checkpoint rots, or somebody only says so. Some are always left alone."""
        run = self._hand.run()
        valid = self._hand.checkpoints(run, "valid")
        if len(valid) <= KEEP_VALID:
            return
        info = self._random.choice(valid)
        with self._unless_retired(run, info.save):
            self._damage(run, info)

    def _damage(self, run: str, info: CheckpointInfo) -> None:
        storage = self._hand.straight.storage
        key = self._hand.straight.manifest(info.manifest).objects()[0].key
        rot = self._random.choice(["none", "flip", "cut", "delete"])
        if rot != "none":
            self._journal.damaged(run, info.save, key)
            try:
                overwrite(storage, key, rot)
            except (NotFound, AlreadyExists):
                self._journal.event("damaged by two at once")
        if rot != "none" and self._random.random() < 0.3:
            return  # whoever starts or verifies next finds it
        damage = Damage(object=key, expected="whole", observed="other bytes")
        report = DamageReport(save=info.save, damage=damage, reader=this_process())
        answer = self._hand.insist(self._hand.any(), lambda side: side.report_damage(run, report))
        self._journal.event("quarantined" if answer.confirmed else "reported in vain")
        if rot != "none" and not answer.confirmed:
            self._journal.finding(run, f"{key} is damaged ({rot}), and the second reading says {answer.detail}")

    # Which

    def _one(self, run: str, *status: str) -> CheckpointInfo | None:
        infos = self._hand.checkpoints(run, *status)
        return self._random.choice(infos) if infos else None

    @contextmanager
    def _unless_retired(self, run: str, save: str) -> Iterator[None]:
        """What is said of a checkpoint whose bytes went meanwhile is no finding; of any other it is raised."""
        try:
            yield
        except (Conflict, Corrupt, Fenced, Invalid, NotFound) as error:
            state = self._hand.straight.state(run)
            if save in state.retired:
                self._journal.event("retired meanwhile")
            elif save in state.quarantined or isinstance(error, Conflict):
                self._journal.event("decided by two at once")
            else:
                raise
