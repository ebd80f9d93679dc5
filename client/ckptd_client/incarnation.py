"""One start of the job, as its ranks live it together: one answer, one vote, one "ready".

Rank 0 begins a generation; the others join it; all compare what they hold. All look whether the checkpoint fits, and
vote; all read it, and vote: if every rank has the state, they install it and rank 0 declares the generation ready. If
one could not read it, rank 0 hands in what was found and begins a new generation as the fallback of this one. The
answer never moves inside a generation, so no two ranks can hold different steps.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ckptd.errors import (
    CkptdError,
    Corrupt,
    InUse,
    NotInitialised,
    Unreachable,
    describe,
    from_dict,
)
from ckptd.records import Damage, Observer
from ckptd.second import this_process
from ckptd.wire import Answer, BeginRequest, DamageReport, OpenRequest
from ckptd_client.agreement import Agreement
from ckptd_client.bounded import uncollected
from ckptd_client.contract import Contract, check_one_contract
from ckptd_client.fitting import Fitting, Live, tell_about_per_rank
from ckptd_client.loading import Found
from ckptd_client.patience import patiently
from ckptd_client.sharing import Sharing, group_of
from ckptd_client.transport import Transport
from ckptd_client.voting import foreign, tried, vote

log = logging.getLogger("ckptd")
MAX_FALLBACKS = 3
IN_USE_SECONDS = 45.0
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Identity:
    """Who starts: `attempt` names the incarnation, `job` is shown to people and to politeness."""

    rank: int
    world: int
    attempt: str
    job: str
    takeover: bool
    deadline_seconds: float

    def opening(self) -> OpenRequest:
        return OpenRequest(attempt=self.attempt, job=self.job, host=socket.gethostname())


class Incarnation:
    """Every rank has one; all ranks call the same methods in the same order, on their training threads."""

    def __init__(self, who: Identity, transport: Transport, agreement: Agreement, contract: Contract) -> None:
        self.who = who
        self.found: Found | None = None
        self.per_rank_restored = False
        self._transport = transport
        self._agreement = agreement
        self._contract = contract
        self._ready = False
        self._restores = 0
        self.answer = self._pin(fallback_of=None)

    def restore(self, app_state: Live, per_rank: Live | None) -> int:
        """Load the answer into the live state, or together the one before it; the step."""
        reasons: list[str] = []
        for fallbacks in range(MAX_FALLBACKS + 1):
            if fallbacks:
                self.answer = self._pin(fallback_of=self.answer.generation)
            may_fall_back = self._load_together(app_state, per_rank, reasons)
            if may_fall_back is None:
                self._agree_ready()
                return self.found.step if self.found is not None else 0
            if not may_fall_back:
                break
        raise Corrupt(
            f"run {self.answer.run}: no checkpoint could be loaded", run=self.answer.run, candidates=reasons
        )

    def declare_ready(self) -> None:
        """Rank 0, once: commits of this generation count from here on. `restore` does it; after `latest` by hand
        the first save does, on the save thread."""
        if not self._ready:
            self._transport.ready(self.who.attempt, self.answer.generation)
            self._ready = True

    # One answer.

    def _pin(self, fallback_of: int | None) -> Answer:
        """Rank 0 begins, the others join, and all make sure that they hold the same answer."""
        name = f"begin/{fallback_of or 0}"
        answer: Answer | None = None
        error: CkptdError | None = None
        try:
            if self.who.rank == 0:
                answer = self._begin(fallback_of)
                self._check_same_storage(answer.storage_uuid)
                self._agreement.say(name, f"begun {answer.storage_uuid}")
            else:
                answer = self._follow(self._agreement.hear(name), fallback_of)
        except CkptdError as caught:
            error = caught
            if self.who.rank == 0:
                self._agreement.say(name, "failed")
        ballots = self._vote(
            f"answer/{fallback_of or 0}", {"digest": answer.record_sha256 if answer else None}, error
        )
        if answer is None or len({b["digest"] for b in ballots}) != 1:
            raise Unreachable(f"the ranks hold different answers: {ballots}", run=self._transport.run)
        self.found = None
        if answer.checkpoint is not None:
            self.found = Found(
                answer,
                answer.checkpoint,
                self._transport,
                self.who.rank,
                deadline_seconds=self.who.deadline_seconds,
            )
        return answer

    def _begin(self, fallback_of: int | None) -> Answer:
        """Rank 0. Another job that was heard of a moment ago may be the dead one we replace: give it time to fall
        silent before it counts as alive."""
        request = BeginRequest(
            attempt=self.who.attempt,
            job=self.who.job,
            world=self.who.world,
            fallback_of=fallback_of,
            takeover=self.who.takeover,
        )
        give_up_at, told = time.monotonic() + IN_USE_SECONDS, False
        while True:
            try:
                return patiently(lambda: self._transport.begin(request), self.who.deadline_seconds)
            except InUse as error:
                if time.monotonic() >= give_up_at:
                    raise
                if not told:
                    log.warning("%s; waiting up to %.0f s whether it falls silent", error.message, IN_USE_SECONDS)
                    told = True
            time.sleep(RETRY_SECONDS)

    def _follow(self, word: str, fallback_of: int | None) -> Answer | None:
        """Another rank: the answer that rank 0 got. None if it got none; it votes with the reason."""
        begun, _, uuid = word.partition(" ")
        if begun != "begun":
            return None
        self._check_same_storage(uuid)  # before the log is asked, because another storage's has no answer
        return self._transport.join(self.who.attempt, fallback_of, deadline_seconds=self.who.deadline_seconds)

    def _check_same_storage(self, uuid: str) -> None:
        """Every rank: the storage mounted here is the one the run lies on."""
        mine = patiently(lambda: self._transport.ledger.uuid, self.who.deadline_seconds)
        if mine != uuid:
            raise NotInitialised(
                f"rank {self.who.rank} sees storage {mine}, the run lies on storage {uuid}",
                do="Mount the shared storage on this machine too.",
            )

    # One vote.

    def _load_together(self, app_state: Live, per_rank: Live | None, reasons: list[str]) -> bool | None:
        """Compare, vote, read, vote, install, vote: None. When some rank found damage nothing is installed, and the
        answer is whether another one may be asked for: a generation that is ready has no fallback."""
        self._restores += 1
        give_up_at = time.monotonic() + self.who.deadline_seconds
        fitted: list[Fitting] = []
        with ExitStack() as stack:

            def compare() -> None:
                if self.found is not None:
                    fitting = patiently(lambda: self._fit(app_state, per_rank, give_up_at), self.who.deadline_seconds)
                    fitted.append(fitting)
                    stack.callback(fitting.sharing.close)
                    ballot["share"] = fitting.sharing.offer(give_up_at)

            ballot: dict[str, Any] = {}
            ballots = self._try("fitting", ballot, compare)
            check_one_contract([ballot["contract"] for ballot in ballots])
            if self._found_damage(ballots, reasons):
                return not ballots[0]["ready"]  # rank 0 knows: a save by hand may have declared it
            if not fitted:
                return None
            (fitting,) = fitted
            together = self._join(fitting.sharing, [ballot["share"] for ballot in ballots])
            ballots = self._try("loaded", {}, lambda: fitting.sharing.read(together, give_up_at))
        if self._found_damage(ballots, reasons):
            return not ballots[0]["ready"]
        stopped = [rank for rank, ballot in enumerate(ballots) if ballot.get("stopped")]
        if stopped:
            raise Unreachable(f"ranks {stopped} stopped reading for no reason that another one told")
        self._install_together(fitting, per_rank)
        return None

    def _fit(self, app_state: Live, per_rank: Live | None, give_up_at: float) -> Fitting:
        assert self.found is not None
        rank = self.who.rank
        with uncollected():
            return Fitting(self.found, self._contract, app_state, per_rank, give_up_at, rank=rank, logs=rank == 0)

    def _try(self, name: str, ballot: dict[str, Any], step: Callable[[], None]) -> list[dict[str, Any]]:
        """One step of a load, and the vote on it."""
        ballot |= {"reader": this_process().model_dump(), "ready": self._ready, "contract": self._contract.shared}
        error = tried(step, ballot)
        return self._vote(f"{name}/{self._restores}", ballot, error)

    def _found_damage(self, ballots: list[dict[str, Any]], reasons: list[str]) -> bool:
        failed = [(rank, b) for rank, b in enumerate(ballots) if "damage" in b]
        if not failed or self.found is None:
            return False
        reasons += [f"step {self.found.step} ({self.found.save}), rank {rank}: {_why(b)}" for rank, b in failed]
        if self.who.rank == 0:
            self._hand_in(self.found, failed)
        return True

    def _join(self, sharing: Sharing, offers: list[dict[str, Any] | None]) -> bool:
        """Whether this rank reads together with others of its node. Asked only where some ranks could."""
        groups = [group_of(rank, offers) for rank in range(self.who.world)]
        if not any(len(group) > 1 for group in groups):
            return False
        ballots = self._vote(f"sharing/{self._restores}", {"joined": sharing.join(offers)}, None)
        group = groups[self.who.rank]
        return len(group) > 1 and all(ballots[rank]["joined"] for rank in group)

    def _install_together(self, fitting: Fitting, per_rank: Live | None) -> None:
        """Nobody trains before all have installed: a rank that fails half-way takes the others with it."""
        error: CkptdError | None = None
        try:
            with uncollected():
                fitting.put_in()
            self.per_rank_restored = fitting.has_own
        except CkptdError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - whatever a load_state_dict raises goes to all ranks
            error = foreign("load_state_dict failed", caught)
        self._vote(f"installed/{self._restores}", {}, error)
        if self.found is not None and per_rank is not None and not fitting.has_own and self.who.rank == 0:
            tell_about_per_rank(self.found)

    def _hand_in(self, found: Found, failed: list[tuple[int, dict[str, Any]]]) -> None:
        """Rank 0 reports what the ranks found. What no second reading confirms is tried once more."""
        for rank, ballot in failed:
            log.warning("rank %d could not load step %d: %s", rank, found.step, _why(ballot))
            report = DamageReport(
                save=found.save,
                damage=Damage.model_validate(ballot["damage"]),
                reader=Observer.model_validate(ballot["reader"]),
            )
            try:
                told = self._transport.report_damage(report).detail
            except CkptdError as error:
                told = f"it could not be made: {describe(error)}"
            log.warning("second reading of step %d: %s", found.step, told)

    def _agree_ready(self) -> None:
        """Rank 0 says that all ranks hold the state; the others go on when that is in the log."""
        name = f"ready/{self._restores}"
        if self.who.rank != 0:
            word = self._agreement.hear(name)
            if word:
                raise from_dict(json.loads(word))
            return
        try:
            patiently(self.declare_ready, self.who.deadline_seconds)
        except CkptdError as error:
            self._agreement.say(name, json.dumps(error.to_dict()))
            raise
        self._agreement.say(name, "")

    def _vote(self, name: str, ballot: dict[str, Any], error: CkptdError | None) -> list[dict[str, Any]]:
        return vote(self._agreement, name, ballot, error)


def _why(ballot: dict[str, Any]) -> str:
    damage = ballot["damage"]
    where = damage["object"] if damage["chunk"] is None else f"{damage['object']}, chunk {damage['chunk']}"
    return f"{where}: expected {damage['expected']}, observed {damage['observed']}"
