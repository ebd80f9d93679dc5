"""What makes a save complete: looked at before it is committed, and again before it is promised.

A glance reads the manifest and asks for the size of every object; it reads no payload. The ledger calls all of this.
"""

from __future__ import annotations

from ckptd import layout
from ckptd.errors import Corrupt, Invalid
from ckptd.manifest import Manifest, ManifestRef, ObjectRef
from ckptd.reading import check_size, damage_of, read_manifest
from ckptd.records import CheckpointCommitted, Damage
from ckptd.state import Checkpoint
from ckptd.storage.base import Storage
from ckptd.wire import CommitRequest


def commit_body(run: str, request: CommitRequest, manifest: Manifest | None) -> CheckpointCommitted:
    """The record that a request asks for; without the manifest only its rid is right. `Invalid` if the request
    contradicts itself."""
    expected_key = layout.manifest_key(run, request.save, request.manifest.sha256)
    if request.manifest.key != expected_key:
        raise Invalid(f"manifest key {request.manifest.key!r}: expected {expected_key}", field="manifest.key")
    check_generation(request.save, request.generation)
    if layout.step_of(request.save) != request.step:
        raise Invalid(f"save {request.save} is not of step {request.step}", field="step")
    return CheckpointCommitted(
        generation=request.generation,
        save=request.save,
        step=request.step,
        manifest=request.manifest,
        payload_bytes=manifest.payload_bytes if manifest else 0,
        writers=request.writers,
        metrics=manifest.metrics if manifest else {},
    )


def check_generation(save: str, generation: int) -> None:
    if layout.generation_of(save) != generation:
        raise Invalid(f"save {save} is not of generation {generation}", field="generation")


def check_complete(storage: Storage, run: str, request: CommitRequest, manifest: Manifest) -> None:
    """The manifest is that of the request, and every object is there in its full size. `Invalid`, `Corrupt`."""
    named = (manifest.run, manifest.generation, manifest.save, manifest.step, len(manifest.parts))
    asked = (run, request.generation, request.save, request.step, request.writers)
    if named != asked:
        raise Invalid(f"the manifest {request.manifest.key} is of {named}, the commit of {asked}", run=run)
    for ref in manifest.objects():
        check_size(storage, ref)


def glance(storage: Storage, checkpoint: Checkpoint) -> Damage | None:
    """What is evidently wrong with a checkpoint: its manifest, or an object that is gone or cut."""
    try:
        for ref in read_manifest(storage, checkpoint.manifest).objects():
            check_size(storage, ref)
    except Corrupt as error:
        damage = damage_of(error)
        if damage is None:
            raise
        return damage
    return None


def object_of(storage: Storage, checkpoint: Checkpoint, key: str) -> ObjectRef | ManifestRef:
    """What the checkpoint says about the object a reader complained about."""
    if key == checkpoint.manifest.key:
        return checkpoint.manifest
    for ref in read_manifest(storage, checkpoint.manifest).objects():
        if ref.key == key:
            return ref
    raise Invalid(f"{key!r} is no object of checkpoint {checkpoint.save}", field="damage.object")
