"""One incarnation of a training job: its ranks start, agree, load, train and save as `ckptd_client` does.

The client itself needs torch and real threads, which this package does without. So its protocol is driven here: the
same calls on the ledger and the storage in the same order as in `ckptd_client.client`, `incarnation` and `saving`,
which a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd import layout
from ckptd.errors import CkptdError, Corrupt, Fenced, Unreachable
from ckptd.reading import damage_of, observe, read_manifest
from ckptd.records import Damage, Observer
from ckptd.testing.sim.baton import Process
from ckptd.testing.sim.cluster import RUN, Cluster, Way
from ckptd.testing.sim.saves import Save, Saver
from ckptd.wire import Answer, BeginRequest, DamageReport, OpenRequest

MAX_FALLBACKS = 3
Ballot = CkptdError | Damage | str | None


@dataclass
class Job:
    """An incarnation. `plan` is what it saves: how many steps later, whether all ranks take part. `words` is the
    store of its process group."""

    number: int
    attempt: str
    world: int
    plan: list[tuple[int, bool]]
    by_hand: bool = False  # it asks for `latest` and loads by itself: the first save declares it ready
    stubborn: bool = False  # it goes on after a save that failed
    words: dict[str, object] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    durable: int = 0
    left: int = 0

    @property
    def over(self) -> bool:
        """Nobody of it will do anything any more."""
        return self.left == 0 or all(process.dead for process in self.processes)


def start(cluster: Cluster, number: int, *, world: int, saves: int, mortal: bool = True) -> Job:
    """A new incarnation, one process for each rank."""
    rng = cluster.rng
    job = Job(
        number=number,
        attempt=layout.new_attempt(),
        world=world,
        plan=[(rng.choice((0, 1, 1, 2)), world > 1 and rng.random() < 0.5) for _ in range(saves)],
        by_hand=rng.random() < 0.15,
        stubborn=rng.random() < 0.7,
        left=world,
    )
    job.processes += [Process(f"job {number} rank {rank}", mortal=mortal) for rank in range(world)]
    for rank, process in enumerate(job.processes):
        cluster.baton.start(process, Rank(cluster, job, rank).live)
    return job


class Rank:
    """One rank of `job`; `live` is the program it runs."""

    def __init__(self, cluster: Cluster, job: Job, rank: int) -> None:
        self._cluster, self._job, self._rank = cluster, job, rank
        self._way = Way(cluster, job.processes[rank])
        self._name = job.processes[rank].name
        self._saver = Saver(cluster, self._way, rank, job.world, self._declare_ready)
        self._ready = False
        self._restores = 0
        self._step = 0
        self._answer: Answer

    def live(self) -> None:
        try:
            self._start()
            if not self._job.by_hand:
                self._restore()
            elif self._answer.checkpoint is not None:
                self._step = self._answer.checkpoint.step
                damage = self._load()
                if damage is not None:
                    return self._hand_in(self._answer.checkpoint.save, [damage])
            self._train()
        except CkptdError as error:
            self._cluster.count(self._name, "ended", error)
        finally:
            self._job.left -= 1

    # Start, as CheckpointClient and Incarnation do it.

    def _start(self) -> None:
        job, seconds = self._job, self._cluster.manners.start_seconds
        if self._rank == 0:
            opening = OpenRequest(attempt=job.attempt, job=f"job {job.number}", host="host")
            self._cluster.patiently(lambda: self._way.do(lambda ledger: ledger.open(RUN, opening)), seconds)
        self._vote("hello", None)
        self._answer = self._pin(None)

    def _restore(self) -> None:
        for fallbacks in range(MAX_FALLBACKS + 1):
            if fallbacks:
                self._answer = self._pin(self._answer.generation)
            may_fall_back = self._load_together()
            if may_fall_back is None:
                self._agree_ready()
                self._step = self._answer.checkpoint.step if self._answer.checkpoint is not None else 0
                return
            if not may_fall_back:
                break
        raise Corrupt("no checkpoint could be loaded")

    def _pin(self, fallback_of: int | None) -> Answer:
        """Rank 0 begins, the others join, and all compare."""
        name = f"begin/{fallback_of or 0}"
        answer: Answer | None = None
        failure: CkptdError | None = None
        try:
            if self._rank == 0:
                answer = self._begin(fallback_of)
                self._say(name, "begun")
            elif self._hear(name) == "begun":
                answer = self._join(fallback_of)
        except CkptdError as error:
            failure = error
            if self._rank == 0:
                self._say(name, "failed")
        if answer is not None:
            self._cluster.truth.answered(answer)
        digests = self._vote(f"answer/{fallback_of or 0}", failure or (answer.record_sha256 if answer else None))
        if answer is None or len(set(map(str, digests))) != 1:
            raise Unreachable("the ranks hold different answers")
        return answer

    def _begin(self, fallback_of: int | None) -> Answer:
        job = self._job
        request = BeginRequest(attempt=job.attempt, job="job", world=job.world, fallback_of=fallback_of)
        seconds = self._cluster.manners.start_seconds
        return self._cluster.patiently(lambda: self._way.do(lambda ledger: ledger.begin(RUN, request)), seconds)

    def _join(self, fallback_of: int | None) -> Answer:
        attempt = self._job.attempt
        try:
            answer = self._way.until(
                self._cluster.manners.start_seconds,
                lambda ledger: ledger.join(RUN, attempt, fallback_of),
                lambda answer: answer is not None,
            )
        except Fenced:
            self._cluster.truth.refused(f"begin:{attempt}:{fallback_of or 0}")
            raise
        if answer is None:
            raise Unreachable("rank 0 did not begin")
        return answer

    def _load_together(self) -> bool | None:
        """None if all hold the state; else whether another answer may be asked for."""
        self._restores += 1
        mine: Ballot = None
        try:
            mine = self._cluster.patiently(self._load, self._cluster.manners.start_seconds)
        except CkptdError as error:
            mine = error
        was_ready = self._ready
        ballots = self._vote(f"loaded/{self._restores}", mine)
        damages = [ballot for ballot in ballots if isinstance(ballot, Damage)]
        if damages and self._answer.checkpoint is not None:
            if self._rank == 0:
                self._hand_in(self._answer.checkpoint.save, damages)
            return not was_ready
        self._vote(f"installed/{self._restores}", None)
        return None

    def _load(self) -> Damage | None:
        """Every rank reads rank 0's object and its own, every byte."""
        checkpoint = self._answer.checkpoint
        if checkpoint is None:
            return None
        storage = self._way.ledger.storage
        try:
            manifest = read_manifest(storage, checkpoint.manifest)
        except Corrupt as error:
            damage = damage_of(error)
            if damage is None:
                raise
            return damage
        objects = manifest.objects()
        own = objects[self._rank : self._rank + 1] if self._rank and manifest.world == self._job.world else ()
        for ref in [*objects[:1], *own]:
            damage = observe(storage, ref, fresh=False)
            if damage is not None:
                return damage
        return None

    def _hand_in(self, save: str, damages: list[Damage]) -> None:
        for rank, damage in enumerate(damages):
            report = DamageReport(save=save, damage=damage, reader=Observer(host=f"host {rank}", process=self._name))
            try:
                self._way.do(lambda ledger, report=report: ledger.report_damage(RUN, report))  # type: ignore[misc]
                self._cluster.count(self._name, "report damage")
            except CkptdError as error:
                self._cluster.count(self._name, "report damage", error)

    def _agree_ready(self) -> None:
        name = f"ready/{self._restores}"
        if self._rank != 0:
            word = self._hear(name)
            if isinstance(word, CkptdError):
                raise word
            return
        try:
            self._cluster.patiently(self._declare_ready, self._cluster.manners.start_seconds)
        except CkptdError as error:
            self._say(name, error)
            raise
        self._say(name, None)

    def _declare_ready(self) -> None:
        if not self._ready:
            attempt, generation = self._job.attempt, self._answer.generation
            self._way.do(lambda ledger: ledger.ready(RUN, attempt, generation))
            self._ready = True

    # Training.

    def _train(self) -> None:
        counts: dict[tuple[int, bool], int] = {}
        step = self._step
        for steps, everyone in self._job.plan:
            self._cluster.baton.pause(2.0 * self._cluster.rng.random())
            step += steps
            counts[step, everyone] = counts.get((step, everyone), 0) + 1
            name = layout.save_id(self._answer.generation, step, all_ranks=everyone, count=counts[step, everyone])
            try:
                self._saver.save(Save(name, self._answer.generation, step, self._job.world if everyone else 1))
                self._cluster.truth.durable(name)
                self._job.durable += self._rank == 0
                self._cluster.count(self._name, "save")
            except CkptdError as error:
                self._cluster.count(self._name, "save", error)
                if isinstance(error, Fenced) or not self._job.stubborn:
                    return

    # The process group's store.

    def _say(self, name: str, word: object) -> None:
        self._job.words[name] = word

    def _hear(self, name: str) -> object:
        self._await([name])
        return self._job.words[name]

    def _vote(self, name: str, ballot: Ballot) -> list[object]:
        """All ballots, by rank. Raises on every rank if any is an error."""
        keys = [f"{name}/{rank}" for rank in range(self._job.world)]
        self._say(keys[self._rank], ballot)
        try:
            self._await(keys)
        except Unreachable as lost:
            raise (ballot if isinstance(ballot, CkptdError) else lost) from lost
        ballots = [self._job.words[key] for key in keys]
        for other in [ballot, *ballots]:
            if isinstance(other, CkptdError):
                raise other
        return ballots

    def _await(self, keys: list[str]) -> None:
        words, baton = self._job.words, self._cluster.baton
        patience = 2 * self._cluster.manners.start_seconds
        if not baton.wait(lambda: all(key in words for key in keys), baton.now + patience):
            raise Unreachable(f"not all ranks came to {keys[0]}")
