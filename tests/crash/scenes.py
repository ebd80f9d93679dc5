"""The operations that are killed at every system call: what was before, what is asked, and what must be after.

Add an operation by adding a line to `SCENES`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptd import layout
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest, ManifestRef, ObjectRef
from ckptd.records import Damage
from ckptd.retention import Policy
from ckptd.second import Reading, read_here
from ckptd.storage import init_root, publish
from ckptd.storage.base import Buffer, Storage
from ckptd.storage.local import LocalStorage
from ckptd.wire import AbortRequest, CommitRequest, DamageReport
from tests.core.by_hand import (
    ME,
    OTHER,
    RUN,
    A,
    B,
    a_ledger,
    beginning,
    content,
    live,
    opening,
    save,
    write_save,
)

Do = Callable[[Ledger], object]
LARGE_BYTES = 16 * mmap.PAGESIZE
SAVE_10, SAVE_20, SAVE_30, SAVE_40 = (save(1, step) for step in (10, 20, 30, 40))


def ledger_at(root: Path) -> Ledger:
    """A ledger of this process, which has seen nothing yet. Its deadlines pass only while it pauses."""
    return a_ledger(LocalStorage(root))


@dataclass(frozen=True)
class Scene:
    """`before` makes the run as it is when the operation comes; `do` asks, the same every time; `rid` is the record
    it makes, `acknowledged` and `damaged` are the saves that were told durable, or damaged on purpose, before. A new
    start resumes from `steps[0]` or `steps[1]` while the operation is not acknowledged, from `steps[1]` after."""

    name: str
    do: Do
    rid: str
    before: Do
    steps: tuple[int | None, int | None] = (20, 20)
    acknowledged: tuple[str, ...] = (SAVE_10, SAVE_20)
    damaged: tuple[str, ...] = ()
    becomes: str | None = None  # the save that is durable once the operation is acknowledged
    every: bool = False  # whether `make test` tries every point of it, too
    on_drive: bool = False  # whether it is about what a drive has, and memory has not

    def prepare(self, root: Path) -> None:
        init_root(str(root))
        self.before(ledger_at(root))


def _saves(*steps: int) -> Do:
    def run(ledger: Ledger) -> None:
        live(ledger)
        for step in steps:
            ledger.commit(RUN, write_save(ledger.storage, 1, step))

    return run


_two_saves = _saves(10, 20)


def _then(*more: Do, saves: Do = _two_saves) -> Do:
    def run(ledger: Ledger) -> None:
        saves(ledger)
        for step in more:
            step(ledger)

    return run


def _save(ledger: Ledger) -> None:
    """As a client saves, and as it looks before it tries again."""
    if ledger.save_status(RUN, SAVE_30).status != "durable":
        ledger.commit(RUN, write_save(ledger.storage, 1, 30))


def large_payload(save: str) -> list[Buffer]:
    """A payload that this process writes as large ones are: its begin and end through the cache, the middle past it,
    by another thread."""
    vars(publish)["LARGE_BYTES"] = LARGE_BYTES
    memory = mmap.mmap(-1, LARGE_BYTES)
    memory[:] = bytes(range(256)) * (LARGE_BYTES // 256)
    return [b"x" * mmap.PAGESIZE, memoryview(memory), content(save, 0)]


def _save_large(ledger: Ledger) -> None:
    """As `_save`."""
    if ledger.save_status(RUN, SAVE_30).status != "durable":
        request = write_save(ledger.storage, 1, 30, writers=1, chunks=large_payload(SAVE_30))
        ledger.commit(RUN, request)


def _written(ledger: Ledger) -> CommitRequest:
    """The save of step 30, as it lies there before its commit."""
    folder = layout.manifest_folder(RUN, SAVE_30)
    (name,) = (name for name in ledger.storage.list(folder) if name.startswith("manifest-"))
    data = ledger.storage.get(f"{folder}/{name}", 1 << 20)
    return request_of(data)


def request_of(data: bytes) -> CommitRequest:
    """The commit request for the stored bytes of a manifest."""
    manifest = Manifest.model_validate_json(data)
    return CommitRequest(
        generation=manifest.generation,
        save=manifest.save,
        step=manifest.step,
        writers=len(manifest.parts),
        manifest=ManifestRef.of(manifest, data),
    )


def payload_of(ledger: Ledger, name: str) -> str:
    """The key of the first payload object of a save."""
    folder = layout.payload_key(RUN, name, 0, "").rpartition("/")[0]
    return f"{folder}/{ledger.storage.list(folder)[0]}"


def _spoil(ledger: Ledger) -> None:
    """A byte of the newest checkpoint turns over on the drive."""
    assert isinstance(ledger.storage, LocalStorage)
    path = Path(ledger.storage.root, payload_of(ledger, SAVE_20))
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.unlink()
    path.write_bytes(data)


def _report(ledger: Ledger) -> None:
    damage = Damage(object=payload_of(ledger, SAVE_20), expected="a digest", observed="another")
    assert ledger.report_damage(RUN, DamageReport(save=SAVE_20, damage=damage, reader=ME)).confirmed


def _keeper(ledger: Ledger) -> Keeper:
    return Keeper(ledger, reader=a_verifier)


def a_verifier(storage: Storage, ref: ObjectRef | ManifestRef) -> Reading:
    """Stands for the process that verifies; the reading itself is real."""
    return Reading(reader=OTHER.model_copy(update={"process": "the verifier"}), damage=read_here(storage, ref).damage)


def _verify(*steps: int) -> Do:
    def run(ledger: Ledger) -> None:
        for step in steps:
            assert _keeper(ledger).verify(RUN, save(1, step)) is None

    return run


OPEN_B: Do = lambda ledger: ledger.open(RUN, opening(B))  # noqa: E731
BEGIN_B: Do = lambda ledger: ledger.begin(RUN, beginning(B)).generation  # noqa: E731
FOUR = _saves(10, 20, 30, 40)
RETIRE: Do = lambda ledger: _keeper(ledger).retire(RUN, Policy(keep_last=2))  # noqa: E731
GIVE_UP_20: Do = lambda ledger: _keeper(ledger).quarantine(RUN, SAVE_20, who="ann", reason="it diverges")  # noqa: E731

SCENES = [
    Scene("create", lambda ledger: ledger.open(RUN, opening(A)), f"open:{A}", lambda ledger: None, (None, None), ()),
    Scene("open", OPEN_B, f"open:{B}", _two_saves),
    Scene("begin", BEGIN_B, f"begin:{B}:0", _then(OPEN_B), every=True),
    Scene("ready", lambda ledger: ledger.ready(RUN, B, 2), f"ready:{B}:2", _then(OPEN_B, BEGIN_B)),
    Scene("save", _save, f"commit:{SAVE_30}:", _two_saves, (20, 30), becomes=SAVE_30),
    Scene(
        "large save",
        _save_large,
        f"commit:{SAVE_30}:",
        _two_saves,
        (20, 30),
        becomes=SAVE_30,
        on_drive=True,
    ),
    Scene(
        "commit",
        lambda ledger: ledger.commit(RUN, _written(ledger)),
        f"commit:{SAVE_30}:",
        _then(lambda ledger: write_save(ledger.storage, 1, 30)),
        (20, 30),
        becomes=SAVE_30,
        every=True,
    ),
    Scene(
        "abort",
        lambda ledger: ledger.abort(RUN, SAVE_30, AbortRequest(generation=1, reason="the disk is full")),
        f"abort:{SAVE_30}",
        _two_saves,
    ),
    Scene(
        "quarantine",
        _report,
        f"quarantine:{SAVE_20}",
        _then(_spoil),
        (20, 10),
        damaged=(SAVE_20,),
    ),
    Scene("verify", _verify(20), f"verify:{SAVE_20}:0", _two_saves),
    Scene(
        "pin",
        lambda ledger: _keeper(ledger).pin(RUN, SAVE_10, "ann"),
        f"pin:{SAVE_10}:ann:0",
        _two_saves,
    ),
    Scene("give up", GIVE_UP_20, f"quarantine:{SAVE_20}:0", _two_saves, (20, 10)),
    Scene(
        "reinstate",
        lambda ledger: _keeper(ledger).reinstate(RUN, SAVE_20, who="ann", reason="it does not"),
        f"quarantine:{SAVE_20}:1",
        _then(GIVE_UP_20),
        (10, 20),
    ),
    Scene(
        "roll back",
        lambda ledger: _keeper(ledger).rollback(RUN, SAVE_10, who="ann", reason="it diverges"),
        "rollback:0",
        _two_saves,
        (20, 10),
    ),
    Scene("retire", RETIRE, "retire:0", _then(_verify(30, 40), saves=FOUR), (40, 40), (SAVE_30, SAVE_40), every=True),
    Scene(
        "collect",
        lambda ledger: _keeper(ledger).collect(RUN),
        "purge:0",
        _then(_verify(30, 40), RETIRE, saves=FOUR),
        (40, 40),
        (SAVE_30, SAVE_40),
        every=True,
    ),
]
