"""Runs made by hand: records, whole saves, and ledgers that share a storage and a clock but nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd import layout
from ckptd.digests import ZERO_SHA256, chunk_digest, sha256_hex
from ckptd.encoding import encode, record, sealed
from ckptd.history import advance, judge
from ckptd.ledger import Ledger
from ckptd.manifest import Borrowed, Manifest, ManifestRef, ObjectRef, Part
from ckptd.records import (
    AttemptOpened,
    Body,
    CheckpointCommitted,
    Damage,
    GenerationReady,
    GenerationStarted,
    Observer,
    RunCreated,
    SaveAborted,
)
from ckptd.second import Reading, read_here
from ckptd.slots import all_slots
from ckptd.state import RunState
from ckptd.storage.base import Buffer, Storage
from ckptd.upkeep_records import CheckpointQuarantined
from ckptd.verdicts import Verdict
from ckptd.wire import BeginRequest, CommitRequest, OpenRequest

RUN = "r"
CHUNK = 16
A, B, C = ("a" * 32, "b" * 32, "c" * 32)
ME = Observer(host="one", process="pid 1")
OTHER = Observer(host="two", process="pid 2")


class ManualClock:
    """Time that passes only while somebody pauses."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def save(generation: int, step: int, count: int = 1) -> str:
    return layout.save_id(generation, step, all_ranks=True, count=count)


def created() -> RunCreated:
    return RunCreated(fingerprint="f" * 32)


def opened(attempt: str) -> AttemptOpened:
    return AttemptOpened(attempt=attempt, job="job", host="host")


def started(
    generation: int, attempt: str, resume_from: str | None = None, *, fallback_of: int | None = None
) -> GenerationStarted:
    return GenerationStarted(
        generation=generation, attempt=attempt, world=2, resume_from=resume_from, fallback_of=fallback_of
    )


def ready(generation: int, attempt: str) -> GenerationReady:
    return GenerationReady(generation=generation, attempt=attempt)


def committed(
    generation: int, step: int, count: int = 1, *, content: str = "x", borrows: tuple[str, ...] = ()
) -> CheckpointCommitted:
    """A commit of a manifest nobody wrote: enough for rules that look at the log alone."""
    name, digest = save(generation, step, count), sha256_hex(content.encode())
    ref = ManifestRef(key=layout.manifest_key(RUN, name, digest), size=1, sha256=digest)
    return CheckpointCommitted(
        generation=generation, save=name, step=step, manifest=ref, payload_bytes=1, writers=1, borrows=borrows
    )


def aborted(generation: int, step: int, count: int = 1) -> SaveAborted:
    return SaveAborted(generation=generation, save=save(generation, step, count), reason="disk full")


def quarantined(name: str, *, reported_by: Observer = ME, confirmed_by: Observer = OTHER) -> CheckpointQuarantined:
    damage = Damage(object="some object", expected="aa", observed="bb")
    return CheckpointQuarantined(save=name, damage=damage, reported_by=reported_by, confirmed_by=confirmed_by)


START: tuple[Body, ...] = (created(), opened(A), started(1, A))
LIVE: tuple[Body, ...] = (*START, ready(1, A))


def folded(*bodies: Body) -> RunState:
    """The state after `bodies`, which need not all count."""
    state = RunState()
    for body in bodies:
        item = record(state.seq + 1, state.digest, body, actor="hand", time="never")
        advance(state, item, sha256_hex(encode(item)))
    return state


def verdict(before: tuple[Body, ...], body: Body) -> Verdict:
    return judge(folded(*before), body)


class HandLog:
    """Puts records into a run's log with no regard for whether they count."""

    def __init__(self, storage: Storage, run: str = RUN) -> None:
        self.storage, self.run = storage, run
        self.seq, self.digest = 0, ZERO_SHA256
        for seq in all_slots(storage, run):
            self._step(storage.get(layout.log_key(run, seq), 1 << 20))

    def add(self, *bodies: Body, **changes: object) -> int:
        """The slot of the last one. `changes` replaces fields of the envelope."""
        for body in bodies:
            item = record(self.seq + 1, self.digest, body, actor="hand", time="never")
            self.raw(sealed(item.model_dump(mode="json") | changes))
        return self.seq

    def raw(self, data: bytes) -> None:
        self.storage.put(layout.log_key(self.run, self.seq + 1), [data], len(data))
        self._step(data)

    def _step(self, data: bytes) -> None:
        self.seq, self.digest = self.seq + 1, sha256_hex(data)


