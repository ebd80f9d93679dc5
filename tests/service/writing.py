"""What trainers write, without torch: payload, parts and a manifest, ready to be committed."""

from __future__ import annotations

from ckptd import layout
from ckptd.digests import chunk_digest
from ckptd.ledger import Ledger
from ckptd.manifest import Borrowed, Manifest, ManifestRef, ObjectRef, Part
from ckptd.storage.base import Storage
from ckptd.wire import Answer, BeginRequest, CommitRequest, OpenRequest

PAYLOAD = bytes(range(256)) * 8


def write_part(storage: Storage, run: str, save: str, writer: int, step: int) -> Part:
    """One writer's payload and part manifest."""
    key = layout.payload_key(run, save, writer, layout.new_nonce())
    storage.put(key, [PAYLOAD], len(PAYLOAD))
    part = Part(
        run=run,
        generation=layout.generation_of(save),
        save=save,
        step=step,
        writer=writer,
        payload=ObjectRef(key=key, size=len(PAYLOAD), chunk_bytes=len(PAYLOAD), chunks=(chunk_digest(PAYLOAD),)),
    )
    data = part.stored()
    storage.put(layout.part_key(run, save, writer, layout.new_nonce()), [data], len(data))
    return part


def write_save(
    storage: Storage,
    run: str,
    generation: int,
    step: int,
    *,
    writers: int = 1,
    loss: float = 0.5,
    borrowed: tuple[Borrowed, ...] = (),
) -> CommitRequest:
    """Everything of a save but its commit. All its writers borrow what is `borrowed`."""
    save = layout.save_id(generation, step, all_ranks=True, count=1)
    manifest = Manifest(
        run=run,
        generation=generation,
        save=save,
        step=step,
        world=writers,
        metrics={"loss": loss},
        producer="tests",
        parts=tuple(
            write_part(storage, run, save, writer, step).model_copy(update={"borrowed": borrowed})
            for writer in range(writers)
        ),
    )
    data = manifest.stored()
    ref = ManifestRef.of(manifest, data)
    storage.put(ref.key, [data], len(data))
    return CommitRequest(generation=generation, save=save, step=step, writers=writers, manifest=ref)


def start(ledger: Ledger, run: str, *, job: str = "job") -> Answer:
    """An incarnation opens, begins and is ready."""
    attempt = layout.new_attempt()
    ledger.open(run, OpenRequest(attempt=attempt, job=job, host="node-1"))
    answer = ledger.begin(run, BeginRequest(attempt=attempt, job=job, world=1))
    ledger.ready(run, attempt, answer.generation)
    return answer


def train(ledger: Ledger, run: str, *steps: int, loss: float = 0.5) -> list[CommitRequest]:
    """A generation that commits a checkpoint at each of `steps`."""
    generation = start(ledger, run).generation
    commits = [write_save(ledger.storage, run, generation, step, loss=loss) for step in steps]
    for commit in commits:
        ledger.commit(run, commit)
    return commits
