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
import socket
from collections import Counter
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from ckptd import layout
from ckptd.errors import Invalid, describe
from ckptd.wire import Heartbeat
from ckptd_client.agreement import Store, agree
from ckptd_client.heartbeat import Heart
from ckptd_client.incarnation import Identity, Incarnation
from ckptd_client.loading import Found
from ckptd_client.patience import patiently
from ckptd_client.saving import Job, SaveHandle, Saver
from ckptd_client.snapshot import HostSnapshot
from ckptd_client.state import flatten
from ckptd_client.stateful import collect
from ckptd_client.transport import Transport

log = logging.getLogger("ckptd")
MAX_METRICS, MAX_METRIC_NAME = 64, 64


class CheckpointClient:
    """One run, seen from one rank. Its methods are for the training thread.

    `url` is a service (`http://host:8440`) or a storage (`file:///mnt/shared/ckpts`). Rank and world size come from
    the arguments, the process group or torchrun's environment. `attempt`, if given, names this incarnation and must
    be new at every restart and equal on all ranks; else rank 0 draws one. `storage` (or CKPTD_STORAGE) says where
    this machine sees the service's storage, if the path differs; `token` is CKPTD_TOKEN unless given. `direct=False`
    forbids going around a service that does not answer. `takeover` fences another live job of the same run at once.
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
        store: Store | None = None,
        start_deadline_seconds: float = 600.0,
        save_deadline_seconds: float = 1800.0,
    ) -> None:
        self.run = layout.check_run(run)
        self.rank, self.world_size = _place(rank, world_size)
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
        self._saver = Saver(self._transport, self._declare_ready)
        self._snapshot = HostSnapshot()
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
        names = {"url": "CKPTD_URL", "run": "CKPTD_RUN"}
        found = {name: os.environ[variable] for name, variable in names.items() if os.environ.get(variable)}
        settings = {**found, **options}
        missing = [names[name] for name in ("url", "run") if name not in settings]
        if missing:
            raise Invalid(
                f"{' and '.join(missing)} is not set",
                do="Set CKPTD_URL to the service or the storage, and CKPTD_RUN to the run's name.",
                field=missing[0],
            )
        return cls(**settings)

    @property
    def generation(self) -> int:
        """The number of this incarnation, from 1 on. Known after `latest` or `restore`."""
        return self._started().answer.generation

    @property
    def resumed_same_world(self) -> bool:
        """Whether the answer was saved by as many ranks as there are now, so that per-rank state fits."""
        found = self._started().found
        return found is not None and found.same_world

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

        Every rank. Objects with state_dict/load_state_dict are loaded, tensors copied into, plain values replaced in
        the dict. `per_rank` is this rank's own state, left as it is if the world size changed. Every byte is verified
        and all ranks vote before anything is installed; on damage all of them go to the checkpoint before, together.
        """
        self.latest()
        step = self._started().restore(app_state, per_rank)
        log.info("run %s: generation %d starts at step %d", self.run, self.generation, step)
        return step

    # Save.

    def save(
        self,
        app_state: Mapping[str, object],
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        per_rank: Mapping[str, object] | None = None,
        wait: bool = False,
    ) -> SaveHandle:
        """Save the state as it is now; returns once the values are copied, and writes in the background.

        Every rank may call it, and with `per_rank` (this rank's own small state) every rank must. Without, rank 0
        alone will do. No rank waits for another here. If the save before is still running, it is waited for; if it
        failed, its error is raised here and this save is not made. `wait` returns when it is durable.
        """
        layout.check_step(step)
        generation = self.generation
        if self._closed:
            raise Invalid("this client is closed", do="Save before close().")
        self._saver.settle(self._save_deadline_seconds)
        if self._heart is not None:
            self._heart.check()
        numbers = _numbers(metrics or {})
        everyone = per_rank is not None and self.world_size > 1
        self._saves[step, everyone] += 1
        save = layout.save_id(generation, step, all_ranks=everyone, count=self._saves[step, everyone])
        shared = flatten(collect(app_state), "shared") if self.rank == 0 else None
        own = flatten(collect(per_rank, "per_rank"), "rank", root="per_rank") if per_rank is not None else None
        flats = [flat for flat in (shared, own) if flat is not None]
        job = Job(
            handle=SaveHandle(save, step),
            run=self.run,
            generation=generation,
            rank=self.rank,
            world=self.world_size,
            writers=self.world_size if everyone else 1,
            deadline_seconds=self._save_deadline_seconds,
            captured=self._snapshot.capture(flats) if flats else None,
            shared=shared.tree if shared is not None else None,
            per_rank=own.tree if own is not None else None,
            metrics=numbers,
        )
        handle = self._saver.submit(job)
        if wait:
            self._saver.settle(self._save_deadline_seconds)
        return handle

    def wait(self) -> None:
        """Return once the save in flight is durable; raise what made it fail."""
        self._saver.settle(self._save_deadline_seconds)

    def close(self) -> None:
        """Wait for the save in flight, raise its error if nobody saw it, and let go of everything."""
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
        self.rank, self.world_size = _place(self.rank, self.world_size)
        deadline = self._start_deadline_seconds
        agreement = agree(self.run, self.rank, self.world_size, store=self._store, deadline_seconds=deadline)
        self._attempt = agreement.form(self._attempt)
        who = self._identity()
        incarnation = Incarnation(who, self._transport, agreement)
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
            job=_job_name(),
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


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the number of ranks: as given, else as the process group or torchrun say."""
    group = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
    here = (_environment_number("RANK", 0), _environment_number("WORLD_SIZE", 1))
    given = (here[0] if rank is None else rank, here[1] if world_size is None else world_size)
    if group is not None and (rank, world_size) == (None, None):
        return group
    if group is not None and group != given:
        raise Invalid(
            f"rank {given[0]} of {given[1]} was assumed, the process group says rank {group[0]} of {group[1]}",
            do="Make the client with rank= and world_size= if it is made before the process group without torchrun.",
            field="rank",
        )
    if not 0 <= given[0] < given[1]:
        raise Invalid(f"rank {given[0]} of {given[1]} ranks: expected 0 <= rank < world_size", field="rank")
    return given


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError as error:
        raise Invalid(f"{name}={text!r} in the environment: expected a number", field=name) from error


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as the manifest keeps them: NaN and infinities too, for a diverged loss is worth recording."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or len(name) > MAX_METRIC_NAME:
            raise Invalid(
                f"metric name {name!r}: expected a text of at most {MAX_METRIC_NAME} characters", field="metrics"
            )
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise Invalid(f"metric {name}: expected one number, found {value!r}"[:500], field="metrics") from error
    if len(found) > MAX_METRICS:
        raise Invalid(f"{len(found)} metrics: expected at most {MAX_METRICS}", field="metrics")
    return found


def _job_name() -> str:
    """What tells two jobs apart while both live. For politeness only; it need not be unique."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    named = os.environ.get("CKPTD_JOB") or os.environ.get("SLURM_JOB_ID") or (elastic if elastic != "none" else "")
    return (named or f"{socket.gethostname()}:{os.getppid()}")[:200]
