"""The client a training loop uses: `latest`, `restore`, `save`, `close`.

    client = CheckpointClient("http://host:8440", run="en-it")   # every rank, before the process group forms
    step = client.restore(app_state)                             # every rank: the same step, or the same error
    client.save(app_state, step=step)                            # every rank, after an optimizer step
    client.close()                                               # waits for the last save

All ranks run the same code; which of them is rank 0 may change at every restart. Rank 0 alone begins and commits. The
other ranks join its answer, vote on whether they could load it, and write state of their own if they have any.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self

from ckptd import layout
from ckptd.errors import Invalid, describe
from ckptd.manifest import ContractValue
from ckptd.wire import Heartbeat
from ckptd_client.agreement import Store, agree
from ckptd_client.contract import Contract
from ckptd_client.gathering import Gatherer, State
from ckptd_client.handle import Job, SaveHandle
from ckptd_client.heartbeat import Heart
from ckptd_client.incarnation import Identity, Incarnation
from ckptd_client.loading import Found
from ckptd_client.metrics import numbers
from ckptd_client.patience import patiently
from ckptd_client.saving import Saver, WhenBusy
from ckptd_client.spool import open_spool, spool_folder
from ckptd_client.steps import Steps
from ckptd_client.surroundings import job_name, place, with_environment
from ckptd_client.transport import Transport

log = logging.getLogger("ckptd")


class CheckpointClient:
    """One run, seen from one rank. Its methods are for the training thread.

    `url` is a service (`http://host:8440`) or a storage (`file:///mnt/shared/ckpts`). Rank and world size come from
    the arguments, the process group or torchrun's environment. `attempt`, if given, names this incarnation and must
    be new at every restart and equal on all ranks; else rank 0 draws one. `storage` (or CKPTD_STORAGE) says where
    this machine sees the service's storage, if the path differs; `token` is CKPTD_TOKEN unless given. `direct=False`
    forbids going around a service that does not answer. `takeover` fences another live job of the same run at once.

    `contract` is recorded with each checkpoint, beside what is found (world, versions, parts): say there what a
    resumed run should not change by accident. `restore` tells what differs. It refuses fields named in `strict`, and
    parts (`app_state.<key>`) that came, went or are another optimizer, unless `allow` names them: docs/RESUME.md.

    `spool` (or CKPTD_SPOOL) is a folder on the local disk for saves that the storage does not take within
    `spool_patience_seconds`: at most `spool_saves` wait there, and training goes on. docs/AWAY.md.

    `when_busy="skip"` leaves out a save without `wait` that comes while the one before is still running here. What
    rank 0 leaves out, or with `per_rank` any rank, all leave out: it is `skipped` in handle and `counts`, no error.

    `parallel`: all ranks hold `app_state` alike and each writes a part of it, so every rank must call `save`.
    `incremental`: what has the bytes of an earlier checkpoint is not written again. docs/SAVING.md.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        token: str | None = None,
        storage: str | None = None,
        direct: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        attempt: str | None = None,
        takeover: bool = False,
        contract: Mapping[str, ContractValue] | None = None,
        strict: Collection[str] = (),
        allow: Collection[str] = (),
        store: Store | None = None,
        start_deadline_seconds: float = 600.0,
        save_deadline_seconds: float = 1800.0,
        spool: str | os.PathLike[str] | None = None,
        spool_saves: int = 2,
        spool_patience_seconds: float = 10.0,
        when_busy: WhenBusy = "wait",
        parallel: bool = False,
        incremental: bool = True,
    ) -> None:
        self.run = layout.check_run(run)
        self.rank, self.world_size = place(rank, world_size)
        self._contract = Contract(contract, strict, allow, parallel=parallel)
        self._attempt = attempt or layout.new_attempt()
        if not layout.TOKEN_ID.fullmatch(self._attempt):
            raise Invalid(f"attempt {attempt!r}: expected 32 hexadecimal digits", field="attempt")
        self._takeover = takeover
        self._store = store
        self._start_deadline_seconds = start_deadline_seconds
        self._save_deadline_seconds = save_deadline_seconds
        self._transport = Transport(
            url,
            run,
            token=token or os.environ.get("CKPTD_TOKEN"),
            storage_url=storage or os.environ.get("CKPTD_STORAGE"),
            direct=direct,
            probing=self.rank == 0,
        )
        self._spool_folder = spool_folder(spool or os.environ.get("CKPTD_SPOOL"))
        steps = Steps(self._transport, self._declare_ready)
        self._gatherer = Gatherer(self._contract, divided=parallel, incremental=incremental)
        self._saver = Saver(steps, self._gatherer.unchanged, spool_saves, spool_patience_seconds, when_busy)
        self._saves: Counter[tuple[int, bool]] = Counter()
        self._incarnation: Incarnation | None = None
        self._heart: Heart | None = None
        self._closed = False
        if self.rank == 0:
            opening = self._identity().opening()
            patiently(lambda: self._transport.open(opening), start_deadline_seconds)

    @classmethod
    def from_env(cls, **options: Any) -> Self:
        """The client that CKPTD_URL and CKPTD_RUN describe; `options` go before them."""
        return cls(**with_environment(options))

    @property
    def generation(self) -> int:
        """The number of this incarnation, from 1 on. Known after `latest` or `restore`."""
        return self._started().answer.generation

    @property
    def resumed_same_world(self) -> bool:
        """Whether the answer was saved by as many ranks as there are now, so that per-rank state fits."""
        found = self._started().found
        return found is not None and found.same_world

    @property
    def per_rank_restored(self) -> bool:
        """Whether `restore` gave this rank its own state back. If not, it must be derived anew: `data.seed_rank`."""
        return self._started().per_rank_restored

    @property
    def stale_saves(self) -> int:
        """How many saves had the very weights of the one before; each was warned about. Counted on rank 0."""
        return self._saver.watch.stale_saves

    @property
    def durable_step(self) -> int | None:
        """The newest step that this client made a checkpoint; None before the first."""
        return self._saver.tally.durable_step

    @property
    def durable_age_seconds(self) -> float | None:
        """How long ago that became so, as this process knows; None before the first."""
        return self._saver.tally.durable_age_seconds

    @property
    def counts(self) -> dict[str, int]:
        """How many saves of this client are queued, durable, failed, superseded, skipped; how many were spooled."""
        return self._saver.tally.counts

    # Start.

    def latest(self) -> Found | None:
        """The one checkpoint that all ranks of this incarnation resume from; None only if the run has none.

        Every rank, once the process group formed, before weights are broadcast. Repeating it gives the same answer.
        `Unreachable` when it cannot be known, `Corrupt` when the run has checkpoints and none is valid: both with the
        reason for each candidate, on every rank, and never answered with None.
        """
        if self._incarnation is None:
            self._incarnation = self._start()
        return self._incarnation.found

    def restore(
        self, app_state: MutableMapping[str, object], *, per_rank: MutableMapping[str, object] | None = None
    ) -> int:
        """Bring `app_state` to the latest checkpoint, in place, and return its step; 0 if the run is new.

        Every rank. Objects with state_dict/load_state_dict are loaded, tensors filled, plain values replaced in the
        dict. `per_rank` is this rank's own, left as it is if the world size changed. What does not fit is `Invalid`
        on all ranks, and no byte has changed. Then bytes are verified while they go straight into live tensors; on
        damage all ranks load the checkpoint before over them. After an error end the process: docs/RESUME.md.
        """
        self.latest()
        step = self._started().restore(app_state, per_rank)
        log.info("run %s: generation %d starts at step %d", self.run, self.generation, step)
        return step

    # Save.

    def prepare(self, app_state: State, *, per_rank: State | None = None) -> int:
        """Make and touch the host buffer that a save of these needs, which else the first save does; its bytes.
        Every rank, after `restore` or the first optimizer step: not before it has state. `Conflict` during a save."""
        return self._gatherer.room(app_state, per_rank, self.rank, self.world_size)

    def save(
        self,
        app_state: State,
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        per_rank: State | None = None,
        wait: bool = False,
    ) -> SaveHandle:
        """Save the state as it is now; returns once the values are copied, and writes in the background.

        Every rank may call it, and with `per_rank` (this rank's own small state) or `parallel` every rank must; else
        rank 0 alone will do. No rank waits for another here. If the save before is still running, it is waited for,
        or this one is skipped (`when_busy`); if it failed, its error is raised here and this save is not made. With a
        spool only its bytes are waited for, and an outage is no error. `wait` returns when it is durable.
        """
        layout.check_step(step)
        generation = self.generation
        if self._closed:
            raise Invalid("this client is closed", do="Save before close().")
        skip = self._saver.skips and not wait
        if not skip:
            self._saver.make_room(self._save_deadline_seconds)
        if self._heart is not None:
            self._heart.check()
        everyone = (per_rank is not None or self._gatherer.divided) and self.world_size > 1
        self._saves[step, everyone] += 1
        save = layout.save_id(generation, step, all_ranks=everyone, count=self._saves[step, everyone])
        job = Job(
            handle=SaveHandle(save, step, self._saver.tally),
            run=self.run,
            generation=generation,
            rank=self.rank,
            world=self.world_size,
            writers=self.world_size if everyone else 1,
            deadline_seconds=self._save_deadline_seconds,
            metrics=numbers(metrics or {}),
        )
        if skip:
            self._saver.skip(job)
            return job.handle
        self._saver.submit(self._gatherer.gather(job, app_state, per_rank), copying=wait)
        if wait:
            self._saver.settle(self._save_deadline_seconds)
            job.handle.wait(0.0)
        return job.handle

    def wait(self) -> None:
        """Return once what was saved is durable; raise what made it fail, or what is not durable at the deadline."""
        self._saver.settle(self._save_deadline_seconds)

    def close(self) -> None:
        """Wait for what was saved, raise its error if nobody saw it, and let go of everything."""
        if self._closed:
            return
        self._closed = True
        try:
            self._saver.settle(self._save_deadline_seconds)
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error the save in flight is still finished, and only reported: the error goes first."""
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"and the save in flight failed: {describe(second)}")

    def _start(self) -> Incarnation:
        """Meet the other ranks and pin the answer; rank 0 shows the service from here on that the job lives."""
        self.rank, self.world_size = place(self.rank, self.world_size)
        deadline = self._start_deadline_seconds
        agreement = agree(self.run, self.rank, self.world_size, store=self._store, deadline_seconds=deadline)
        self._attempt = agreement.form(self._attempt)
        who = self._identity()
        incarnation = Incarnation(who, self._transport, agreement, self._contract)
        if self._spool_folder is not None:
            self._saver.spool = open_spool(self._spool_folder, self.run, self.rank, incarnation.answer)
        if self.rank == 0:
            opening = who.opening()
            beat = Heartbeat(attempt=opening.attempt, job=opening.job, host=opening.host)
            self._heart = Heart(self._transport, beat)
        return incarnation

    def _identity(self) -> Identity:
        return Identity(
            rank=self.rank,
            world=self.world_size,
            attempt=self._attempt,
            job=job_name(),
            takeover=self._takeover,
            deadline_seconds=self._start_deadline_seconds,
        )

    def _declare_ready(self) -> None:
        self._started().declare_ready()

    def _started(self) -> Incarnation:
        if self._incarnation is None:
            raise Invalid(
                "nothing is known about the run yet",
                do="Call client.restore(app_state) or client.latest() first, on every rank.",
            )
        return self._incarnation

    def _let_go(self) -> None:
        if self._heart is not None:
            self._heart.stop()
        self._saver.close()
        self._transport.close()
