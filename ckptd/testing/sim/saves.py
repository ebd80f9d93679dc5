"""One save, as `ckptd_client.saving` carries it out: payload, part manifests, the manifest, the commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from ckptd import layout
from ckptd.digests import chunk_digest, sha256_hex
from ckptd.errors import AlreadyExists, CkptdError, Conflict, Corrupt, Fenced, Unavailable, describe
from ckptd.manifest import Manifest, ManifestRef, ObjectRef, Part
from ckptd.reading import read_part
from ckptd.storage.base import Storage
from ckptd.testing.sim.cluster import RUN, Cluster, Way
from ckptd.wire import AbortRequest, CommitRequest

WRITE_TRIES, PUT_SECONDS, RETRY_SECONDS = 3, 60.0, 1.0
CHUNK_BYTES = 32


@dataclass(frozen=True)
class Save:
    name: str
    generation: int
    step: int
    writers: int


class Saver:
    """Of one rank; called on its training thread, which has nothing else to do."""

    def __init__(self, cluster: Cluster, way: Way, rank: int, world: int, declare_ready: Callable[[], None]) -> None:
        self._cluster, self._way, self._rank, self._world = cluster, way, rank, world
        self._declare_ready = declare_ready

    def save(self, save: Save) -> None:
        """Returns when it is durable, as far as this rank is told."""
        give_up_at = self._cluster.baton.now + self._cluster.manners.save_seconds
        if self._rank != 0:
            if save.writers > 1:
                self._write_part(save, give_up_at)
            self._follow(save, give_up_at)
            return
        try:
            self._write_part(save, give_up_at)
            ref = self._write_manifest(save, give_up_at)
            self._insist(self._declare_ready, give_up_at)
        except CkptdError as error:
            self._call_off(save, error)
            raise
        request = CommitRequest(
            generation=save.generation, save=save.name, step=save.step, writers=save.writers, manifest=ref
        )
        try:
            self._insist(lambda: self._way.do(lambda ledger: ledger.commit(RUN, request)), give_up_at)
        except Unavailable:
            raise  # it may have landed: nothing is called off
        except CkptdError as error:
            self._call_off(save, error)
            raise

    def _write_part(self, save: Save, give_up_at: float) -> None:
        try:
            ref = self._write_payload(save, give_up_at)
        except CkptdError as error:
            if self._rank != 0:
                try:
                    self._put_part(save, None, describe(error)[:2000])
                except CkptdError as second:
                    error.add_note(f"and rank 0 could not be told: {describe(second)}")
            raise
        self._put_part(save, ref, None)

    def _write_payload(self, save: Save, give_up_at: float) -> ObjectRef:
        data = f"what rank {self._rank} held at step {save.step} of generation {save.generation}".encode()
        chunks = tuple(chunk_digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))

        def write() -> ObjectRef:
            key = layout.payload_key(RUN, save.name, self._rank, layout.new_nonce())
            self._storage.put(key, [data], len(data))
            return ObjectRef(key=key, size=len(data), chunk_bytes=CHUNK_BYTES, chunks=chunks)

        left = max(0.0, give_up_at - self._cluster.baton.now)
        return self._cluster.again(write, seconds=left, tries=WRITE_TRIES)

    def _put_part(self, save: Save, ref: ObjectRef | None, error: str | None) -> None:
        part = Part(
            run=RUN,
            generation=save.generation,
            save=save.name,
            step=save.step,
            writer=self._rank,
            payload=ref,
            error=error,
        )
        data = part.stored()
        self._put(layout.part_key(RUN, save.name, self._rank, sha256_hex(data)), data)

    def _write_manifest(self, save: Save, give_up_at: float) -> ManifestRef:
        parts = self._gather(save, give_up_at)
        try:
            manifest = Manifest(
                run=RUN,
                generation=save.generation,
                save=save.name,
                step=save.step,
                world=self._world,
                parts=tuple(parts),
            )
        except ValidationError as error:
            raise Corrupt(f"the parts of save {save.name} are not of one save") from error
        data = manifest.stored()
        ref = ManifestRef.of(manifest, data)
        self._put(ref.key, data)
        return ref

    def _gather(self, save: Save, give_up_at: float) -> list[Part]:
        writers = [str(writer) for writer in range(save.writers)]
        found = self._way.until(
            max(0.0, give_up_at - self._cluster.baton.now),
            lambda ledger: ledger.parts(RUN, save.name),
            lambda answer: all(writer in answer.parts for writer in writers),
        ).parts
        if not all(writer in found for writer in writers):
            raise Unavailable(f"save {save.name}: not all parts came")
        parts = []
        for writer in writers:
            part = read_part(self._storage, found[writer])
            if part.error is not None:
                raise Unavailable(f"save {save.name} is off: rank {writer} could not write")
            parts.append(part)
        return parts

    def _follow(self, save: Save, give_up_at: float) -> None:
        status = self._way.until(
            max(0.0, give_up_at - self._cluster.baton.now),
            lambda ledger: ledger.save_status(RUN, save.name),
            lambda status: status.status != "pending",
        )
        self._cluster.truth.told(status)
        match status.status:
            case "aborted":
                raise Conflict(f"save {save.name} was called off")
            case "fenced":
                raise Fenced(f"save {save.name} came too late")
            case "pending":
                raise Unavailable(f"save {save.name} was not committed in time")

    def _call_off(self, save: Save, error: CkptdError) -> None:
        if isinstance(error, Fenced):
            return
        request = AbortRequest(generation=save.generation, reason=describe(error)[:1000])
        try:
            self._way.do(lambda ledger: ledger.abort(RUN, save.name, request))
        except CkptdError as second:
            error.add_note(f"and calling the save off failed: {describe(second)}")

    def _insist(self, call: Callable[[], None], give_up_at: float) -> None:
        baton = self._cluster.baton
        while True:
            try:
                return call()
            except Unavailable:
                if baton.now >= give_up_at:
                    raise
            baton.pause(RETRY_SECONDS)

    def _put(self, key: str, data: bytes) -> None:
        def put() -> None:
            try:
                self._storage.put(key, [data], len(data))
            except AlreadyExists:
                if self._storage.get(key, len(data)) != data:
                    raise

        self._cluster.again(put, seconds=PUT_SECONDS, tries=WRITE_TRIES)

    @property
    def _storage(self) -> Storage:
        return self._way.ledger.storage
