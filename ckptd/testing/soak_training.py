"""What trainers do to the runs of a soak, and some of what they should not: starts, saves, commits, and repeats."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd import layout
from ckptd.errors import Conflict, Corrupt, Fenced, Invalid, NotFound
from ckptd.lineage import CRASH_LOOP_STARTS
from ckptd.manifest import ManifestRef, ObjectRef
from ckptd.reading import damage_of, read_manifest
from ckptd.records import Damage
from ckptd.second import read_here, this_process
from ckptd.testing.soak_hand import Hand
from ckptd.testing.soak_saves import write_save
from ckptd.testing.soak_sides import Side
from ckptd.wire import AbortRequest, Answer, BeginRequest, CommitRequest, DamageReport, OpenRequest

KEPT = 20
MAX_FALLBACKS = 3


@dataclass
class Job:
    """An incarnation this process believes to be."""

    run: str
    side: Side
    attempt: str
    answer: Answer
    step: int
    count: int = 0
    durable: list[CommitRequest] = field(default_factory=list)
    refused: list[CommitRequest] = field(default_factory=list)


class Training:
    """The jobs of one process: those it believes to be current, and those before them."""

    def __init__(self, hand: Hand) -> None:
        self._hand, self._journal, self._random = hand, hand.journal, hand.random
        self._jobs: dict[str, Job] = {}
        self._past: list[Job] = []
        self._opened: list[tuple[str, str]] = []

    # Incarnations

    def start(self) -> None:
        self._start(self._hand.run())

    def crash(self) -> None:
        """Starts that come to nothing, as often as puts a checkpoint in doubt, unless somebody commits in between."""
        run = self._hand.run()
        for _ in range(CRASH_LOOP_STARTS + 1):
            self._start(run)

    def late(self) -> None:
        """Begin what was opened a while ago: a process that was stopped in between."""
        if self._opened:
            self._begin(*self._opened.pop(self._random.randrange(len(self._opened))))

    def join(self) -> None:
        """Every rank that asks is told the same, by whomever it asks."""
        job = self._job()
        if job is not None:
            asked = job.answer.fallback_of
            found = self._hand.insist(self._hand.any(), lambda side: side.join(job.run, job.attempt, asked))
            if found != job.answer:
                self._journal.finding(job.run, f"rank 0 was answered {job.answer}, another rank {found}")

    def _start(self, run: str) -> None:
        attempt = layout.new_attempt()
        opening = OpenRequest(attempt=attempt, job=self._hand.name, host="soak")
        self._hand.insist(self._hand.any(), lambda side: side.open(run, opening))
        self._journal.counts(run, f"open:{attempt}")
        if self._random.random() < 0.15:
            self._opened.append((run, attempt))
        else:
            self._begin(run, attempt)

    def _begin(self, run: str, attempt: str, fallback_of: int | None = None, tries: int = MAX_FALLBACKS) -> None:
        home = self._hand.any()
        takeover = self._random.random() < 0.9
        request = BeginRequest(
            attempt=attempt, job=self._hand.name, world=2, fallback_of=fallback_of, takeover=takeover
        )
        try:
            answer = self._hand.insist(home, lambda side: side.begin(run, request))
        except Fenced:
            self._journal.event("fenced")
            return
        except Corrupt as error:
            if not error.fields.get("candidates"):
                raise
            self._journal.event("no valid checkpoint is left")
            if self._random.random() < 0.5:  # else somebody reinstates one, or rolls back to one
                self._hand.leave(run)
            return
        self._journal.counts(run, f"begin:{attempt}:{fallback_of or 0}")
        job = Job(run, home, attempt, answer, answer.checkpoint.step if answer.checkpoint else 0)
        whole = self._load(job)
        if tries and (not whole or (fallback_of is None and self._random.random() < 0.1)):
            self._begin(run, attempt, answer.generation, tries - 1)
            return
        self._past = [*self._past, *filter(None, [self._jobs.get(run)])][-KEPT:]
        self._jobs[run] = job
        if whole and self._random.random() < 0.95:
            self._ready(job)

    def _load(self, job: Job) -> bool:
        """Read every byte of what the start resumes from, as all its ranks do; report it if it is damaged."""
        info, run = job.answer.checkpoint, job.run
        damage = self._read(info.manifest) if info is not None else None
        if info is None or damage is None:
            return True
        report = DamageReport(save=info.save, damage=damage, reader=this_process())
        try:
            self._hand.insist(self._hand.any(), lambda side: side.report_damage(run, report))
        except (NotFound, Conflict, Corrupt, Invalid):
            if not self._hand.is_retired(run, info.save):  # by a younger generation, while this one was loading
                raise
            self._journal.event("retired while an older start was loading")
        else:
            self._journal.event("a start met damage")
        return False

    def _read(self, manifest: ManifestRef) -> Damage | None:
        storage = self._hand.straight.storage
        try:
            objects: tuple[ManifestRef | ObjectRef, ...] = tuple(read_manifest(storage, manifest).objects())
        except Corrupt as error:
            damage = damage_of(error)
            if damage is None:
                raise
            return damage
        return next(filter(None, (read_here(storage, ref).damage for ref in objects)), None)

    def _ready(self, job: Job) -> None:
        generation = job.answer.generation
        try:
            self._hand.insist(job.side, lambda side: side.ready(job.run, job.attempt, generation))
        except Fenced:
            self._journal.event("fenced")
        else:
            self._journal.counts(job.run, f"ready:{job.attempt}:{generation}")

    # Saves

    def save(self) -> None:
        job = self._job()
        if job is None:
            self.start()
        else:
            self._commit(job, self._written(job))

    def repeat(self) -> None:
        """Ask again for what was decided: it stays decided, whatever happened since and whoever is asked."""
        jobs = [*self._jobs.values(), *self._past]
        decided = [(job, request, True) for job in jobs for request in job.durable[-5:]]
        decided += [(job, request, False) for job in jobs for request in job.refused[-5:]]
        if not decided:
            return
        job, request, durable = self._random.choice(decided)
        try:
            self._hand.insist(self._hand.any(), lambda side: side.commit(job.run, request))
        except (Fenced, Conflict) as error:
            if durable:
                self._journal.finding(job.run, f"{request.save} was acknowledged, and then {error.message}")
        else:
            if not durable:
                self._journal.finding(job.run, f"{request.save} was refused for good, and then committed")

    def abort(self) -> None:
        """A save is called off; after that nobody can commit it."""
        job = self._job()
        if job is None:
            return
        request = self._written(job)
        off = AbortRequest(generation=request.generation, reason="soak")
        try:
            self._hand.insist(job.side, lambda side: side.abort(job.run, request.save, off))
        except (Fenced, Conflict):
            self._journal.event("abort refused")
            return
        self._journal.counts(job.run, f"abort:{request.save}")
        try:
            self._hand.insist(self._hand.any(), lambda side: side.commit(job.run, request))
        except (Fenced, Conflict):
            job.refused.append(request)
        else:
            self._journal.finding(job.run, f"{request.save} was aborted, and then committed")

    def latest(self) -> None:
        job = self._job()
        run = job.run if job is not None else self._hand.run()
        found = self._hand.insist(self._hand.any(), lambda side: side.latest(run))
        if found.answer == "none" and job is not None and job.durable:
            self._journal.finding(run, f"{job.durable[-1].save} was acknowledged, and the latest is {found}")

    def _written(self, job: Job) -> CommitRequest:
        """A save that lacks nothing but its commit."""
        job.count += 1
        job.step += self._random.randrange(3)
        name = layout.save_id(job.answer.generation, job.step, all_ranks=True, count=job.count)
        return write_save(self._hand.straight.storage, job.run, name, self._random)

    def _commit(self, job: Job, request: CommitRequest) -> None:
        rid = f"commit:{request.save}:{request.manifest.sha256}"
        try:
            self._hand.insist(job.side, lambda side: side.commit(job.run, request))
        except (Fenced, Conflict) as error:
            if isinstance(error, Fenced) and self._jobs.get(job.run) is job:
                self._past = [*self._past, self._jobs.pop(job.run)][-KEPT:]
            if error.fields.get("final"):
                self._journal.refused(job.run, rid)
                job.refused.append(request)
            self._journal.event("commit refused")
            return
        self._journal.durable(job.run, request.save, rid)
        job.durable.append(request)
        if self._random.random() < 0.3:
            found = self._hand.insist(self._hand.any(), lambda side: side.save_status(job.run, request.save))
            if found.status != "durable":
                self._journal.finding(job.run, f"{request.save} was acknowledged, and then {found}")

    def _job(self) -> Job | None:
        """One that is believed to be current, or, now and then, one that is not."""
        if self._past and self._random.random() < 0.1:
            return self._random.choice(self._past)
        return self._random.choice(list(self._jobs.values())) if self._jobs else None
