"""What a checkpoint consists of: one object per writer, and the manifest that lists them all.

A manifest is found through the commit record, which carries its key, size and sha256; it carries in turn
the size and the digest of every chunk of every object. So one committed record vouches for every byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from ckptd import layout
from ckptd.digests import PAYLOAD_DIGEST, canonical_json, chunk_count, sha256_hex

FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
MAX_BORROWS = 100  # saves whose objects one checkpoint references: each is one more that its fate hangs on
NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _read_float(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def _write_float(value: float) -> float | str:
    if value != value:
        return "NaN"
    return value if value not in (float("inf"), float("-inf")) else ("Infinity" if value > 0 else "-Infinity")


# A diverged loss is worth recording, and JSON has no word for it.
Metric = Annotated[float, BeforeValidator(_read_float), PlainSerializer(_write_float)]
MetricName = Annotated[str, Field(max_length=64)]
Metrics = Annotated[dict[MetricName, Metric], Field(max_length=64)]
Step = Annotated[int, Field(ge=0, le=layout.MAX_STEP)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SaveId = Annotated[str, Field(pattern=f"^{layout.SAVE_ID.pattern}$")]
ContractValue = bool | int | float | str
Tree = Any  # JSON; it goes around pydantic, which takes seconds for a hundred thousand tensors
TREES = frozenset({"shared", "per_rank"})
Writer = Annotated[int, Field(ge=0, lt=layout.MAX_WRITERS)]


class Frozen(BaseModel):
    """Strict and immutable; unknown keys are ignored, so a younger version may add some."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    def stored(self) -> bytes:
        """The canonical bytes of this value."""
        return canonical_json(self.model_dump(mode="json"))


class ObjectRef(Frozen):
    """One payload object: where it lies, its size in bytes, and the digest of each chunk."""

    key: Annotated[str, Field(max_length=1024)]
    size: Annotated[int, Field(ge=0)]
    digest: str = PAYLOAD_DIGEST
    chunk_bytes: Annotated[int, Field(gt=0)]
    chunks: tuple[str, ...]

    @model_validator(mode="after")
    def _one_digest_per_chunk(self) -> Self:
        expected = chunk_count(self.size, self.chunk_bytes)
        if len(self.chunks) != expected:
            raise ValueError(f"{self.size} bytes are {expected} chunks, found {len(self.chunks)} digests")
        return self


class Borrowed(Frozen):
    """Tensors that did not change since an earlier save of the run: `names` of them lie in an `object` that `save`
    wrote itself. Always the save that holds the bytes, never one that borrowed them."""

    save: SaveId
    object: ObjectRef
    names: Annotated[tuple[str, ...], Field(min_length=1)]


class Part(Frozen):
    """What one writer wrote for one save, or why it could not. `shared` and `per_rank` are state trees
    (see `ckptd_client.state`); the core stores them and never looks inside. `borrowed` is what it left unwritten.
    `form` is a digest of what the shared state consists of, told by writers that each write a part of it."""

    version: int = FORMAT
    run: str
    generation: Annotated[int, Field(gt=0)]
    save: SaveId
    step: Step
    writer: Writer
    payload: ObjectRef | None = None
    borrowed: tuple[Borrowed, ...] = ()
    shared: Tree = None
    per_rank: Tree = None
    form: Annotated[str, Field(max_length=64)] = ""
    error: Annotated[str, Field(max_length=2000)] | None = None

    def content(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {**self.model_dump(mode="json", exclude=set(TREES)), "shared": self.shared, "per_rank": self.per_rank}

    def stored(self) -> bytes:
        return canonical_json(self.content())


class Manifest(Frozen):
    """The whole checkpoint. `parts[i]` is writer i's; `contract` tells the conditions it was saved under, for
    whoever loads it to compare (see `ckptd_client.contract`). The core only keeps and shows it."""

    version: int = FORMAT
    run: str
    generation: Annotated[int, Field(gt=0)]
    save: SaveId
    step: Step
    world: Annotated[int, Field(gt=0)]
    metrics: Metrics = {}
    contract: dict[str, ContractValue] = {}
    producer: Annotated[str, Field(max_length=200)] = ""
    parts: tuple[Part, ...]

    @model_validator(mode="after")
    def _parts_belong_together(self) -> Self:
        for index, part in enumerate(self.parts):
            if part.error is not None or part.payload is None:
                raise ValueError(f"part {index} is a failed one: {part.error}")
            mine = (part.run, part.generation, part.save, part.step, part.writer)
            if mine != (self.run, self.generation, self.save, self.step, index):
                raise ValueError(f"part {index} belongs elsewhere: {mine}")
            folder = layout.payload_key(self.run, self.save, index, "").removesuffix(".safetensors")
            name = part.payload.key.removeprefix(folder)
            if name == part.payload.key or "/" in name:
                raise ValueError(f"part {index} names an object outside its place: {part.payload.key}")
        return self

    @model_validator(mode="after")
    def _borrowed_objects_are_where_they_should_be(self) -> Self:
        known: dict[str, ObjectRef] = {}
        for part in self.parts:
            for borrowed in part.borrowed:
                ref, folder = borrowed.object, f"{layout.payload_folder(self.run, borrowed.save)}/"
                name = ref.key.removeprefix(folder)
                if borrowed.save == self.save or name == ref.key or "/" in name:
                    raise ValueError(f"part {part.writer} borrows {ref.key}, which is no object of {borrowed.save}")
                if known.setdefault(ref.key, ref) != ref:
                    raise ValueError(f"{ref.key} is borrowed twice, with other sizes or digests")
        if len(self.borrows) > MAX_BORROWS:
            raise ValueError(f"it borrows from {len(self.borrows)} saves, at most {MAX_BORROWS} are allowed")
        return self

    def stored(self) -> bytes:
        parts = [part.content() for part in self.parts]
        return canonical_json({**self.model_dump(mode="json", exclude={"parts"}), "parts": parts})

    def written(self) -> list[ObjectRef]:
        """The objects that this save wrote itself."""
        return [part.payload for part in self.parts if part.payload is not None]

    def borrowed(self) -> dict[str, tuple[SaveId, ObjectRef]]:
        """The objects of earlier saves that are needed too, each once, by key, and whose they are."""
        return {item.object.key: (item.save, item.object) for part in self.parts for item in part.borrowed}

    def objects(self) -> Sequence[ObjectRef]:
        """All objects that loading needs: what was written, then what is borrowed."""
        return [*self.written(), *(ref for _, ref in self.borrowed().values())]

    @property
    def borrows(self) -> tuple[SaveId, ...]:
        """The saves that objects are borrowed from, sorted."""
        return tuple(sorted({item.save for part in self.parts for item in part.borrowed}))

    @property
    def payload_bytes(self) -> int:
        """What this save wrote itself."""
        return sum(ref.size for ref in self.written())

    @property
    def borrowed_bytes(self) -> int:
        """The size of the objects of earlier saves that are needed too."""
        return sum(ref.size for _, ref in self.borrowed().values())


class ManifestRef(Frozen):
    """Where a manifest lies and what its bytes must be."""

    key: Annotated[str, Field(max_length=1024)]
    size: Annotated[int, Field(gt=0, le=MAX_MANIFEST_BYTES)]
    sha256: Sha256

    @classmethod
    def of(cls, manifest: Manifest, data: bytes) -> ManifestRef:
        digest = sha256_hex(data)
        return cls(key=layout.manifest_key(manifest.run, manifest.save, digest), size=len(data), sha256=digest)
