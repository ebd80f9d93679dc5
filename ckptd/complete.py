"""What makes a save complete: looked at before it is committed, and again before it is promised.

A glance reads the manifest and asks for the size of every object; it reads no payload. The ledger calls all of this.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptd import layout
from ckptd.errors import Corrupt, Invalid
from ckptd.lineage import is_valid
from ckptd.manifest import Manifest, ManifestRef, ObjectRef
from ckptd.reading import check_size, damage_of, read_manifest
from ckptd.records import CheckpointCommitted, Damage
from ckptd.state import Checkpoint, RunState
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
        borrows=manifest.borrows if manifest else (),
        borrowed_bytes=manifest.borrowed_bytes if manifest else 0,
    )


def check_generation(save: str, generation: int) -> None:
    if layout.generation_of(save) != generation:
        raise Invalid(f"save {save} is not of generation {generation}", field="generation")


def check_complete(
    storage: Storage, run: str, request: CommitRequest, manifest: Manifest, checkpoints: Mapping[str, Checkpoint]
) -> None:
    """The manifest is that of the request, and every object is there in its full size, also those of the
    `checkpoints` that it borrows from. `Invalid`, `Corrupt`."""
    named = (manifest.run, manifest.generation, manifest.save, manifest.step, len(manifest.parts))
    asked = (run, request.generation, request.save, request.step, request.writers)
    if named != asked:
        raise Invalid(f"the manifest {request.manifest.key} is of {named}, the commit of {asked}", run=run)
    for lender in manifest.borrows:
        if lender in checkpoints:  # else the rules say so
            _check_lender(storage, run, manifest, checkpoints[lender])
    for ref in manifest.objects():
        check_size(storage, ref)


def _check_lender(storage: Storage, run: str, manifest: Manifest, lender: Checkpoint) -> None:
    """What is borrowed is what the lender wrote itself, to the digest."""
    written = read_manifest(storage, lender.manifest).written()
    for key, (save, ref) in manifest.borrowed().items():
        if save == lender.save and ref not in written:
            raise Invalid(
                f"{manifest.save} borrows {key}, which is not among the objects that {save} wrote",
                do="Borrow from the save that wrote it, with the size and digests of its manifest; or write in full.",
                run=run,
                object=key,
            )


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


def sharing(storage: Storage, state: RunState, ref: ObjectRef | ManifestRef) -> list[str]:
    """The valid checkpoints that need an object: of the save that wrote it, and of those that borrow from that. One
    whose manifest cannot be read is left to its own finding."""
    owner = layout.save_of(ref.key)
    found = []
    for checkpoint in state.checkpoints.values():
        if not is_valid(state, checkpoint.save) or owner not in (checkpoint.save, *checkpoint.borrows):
            continue
        try:
            needs = ref in read_manifest(storage, checkpoint.manifest).objects()
        except Corrupt as error:
            if damage_of(error) is None:
                raise
            continue
        if needs:
            found.append(checkpoint.save)
    return found
