"""What can be done to a run: open, begin, join, ready, commit, abort, quarantine, and the questions about it.

This is the only place where the rules of `history` meet a storage. The service calls it, and so does a client
that works without the service; both may do so at the same time, because the log orders them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from ckptd import answers, layout
from ckptd.complete import check_complete, check_generation, commit_body, glance
from ckptd.damage import Quarantine
from ckptd.errors import Corrupt, Fenced, NotFound, Unavailable, Unreachable
from ckptd.history import judge
from ckptd.lineage import in_crash_loop, resume_point
from ckptd.log import SNAPSHOT_RECORDS, Build, RunLog
from ckptd.manifest import Manifest, ManifestRef
from ckptd.reading import read_manifest
from ckptd.records import AttemptOpened, Candidate, Damage, GenerationReady, RunCreated, SaveAborted
from ckptd.second import SecondReader, read_in_new_process, this_process
from ckptd.slots import last_slot
from ckptd.snapshotting import Aside, Snapshotter, on_a_thread
from ckptd.starting import doubt_body, start_body
from ckptd.state import RunState
from ckptd.storage.base import Storage
from ckptd.upkeep_records import CheckpointQuarantined
from ckptd.wire import (
    AbortRequest,
    Answer,
    BeginRequest,
    CheckpointInfo,
    CommitRequest,
    DamageAnswer,
    DamageReport,
    HeartbeatAnswer,
    Latest,
    OpenRequest,
    PartsAnswer,
    RunInfo,
    SaveStatus,
)

APPEND_DEADLINE_SECONDS = 30.0
_log = logging.getLogger("ckptd.ledger")
MAX_CACHED_RUNS = 1000


class Ledger:
    """The runs of one storage. Callable from any thread; holds nothing that is not in the storage."""

    def __init__(
        self,
        storage: Storage,
        *,
        second_reader: SecondReader = read_in_new_process,
        deadline_seconds: float = APPEND_DEADLINE_SECONDS,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        snapshot_records: int = SNAPSHOT_RECORDS,
        aside: Aside = on_a_thread,
    ) -> None:
        self.storage = storage
        self.uuid = storage.check_root()
        self.deadline_seconds = deadline_seconds
        self.actor = f"{socket.gethostname()} pid {os.getpid()}"
        self._second_reader = second_reader
        self._new_log = partial(
            RunLog,
            storage,
            actor=self.actor,
            pause=pause,
            clock=clock,
            lock_deadline_seconds=deadline_seconds,
            snapshot_records=snapshot_records,
        )
        self.snapshots = Snapshotter(aside)
        self._logs: dict[str, RunLog] = {}
        self._lock = threading.Lock()

    # An incarnation starts: open, begin, join, ready.

    def open(self, run: str, request: OpenRequest) -> None:
        """Rank 0, when its client is made: the attempt gets its age. Creates the run if it is new."""
        opened = AttemptOpened(attempt=request.attempt, job=request.job, host=request.host)
        self.append(run, lambda state: opened if state.fingerprint else RunCreated(fingerprint=layout.new_attempt()))

    def begin(self, run: str, request: BeginRequest) -> Answer:
        """Rank 0, once all ranks are there: start a generation and freeze where it resumes from.

        `Fenced` if a younger attempt began before; `Corrupt` if the run has commits and none is valid;
        `Unreachable` if the storage does not let the candidates be looked at.
        """
        self._look_before_promising(run, request)
        self.append(run, lambda state: start_body(run, state, request))
        answer = self.join(run, request.attempt, request.fallback_of)
        if answer is None:
            raise Corrupt(f"run {run}: the generation just begun is not in the log", run=run)
        return answer

    def join(self, run: str, attempt: str, fallback_of: int | None = None) -> Answer | None:
        """Any rank: the answer of this attempt's generation, None while it has not begun."""
        log = self._log(run)
        with log.lock:
            state = log.replay()
            generation = state.started(attempt, fallback_of)
            if generation is not None:
                return answers.pinned(run, self.uuid, state, generation)
            opened, current = state.attempts.get(attempt), state.current
            if opened and current and state.attempts[current.attempt].seq > opened.seq:
                raise Fenced(
                    f"run {run}: attempt {attempt} never began, a younger one is generation {current.number}",
                    run=run,
                )
        return None

    def ready(self, run: str, attempt: str, generation: int) -> None:
        """Rank 0, when all ranks hold the answer's state. From here on commits count."""
        self.append(run, lambda state: GenerationReady(generation=generation, attempt=attempt))

    def current(self, run: str) -> HeartbeatAnswer:
        """The run's current generation, 0 before the first."""
        log = self._log(run)
        with log.lock:
            current = log.replay().current
        if current is None:
            return HeartbeatAnswer(generation=0, attempt=None)
        return HeartbeatAnswer(generation=current.number, attempt=current.attempt, ended=current.closed)

    # A save becomes a checkpoint: parts, commit or abort.

    def parts(self, run: str, save: str) -> PartsAnswer:
        """The writers whose part manifests lie in storage. Of two by one writer either will do."""
        folder = layout.manifest_folder(run, save)
        parts = {}
        for name in reversed(self.storage.list(folder)):
            writer = layout.writer_of(name)
            if writer is not None:
                parts[str(writer)] = f"{folder}/{name}"
        return PartsAnswer(parts=parts)

    def commit(self, run: str, request: CommitRequest) -> None:
        """Rank 0: make a complete save a checkpoint. Returns when that is durable.

        The manifest and every object it names are looked at first: `Corrupt` or `NotFound` if something is not
        there in its full size. `Fenced` or `Conflict` if the save does not count.
        """
        body = commit_body(run, request, None)
        log = self._log(run)
        with log.lock:
            state = log.replay(to_the_end=True)  # a repeat finds its commit, whatever became of the payload since
            verdict, checkpoints = judge(state, body), state.checkpoints.copy()
        if body.rid not in state.accepted and not verdict.final:
            try:
                manifest = read_manifest(self.storage, request.manifest)
                body = commit_body(run, request, manifest)
                check_complete(self.storage, run, request, manifest, checkpoints)
            except Corrupt:  # or collected: its generation ended meanwhile, or what it borrows from was retired
                if not judge(self.state(run), body).final:
                    raise
        self.append(run, lambda state: body)

    def abort(self, run: str, save: str, request: AbortRequest) -> None:
        """Rank 0: this save is off. `Conflict` if it was committed before."""
        check_generation(save, request.generation)
        body = SaveAborted(generation=request.generation, save=save, reason=request.reason)
        self.append(run, lambda state: body)

    def save_status(self, run: str, save: str) -> SaveStatus:
        """Any rank: what became of a save."""
        log = self._log(run)
        with log.lock:
            return answers.save_status(log.replay(), save)

    # Damage.

    def report_damage(self, run: str, report: DamageReport) -> DamageAnswer:
        """Any rank that failed to load: read the object again in another process. If that confirms it, every
        checkpoint that needs this object goes into quarantine at once, so that no start falls back to one of them."""
        return self._quarantine(run).report(report, self._second_reader)

    # Questions.

    def latest(self, run: str) -> Latest:
        """Where a start would resume now, with the reason for each candidate. Looks at the objects as a start does;
        pins and changes nothing."""
        log = self._log(run)
        seen: dict[str, Damage] = {}
        while True:
            with log.lock:
                state = log.replay(to_the_end=True)
                answer = answers.latest(run, state, seen)
                point = state.checkpoints[answer.checkpoint.save] if answer.checkpoint else None
            damage = glance(self.storage, point) if point is not None else None
            if point is None or damage is None:
                return answer
            seen[point.save] = damage

    def checkpoints(self, run: str) -> list[CheckpointInfo]:
        """All checkpoints of a run, in the order of their commits. `NotFound` for a run that is none."""
        log = self._log(run)
        with log.lock:
            return answers.checkpoint_infos(self._existing(log))

    def checkpoint_at(self, run: str, step: int, save: str | None = None) -> CheckpointInfo:
        """The newest checkpoint of `step`, the one on the line if there are several; or `save` of that step."""
        layout.check_step(step)
        log = self._log(run)
        with log.lock:
            return answers.checkpoint_at(run, self._existing(log), step, save)

    def manifest(self, ref: ManifestRef) -> Manifest:
        return read_manifest(self.storage, ref)

    def runs(self) -> list[str]:
        """The names of all runs, sorted: the folders whose log has a record."""
        names = filter(layout.RUN_NAME.fullmatch, self.storage.list(layout.RUNS))
        return [name for name in names if last_slot(self.storage, name)]

    def run_info(self, run: str) -> RunInfo:
        """A run in one line. Damage in its log is told in `problem`, not raised."""
        log = self._log(run)
        with log.lock:
            problem = None
            try:
                self._existing(log)
            except Corrupt as error:
                problem = error.message
            return answers.run_info(run, log.state, problem)

    # How.

    def _log(self, run: str) -> RunLog:
        layout.check_run(run)
        with self._lock:
            if len(self._logs) > MAX_CACHED_RUNS:
                self._logs.clear()  # a cache: whoever works with one of them keeps it
            if run not in self._logs:
                self._logs[run] = self._new_log(run)
            return self._logs[run]

    def append(self, run: str, build: Build) -> None:
        """Append to the run's log what `build` makes of its state; see `ckptd.log`."""
        log = self._log(run)
        log.append(build, deadline_seconds=self.deadline_seconds)
        self.snapshots.after(log)

    def state(self, run: str) -> RunState:
        """What the run's log amounts to now, to its very end; the caller's own. `NotFound` for a run that is none."""
        log = self._log(run)
        with log.lock:
            return self._existing(log).snapshot()

    def _quarantine(self, run: str) -> Quarantine:
        def append(body: CheckpointQuarantined) -> None:
            self.append(run, lambda state: body)

        return Quarantine(self.storage, run, lambda: self.state(run), append)

    def _existing(self, log: RunLog) -> RunState:
        state = log.replay(to_the_end=True)
        if not state.fingerprint:
            raise NotFound(
                f"there is no run {log.run} on {self.storage.url}", do="`ckptd runs` lists them.", run=log.run
            )
        return state

    def _look_before_promising(self, run: str, request: BeginRequest) -> None:
        """Pass over checkpoints whose files are evidently gone or cut, so that no rank is sent to them."""
        log = self._log(run)
        while True:
            with log.lock:
                state = log.replay(to_the_end=True)
                begun, point = state.started(request.attempt, request.fallback_of), resume_point(state)
                doubted = in_crash_loop(state) if request.fallback_of is None else None
                body = doubt_body(state, doubted) if doubted is not None else None
            if begun is not None or point is None or state.closed is not None:
                return
            if body is not None:
                self._quarantine(run).doubt(body)
                continue
            try:
                damage = glance(self.storage, point)
            except Unavailable as error:
                looked_at = Candidate(save=point.save, step=point.step, valid=False, reason=error.message[:1000])
                raise Unreachable(
                    f"run {run}: the checkpoint of step {point.step} cannot be looked at: {error.message}",
                    run=run,
                    candidates=[looked_at.model_dump()],
                ) from error
            if damage is None:
                return
            if point.save in self.state(run).retired:
                continue  # and collected, while we looked: somebody went on with the run
            report = DamageReport(save=point.save, damage=damage, reader=this_process())
            if not self.report_damage(run, report).confirmed:
                return  # only we saw it; the ranks that load will tell
