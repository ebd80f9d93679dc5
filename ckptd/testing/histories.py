"""Long histories of a run, made fast: what a job leaves that was restarted thousands of times.

    state = write_history(storage, "en-it", records=100_000)

Every generation opens, begins, gets ready, commits a few checkpoints, verifies one, retires and purges those of the
generation before the last, and a stopped process of the generation before adds a commit that is void. The newest
checkpoints have real files. For measuring, and for tests of what a log's length may cost.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from hashlib import sha256

from ckptd import layout
from ckptd.digests import ZERO_SHA256, chunk_digest, sha256_hex
from ckptd.encoding import encode, record
from ckptd.manifest import Manifest, ManifestRef, ObjectRef, Part
from ckptd.records import (
    AttemptOpened,
    Body,
    CheckpointCommitted,
    GenerationReady,
    GenerationStarted,
    Observer,
    RunCreated,
)
from ckptd.storage.base import Storage
from ckptd.storage.local import LocalStorage
from ckptd.upkeep_records import CheckpointsPurged, CheckpointsRetired, CheckpointVerified

COMMITS = 3  # of each generation
CYCLE = 7 + COMMITS  # records of each generation
WHOLE_RECORDS = 3 * CYCLE  # the commits among the last so many have files
TIME = "2026-01-01T00:00:00.000+00:00"
Write = Callable[[str, bytes], None]


def write_history(storage: Storage, run: str, *, records: int, actor: str = "history") -> str:
    """Write the log of a new run with so many records, and the files of its newest checkpoints; the digest of the
    last slot. A folder is written into without fsyncs: for measuring, not for keeping."""
    write = _fast(storage.root) if isinstance(storage, LocalStorage) else _slow(storage)
    digest = ZERO_SHA256
    for seq, body in enumerate(itertools.islice(history(run), records), 1):
        if isinstance(body, CheckpointCommitted) and seq > records - WHOLE_RECORDS:
            body = _with_files(write, run, body)
        data = encode(record(seq, digest, body, actor=actor, time=TIME))
        write(layout.log_key(run, seq), data)
        digest = sha256_hex(data)
    return digest


def history(run: str) -> Iterator[Body]:
    """The records of a run that goes on and on. All count, but for one late commit of each generation."""
    yield RunCreated(fingerprint=_attempt(0))
    before: list[str] = []
    last: list[str] = []
    late: CheckpointCommitted | None = None
    for generation in itertools.count(1):
        tip = last[-1] if last else None
        attempt = _attempt(generation)
        yield AttemptOpened(attempt=attempt, job="history", host="host")
        yield GenerationStarted(generation=generation, attempt=attempt, world=8, resume_from=tip)
        yield GenerationReady(generation=generation, attempt=attempt)
        if late is not None:
            yield late
        mine = [commit_of(run, generation, COMMITS * generation + number) for number in range(COMMITS)]
        yield from mine
        yield CheckpointVerified(save=mine[0].save, reader=Observer(host="host", process="1"))
        if before:
            yield CheckpointsRetired(saves=tuple(before), turn=generation - 3, rule="keep_last=3")
            yield CheckpointsPurged(saves=tuple(before), turn=generation - 3)
        before, last = last, [commit.save for commit in mine]
        late = commit_of(run, generation, COMMITS * (generation + 1) - 1, count=2)


def commit_of(run: str, generation: int, step: int, *, count: int = 1) -> CheckpointCommitted:
    """A commit of a manifest that nobody wrote."""
    save = layout.save_id(generation, step, all_ranks=True, count=count)
    digest = sha256_hex(save.encode())
    return CheckpointCommitted(
        generation=generation,
        save=save,
        step=step,
        manifest=ManifestRef(key=layout.manifest_key(run, save, digest), size=1000, sha256=digest),
        payload_bytes=1 << 30,
        writers=8,
        metrics={"loss": 1.0 / step},
    )


def _attempt(number: int) -> str:
    return sha256(b"%d" % number).hexdigest()[:32]


def _with_files(write: Write, run: str, commit: CheckpointCommitted) -> CheckpointCommitted:
    """The commit of a manifest and a payload that are written."""
    save, data = commit.save, f"payload of {commit.save}".encode()
    key = layout.payload_key(run, save, 0, sha256_hex(save.encode())[:16])
    write(key, data)
    ref = ObjectRef(key=key, size=len(data), chunk_bytes=1024, chunks=(chunk_digest(data),))
    part = Part(run=run, generation=commit.generation, save=save, step=commit.step, writer=0, payload=ref)
    manifest = Manifest(run=run, generation=commit.generation, save=save, step=commit.step, world=1, parts=(part,))
    stored = manifest.stored()
    found = ManifestRef.of(manifest, stored)
    write(found.key, stored)
    return commit.model_copy(update={"manifest": found, "payload_bytes": len(data), "writers": 1})


def _slow(storage: Storage) -> Write:
    return lambda key, data: storage.put(key, [data], len(data))


def _fast(root: str) -> Write:
    made: set[str] = set()

    def write(key: str, data: bytes) -> None:
        folder = os.path.join(root, os.path.dirname(key))
        if folder not in made:
            os.makedirs(folder, exist_ok=True)
            made.add(folder)
        with open(os.path.join(root, key), "xb") as file:
            file.write(data)

    return write
