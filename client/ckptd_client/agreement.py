"""How the ranks of one incarnation agree: over the process group's key-value store, with deadlines of our own.

No collective of the training backend is used, so its timeouts, streams and devices play no part. The one thing
that must be proven first is that the ranks really are one incarnation: a store may survive a restart and still hold
the words of dead ranks. So every rank says hello with a fresh nonce, rank 0 answers with a roster of nonces, and each
rank acknowledges only a roster that holds its own. When all have acknowledged the same one, rank 0 says so, and
everything later is filed under that roster's id.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from ckptd.errors import Invalid, Unreachable

POLL_SECONDS, MAX_POLL_SECONDS = 0.01, 0.25
# A rank that gives up says why. The others wait longer than it, or they would give up without the reason.
GRACE_SECONDS = 60.0


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
        self._base = f"ckptd/{run}"
        self._prefix = ""
        self._rank = rank
        self._world = world
        self._deadline_seconds = deadline_seconds

    def form(self, attempt: str) -> str:
        nonce = secrets.token_hex(8)
        give_up_at = time.monotonic() + self._deadline_seconds
        with self._store_errors():
            self._store.set(f"{self._base}/hello/{self._rank}", nonce)
            roster = self._gather(attempt, give_up_at) if self._rank == 0 else self._enlist(nonce, give_up_at)
        self._prefix = f"{self._base}/{roster['id']}"
        return str(roster["attempt"])

    def _gather(self, attempt: str, give_up_at: float) -> dict[str, object]:
        """Rank 0: publish rosters until every rank has acknowledged the same one, and say which that is."""
        hellos = [f"{self._base}/hello/{rank}" for rank in range(self._world)]
        while True:
            self._wait(hellos, "say hello", give_up_at)
            roster: dict[str, object] = {
                "id": secrets.token_hex(8),
                "attempt": attempt,
                "nonces": [self._store.get(key).decode() for key in hellos],
            }
            self._store.set(f"{self._base}/roster", json.dumps(roster))
            acks = [f"{self._base}/ack/{roster['id']}/{rank}" for rank in range(1, self._world)]
            pauses = _pauses()
            while not self._store.check(acks):
                if [self._store.get(key).decode() for key in hellos] != roster["nonces"]:
                    break  # a hello was an old one: a new roster
                if time.monotonic() >= give_up_at:
                    raise self._timeout(f"ranks {self._missing(acks, first=1)} to acknowledge the roster")
                time.sleep(next(pauses))
            else:
                self._store.set(f"{self._base}/go/{roster['id']}", "1")
                return roster

    def _enlist(self, nonce: str, give_up_at: float) -> dict[str, object]:
        """Another rank: acknowledge each roster with our own nonce, until rank 0 goes on with one of them. The first
        may be given up for another, because a third rank's hello in it was an old one."""
        key = f"{self._base}/roster"
        self._wait([key], "publish a roster", give_up_at)
        acknowledged = ""
        for pause in _pauses():
            roster: dict[str, object] = json.loads(self._store.get(key))
            found, nonces = str(roster["id"]), roster["nonces"]
            if isinstance(nonces, list) and nonces[self._rank : self._rank + 1] == [nonce]:
                if acknowledged != found:
                    self._store.set(f"{self._base}/ack/{found}/{self._rank}", "1")
                    acknowledged = found
                if self._store.check([f"{self._base}/go/{found}"]):
                    return roster
            if time.monotonic() >= give_up_at:
                missing = "the other ranks to come too" if acknowledged else "a roster of this incarnation"
                raise self._timeout(missing)
            time.sleep(pause)
        raise AssertionError("pauses do not end")

    def say(self, name: str, word: str) -> None:
        with self._store_errors():
            self._store.set(f"{self._prefix}/{name}", word)

    def hear(self, name: str) -> str:
        key = f"{self._prefix}/{name}"
        with self._store_errors():
            self._wait([key], f"say {name}", time.monotonic() + self._patience_seconds)
            return self._store.get(key).decode()

    def vote(self, name: str, ballot: str) -> list[str]:
        keys = [f"{self._prefix}/{name}/{rank}" for rank in range(self._world)]
        with self._store_errors():
            self._store.set(keys[self._rank], ballot)
            self._wait(keys, f"vote on {name}", time.monotonic() + self._patience_seconds)
            return [self._store.get(key).decode() for key in keys]

    @property
    def _patience_seconds(self) -> float:
        return self._deadline_seconds + GRACE_SECONDS

    def _wait(self, keys: list[str], what: str, give_up_at: float) -> None:
        """Until each of the ranks 0, 1, .. has written its key."""
        try:
            self._store.wait(keys, timedelta(seconds=max(give_up_at - time.monotonic(), 0.001)))
        except dist.DistNetworkError:
            raise
        except RuntimeError as error:  # each kind of store has its own class for "not in time"
            missing = self._missing(keys)
            if missing:
                raise self._timeout(f"ranks {missing} to {what}") from error

    def _missing(self, keys: list[str], *, first: int = 0) -> list[int]:
        return [rank for rank, key in enumerate(keys, first) if not self._store.check([key])]

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """The store lives in one of the processes, and may die with it."""
        try:
            yield
        except dist.DistError as error:
            raise Unreachable(
                f"rank {self._rank} of {self._world} lost the process group's store: {error}",
                do="Look at the other ranks' logs: the one that holds the store has ended.",
            ) from error

    def _timeout(self, what: str) -> Unreachable:
        return Unreachable(
            f"rank {self._rank} of {self._world} waited {self._deadline_seconds:.0f} s for {what}",
            do="Look at the other ranks' logs: one of them did not come this far. All must make the same calls.",
        )


def _pauses() -> Iterator[float]:
    """Between two looks at the store, in seconds: short at first, then such that many ranks do not wear it out."""
    pause = POLL_SECONDS
    while True:
        yield pause
        pause = min(pause * 1.2, MAX_POLL_SECONDS)


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
