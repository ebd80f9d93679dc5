"""A run's log on a storage: reading it in order, and appending to it.

An append has three outcomes. It returns: the record is in the log, counts, and is durable. It raises `Fenced` or
`Conflict`: the record does not count; if the error is final, it never will. It raises `OutcomeUnknown`: the
storage did not tell before the deadline; the same append again finds out, and never doubles the record.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from ckptd import layout, log_snapshots
from ckptd.digests import sha256_hex
from ckptd.encoding import MAX_RECORD_BYTES, damaged_slot, decode, encode, record
from ckptd.errors import (
    AlreadyExists,
    CkptdError,
    Conflict,
    Corrupt,
    Fenced,
    NotFound,
    NotInitialised,
    OutcomeUnknown,
    Unavailable,
    describe,
)
from ckptd.failpoints import failpoint
from ckptd.history import advance, judge
from ckptd.records import Body
from ckptd.runlock import RunLock
from ckptd.slots import last_slot, last_slot_after
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.verdicts import Outcome, Verdict

Build = Callable[[RunState], Body]
LOCK_DEADLINE_SECONDS = 30.0
SNAPSHOT_RECORDS = 250  # a snapshot is written after so many, and after each half per cent of a long log


@dataclass(frozen=True)
class _Next:
    """What an append found: the record it would write into slot `seq`, the verdict on it, and the slot in which
    an earlier write of the same record landed."""

    body: Body
    seq: int
    prev: str
    verdict: Verdict
    landed: int | None


class RunLog:
    """The log of one run, and the state folded from the longest prefix read so far. Callable from any thread.

    `state` grows in place under `lock`: look at it only while holding the lock. The first look at a log of more than
    `snapshot_records` begins with a snapshot, if there is a sound one; `snapshot_seq` is the newest that is known.
    """

    def __init__(
        self,
        storage: Storage,
        run: str,
        *,
        actor: str,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        lock_deadline_seconds: float = LOCK_DEADLINE_SECONDS,
        snapshot_records: int = SNAPSHOT_RECORDS,
    ) -> None:
        self.storage = storage
        self.run = layout.check_run(run)
        self.actor = actor
        self.lock = RunLock(run, lock_deadline_seconds)
        self.state = RunState()
        self.snapshot_seq = 0
        self._snapshot_records = snapshot_records
        self._pause = pause
        self._clock = clock

    def replay(self, *, known: int = 0, to_the_end: bool = False, to_append: bool = False) -> RunState:
        """Read the records that came since the last look. `Corrupt` when a slot is damaged or missing: then the
        run is read-only, because what follows cannot be judged. Call it with `lock` held to use the state.

        `known` is a slot seen to be filled, should the listing be older than that. `to_the_end` looks behind the
        end of the listing: needed before anybody is told that something is not in the log. `to_append` looks at all
        folders of slots, so that nothing is put into a gap."""
        with self.lock:
            first = to_append or self.state.seq == 0
            look = last_slot if first else partial(last_slot_after, seq=self.state.seq)
            last = look(self.storage, self.run)
            if self.state.seq == 0 and last > self._snapshot_records:
                self.state = log_snapshots.newest(self.storage, self.run) or self.state
                self.snapshot_seq = self.state.seq
            elif self.state.seq > 0 and last <= self.state.seq:
                self._check_last_slot()
            for seq in range(self.state.seq + 1, max(last, known) + 1):
                self._read_slot(seq)
            while to_the_end and self._has(self.state.seq + 1):
                self._read_slot(self.state.seq + 1)
            return self.state

    def snapshot_is_due(self, seq: int) -> bool:
        """Whether one after slot `seq` would spare the next reader enough."""
        return seq - self.snapshot_seq >= max(self._snapshot_records, seq // 200)

    def append(self, build: Build, *, deadline_seconds: float) -> str:
        """Append what `build` makes of the state, unless it is there already; the rid of the record.

        `build` is called again for every new state and may raise to give up. It must give the same rid each
        time.
        """
        give_up_at = self._clock() + deadline_seconds
        known = durable = 0
        written: str | None = None
        while True:
            try:
                found = self._look(build, known)
            except Unavailable as error:
                if written is None:
                    raise
                if self._clock() >= give_up_at:
                    raise self._unknown(written, layout.log_key(self.run, known), error) from error
                self._pause(0.1)
                continue
            rid = found.body.rid
            if found.landed is not None:
                if found.landed != durable:
                    self._settle(found.landed, rid, give_up_at)
                return rid
            if not found.verdict.accepted:
                if not found.verdict.final and self._has(found.seq):
                    known = found.seq  # the listing was old: there is more to read before anything may be said
                    continue
                raise self._refusal(found.verdict, found.body)
            if written is not None and self._clock() >= give_up_at:
                raise self._crowded(rid)
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            data = encode(record(found.seq, found.prev, found.body, actor=self.actor, time=now))
            durable = found.seq if self._fill(found.seq, data, rid, give_up_at) else 0
            known, written = found.seq, rid

    def _look(self, build: Build, known: int) -> _Next:
        """Read on, and see what would become of the record."""
        with self.lock:
            state = self.replay(known=known, to_append=True)
            seen = state.seq
            try:
                body = build(state)
            except CkptdError:  # it gave up: believed only at the very end of the log, for the listing may be old
                if self.replay(to_the_end=True).seq == seen:
                    raise
                body = build(state)
            landed = state.accepted.get(body.rid)
            return _Next(body, state.seq + 1, state.digest, judge(state, body), landed)

    def _fill(self, seq: int, data: bytes, rid: str, give_up_at: float) -> bool:
        """Put `data` into slot `seq` until the slot holds something, whatever the storage answers meanwhile;
        whether that is `data`, and durable.

        Never the next slot before this one is known: a write of ours that seemed lost may land later, and must
        then find its slot taken or be the one that took it.
        """
        slot = layout.log_key(self.run, seq)
        first_cause: Exception | None = None
        delay = 0.01
        while True:
            try:
                failpoint("slot-begin", seq=seq)
                self.storage.put(slot, [data], len(data))
                failpoint("slot-filled", seq=seq)
            except AlreadyExists:
                pass
            except Unavailable as error:
                if isinstance(error, NotInitialised) and first_cause is None:
                    raise  # the root was looked at first: nothing was written, and no waiting mounts a drive
                first_cause = first_cause or error
            try:
                found = self.storage.get(slot, MAX_RECORD_BYTES)
                if found != data:
                    return False
                self.storage.sync(slot)
                return True
            except (NotFound, Unavailable) as error:
                first_cause = first_cause or error
            if self._clock() >= give_up_at:
                raise self._unknown(rid, slot, first_cause) from first_cause
            self._pause(delay * (0.5 + random.random()))
            delay = min(delay * 2, 1.0)

    def _settle(self, seq: int, rid: str, give_up_at: float) -> None:
        """Make an earlier write of ours durable before it is called so. It is read again before each sync: what
        a cache showed may never have reached the medium."""
        slot = layout.log_key(self.run, seq)
        delay = 0.01
        while True:
            try:
                found = decode(self.storage.get(slot, MAX_RECORD_BYTES), key=slot, seq=seq).rid
                if found != rid:
                    raise damaged_slot(slot, f"record {rid}, which was there before", f"record {found}")
                return self.storage.sync(slot)
            except NotFound as error:
                raise damaged_slot(slot, f"record {rid}, which was there before", "no file") from error
            except Unavailable as error:
                if self._clock() >= give_up_at:
                    raise self._unknown(rid, slot, error) from error
            self._pause(delay)
            delay = min(delay * 2, 1.0)

    def _read_slot(self, seq: int) -> None:
        key = layout.log_key(self.run, seq)
        try:
            data = self.storage.get(key, MAX_RECORD_BYTES)
        except NotFound as error:
            raise damaged_slot(key, "a record, for later slots are filled", "no file") from error
        except Corrupt as error:
            raise damaged_slot(key, f"at most {MAX_RECORD_BYTES} bytes", "more") from error
        item = decode(data, key=key, seq=seq)
        if item.prev != self.state.digest:
            before = f"slot {seq - 1} with sha256 {item.prev[:12]}.. before it"
            raise damaged_slot(key, before, f"one with {self.state.digest[:12]}..")
        advance(self.state, item, sha256_hex(data))

    def _check_last_slot(self) -> None:
        """A listing may be old, but a slot once read must still be there, as it was."""
        key = layout.log_key(self.run, self.state.seq)
        try:
            data = self.storage.get(key, MAX_RECORD_BYTES)
        except NotFound as error:
            raise damaged_slot(key, "a record that was there before", "no file") from error
        if sha256_hex(data) != self.state.digest:
            raise damaged_slot(key, "the bytes read before", "other bytes")

    def _has(self, seq: int) -> bool:
        try:
            self.storage.get(layout.log_key(self.run, seq), MAX_RECORD_BYTES)
        except NotFound:
            return False
        return True

    def _refusal(self, verdict: Verdict, body: Body) -> Fenced | Conflict:
        kind = Fenced if verdict.outcome is Outcome.FENCED else Conflict
        return kind(f"run {self.run}: {body.rid} does not count: {verdict.reason}", run=self.run, final=verdict.final)

    def _crowded(self, rid: str) -> Unavailable:
        return Unavailable(
            f"run {self.run}: {rid} was not written: other writers took every slot until the deadline", run=self.run
        )

    def _unknown(self, rid: str, slot: str, cause: Exception | None) -> OutcomeUnknown:
        why = describe(cause) if cause is not None else "no answer"
        return OutcomeUnknown(
            f"run {self.run}: it is not known whether {rid} landed in {slot}: {why}",
            run=self.run,
            object=slot,
        )