def content(save: str, writer: int) -> bytes:
    return f"payload of writer {writer} of {save}, which fills a few chunks of it".encode()


def write_payload(
    storage: Storage, save: str, writer: int, run: str = RUN, pieces: Sequence[Buffer] = ()
) -> ObjectRef:
    """With the content of that writer, or with `pieces`."""
    data = b"".join(pieces) or content(save, writer)
    key = layout.payload_key(run, save, writer, layout.new_nonce())
    storage.put(key, pieces or [data], len(data))
    chunk = 1024 * CHUNK if pieces else CHUNK
    chunks = tuple(chunk_digest(data[start : start + chunk]) for start in range(0, len(data), chunk))
    return ObjectRef(key=key, size=len(data), chunk_bytes=chunk, chunks=chunks)


def borrowing(*manifests: Manifest) -> tuple[Borrowed, ...]:
    """The first object that each of these saves wrote, without its bytes being looked at."""
    return tuple(Borrowed(save=m.save, object=m.written()[0], names=("shared.w",)) for m in manifests)


def write_save(
    storage: Storage,
    generation: int,
    step: int,
    *,
    count: int = 1,
    writers: int = 2,
    run: str = RUN,
    borrowed: tuple[Borrowed, ...] = (),
    chunks: Sequence[Buffer] = (),
) -> CommitRequest:
    """A save as clients leave it before the commit: payload, parts, manifest. Writer 0 borrows what is `borrowed`."""
    name = save(generation, step, count)
    parts = []
    for writer in range(writers):
        ref = write_payload(storage, name, writer, run, chunks)
        part = Part(run=run, generation=generation, save=name, step=step, writer=writer, payload=ref)
        part = part.model_copy(update={"borrowed": borrowed if writer == 0 else ()})
        parts.append(part)
        data = part.stored()
        storage.put(layout.part_key(run, name, writer, layout.new_nonce()), [data], len(data))
    manifest = Manifest(run=run, generation=generation, save=name, step=step, world=writers, parts=tuple(parts))
    return write_manifest(storage, manifest)


def write_manifest(storage: Storage, manifest: Manifest) -> CommitRequest:
    data = manifest.stored()
    ref = ManifestRef.of(manifest, data)
    storage.put(ref.key, [data], len(data))
    return CommitRequest(
        generation=manifest.generation,
        save=manifest.save,
        step=manifest.step,
        writers=len(manifest.parts),
        manifest=ref,
    )


def overwrite(storage: Storage, key: str, data: bytes) -> None:
    """What nobody may do: other bytes under the same key."""
    storage.delete(key)
    storage.put(key, [data], len(data))


def other_reader(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
    """A second reader in this process that says it is another one: the reading itself is real."""
    return Reading(reader=OTHER, damage=read_here(storage, ref).damage)


def a_ledger(storage: Storage, *, deadline_seconds: float = 2.0) -> Ledger:
    clock = ManualClock()
    return Ledger(
        storage, second_reader=other_reader, deadline_seconds=deadline_seconds, pause=clock.pause, clock=clock
    )


def opening(attempt: str) -> OpenRequest:
    return OpenRequest(attempt=attempt, job="job", host="host")


def beginning(attempt: str, *, fallback_of: int | None = None, world: int = 2) -> BeginRequest:
    return BeginRequest(attempt=attempt, job="job", world=world, fallback_of=fallback_of)


def live(ledger: Ledger, attempt: str = A, run: str = RUN) -> int:
    """Open, begin and declare ready; the generation."""
    ledger.open(run, opening(attempt))
    generation = ledger.begin(run, beginning(attempt)).generation
    ledger.ready(run, attempt, generation)
    return generation
