"""How the ranks of one incarnation agree: over the process group's key-value store, with deadlines of our own.

No collective of the training backend is used, so its timeouts, streams and devices play no part. The one thing
that must be proven first is that the ranks really are one incarnation: a store may survive a restart and still hold
the words of dead ranks. So every rank says hello with a fresh nonce, rank 0 answers with a roster of nonces, and each
rank acknowledges only a roster that holds its own. Everything later is filed under that roster's id.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections import defaultdict
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ckptd.errors import Invalid, Unreachable

POLL_SECONDS = 0.02
ACK_WAIT_SECONDS = 0.5
_clients_of_run: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class Store(Protocol):
    """The part of `torch.distributed.Store` used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def check(self, keys: list[str]) -> bool: ...


class Agreement(Protocol):
    """What a client needs from the other ranks. Called on every rank, on the caller's thread, in the same order."""

    def form(self, attempt: str) -> str:
        """Returns when all ranks are there, with rank 0's attempt. `attempt` counts on rank 0 only."""

    def say(self, name: str, word: str) -> None:
        """Rank 0: tell all ranks."""

    def hear(self, name: str) -> str:
        """Any rank: what rank 0 said."""

    def vote(self, name: str, ballot: str) -> list[str]:
        """Every rank: the ballots of all ranks, by rank."""


class Alone:
    """The agreement of a single process."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def form(self, attempt: str) -> str:
        return attempt

    def say(self, name: str, word: str) -> None:
        self._words[name] = word

    def hear(self, name: str) -> str:
        return self._words[name]

    def vote(self, name: str, ballot: str) -> list[str]:
        return [ballot]


class Group:
    """The agreement of the ranks that share `store`."""

    def __init__(self, store: Store, run: str, rank: int, world: int, *, deadline_seconds: float) -> None:
        self._store = store
        self._base = f"ckptd/{run}/{next(_clients_of_run[run])}"
        self._prefix = ""
        self._rank = rank
        self._world = world
        self._deadline_seconds = deadline_seconds

    def form(self, attempt: str) -> str:
        nonce = secrets.token_hex(8)
        give_up_at = time.monotonic() + self._deadline_seconds
        self._store.set(f"{self._base}/hello/{self._rank}", nonce)
        roster = self._gather(attempt, give_up_at) if self._rank == 0 else self._enlist(nonce, give_up_at)
        self._prefix = f"{self._base}/{roster['id']}"
        return str(roster["attempt"])

    def _gather(self, attempt: str, give_up_at: float) -> dict[str, object]:
        """Rank 0: publish rosters until every rank has acknowledged the same one."""
        hellos = [f"{self._base}/hello/{rank}" for rank in range(self._world)]
        while True:
            self._wait(hellos, "all ranks to say hello", give_up_at)
            roster: dict[str, object] = {
                "id": secrets.token_hex(8),
                "attempt": attempt,
                "nonces": [self._store.get(key).decode() for key in hellos],
            }
            self._store.set(f"{self._base}/roster", json.dumps(roster))
            acks = [f"{self._base}/ack/{roster['id']}/{rank}" for rank in range(1, self._world)]
            while not self._arrived(acks, ACK_WAIT_SECONDS):
                if [self._store.get(key).decode() for key in hellos] != roster["nonces"]:
                    break  # a hello was an old one: a new roster
                if time.monotonic() >= give_up_at:
                    missing = [rank for rank, key in enumerate(acks, 1) if not self._store.check([key])]
                    raise self._timeout(f"ranks {missing} to acknowledge")
            else:
                return roster

    def _enlist(self, nonce: str, give_up_at: float) -> dict[str, object]:
        """Another rank: wait for a roster with our own nonce and acknowledge it."""
        key = f"{self._base}/roster"
        while True:
            self._wait([key], "rank 0's roster", give_up_at)
            roster: dict[str, object] = json.loads(self._store.get(key))
            nonces = roster["nonces"]
            if isinstance(nonces, list) and nonces[self._rank : self._rank + 1] == [nonce]:
                self._store.set(f"{self._base}/ack/{roster['id']}/{self._rank}", "1")
                return roster
            if time.monotonic() >= give_up_at:
                raise self._timeout("a roster of this incarnation")
            time.sleep(POLL_SECONDS)

    def say(self, name: str, word: str) -> None:
        self._store.set(f"{self._prefix}/{name}", word)

    def hear(self, name: str) -> str:
        key = f"{self._prefix}/{name}"
        self._wait([key], f"rank 0's word on {name}", time.monotonic() + self._deadline_seconds)
        return self._store.get(key).decode()

    def vote(self, name: str, ballot: str) -> list[str]:
        keys = [f"{self._prefix}/{name}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], ballot)
        self._wait(keys, f"the votes on {name}", time.monotonic() + self._deadline_seconds)
        return [self._store.get(key).decode() for key in keys]

    def _wait(self, keys: list[str], what: str, give_up_at: float) -> None:
        if not self._arrived(keys, max(give_up_at - time.monotonic(), 0.001)):
            raise self._timeout(what)

    def _arrived(self, keys: list[str], seconds: float) -> bool:
        if not keys:
            return True
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def _timeout(self, what: str) -> Unreachable:
        return Unreachable(
            f"rank {self._rank} of {self._world} waited {self._deadline_seconds:.0f} s for {what}",
            do="Look at the other ranks' logs: one of them did not come this far. All must make the same calls.",
        )


def default_store() -> Store:
    """The store of torch's default process group. torch has no public way to it, so it is kept in this one place."""
    getter = getattr(dist.distributed_c10d, "_get_default_store", None)
    if getter is None:
        raise Invalid(
            "this version of torch does not give out the process group's store",
            do="Pass a torch.distributed store that all ranks share: CheckpointClient(..., store=...).",
            field="store",
        )
    store: Store = getter()
    return store


def agree(run: str, rank: int, world: int, *, store: Store | None, deadline_seconds: float) -> Agreement:
    """The agreement that fits how this process was started. Call it once the process group has formed."""
    if world == 1:
        return Alone()
    if store is None and not (dist.is_available() and dist.is_initialized()):
        raise Invalid(
            f"rank {rank} of {world} asks for the latest checkpoint before the process group formed",
            do="Call torch.distributed.init_process_group first, or pass store=.",
            field="store",
        )
    return Group(store or default_store(), run, rank, world, deadline_seconds=deadline_seconds)
