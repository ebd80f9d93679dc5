"""Which bytes a load reads, from which objects, and that it ends when the storage does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd import layout
from ckptd.errors import Corrupt, Invalid, Unreachable
from ckptd.manifest import Borrowed, ObjectRef, Part
from ckptd.storage import init_root
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.passthrough import Mount, Trouble
from ckptd_client import CheckpointClient, payload
from ckptd_client.blank import Blank
from ckptd_client.bounded import Work, within
from ckptd_client.filling import fill
from ckptd_client.snapshot import HostSnapshot
from ckptd_client.sources import Names, Sources
from ckptd_client.state import Flat, flatten
from tests.client.ranks import Drive, Job, train
from tests.homes import spoil

EARLIER, SAVE = "g00000001-000000000001-r1", "g00000001-000000000002-r1"


def soon() -> float:
    return time.monotonic() + 60


# Some keys of app_state.


def big(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(30_000, generator=generator) for name in ("model", "ema", "moments")} | {"step": seed}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = payload.write.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "chunk_bytes", 16 * 1024)


def save(drive: Drive, seed: int) -> None:
    def life(client: CheckpointClient) -> None:
        client.restore(big(0))
        client.save(big(seed), step=seed, wait=True)

    Job(drive).run(life)


@pytest.mark.parametrize("only", ["ema", ["ema"], ("step", "ema")])
def test_a_part_alone_is_loaded_with_little_more_than_its_bytes(drive: Drive, small_chunks: None, only: Any) -> None:
    save(drive, 3)
    seen = drive.seen_by(0)
    with Job(drive).client() as client:
        found = client.latest()
        assert found is not None
        before = len(seen.history)
        state: Any = found.load(only)
        reads = [call for call in seen.history[before:] if call[0] == "read"]
    assert set(state) == ({only} if isinstance(only, str) else set(only))
    assert torch.equal(state["ema"], big(3)["ema"])
    ledger = drive.ledger()
    (ref,) = ledger.manifest(ledger.checkpoint_at("en-it", 3).manifest).objects()
    covering = 120_000 // (16 * 1024) + 2
    assert len(reads) <= 2 + covering < len(ref.chunks)  # the header twice, once with its chunk


def test_damage_elsewhere_is_no_matter_and_damage_there_is(drive: Drive, small_chunks: None) -> None:
    save(drive, 3)
    (path,) = drive.objects(3)
    spoil(path, at=-100)  # in the last tensor
    with Job(drive).client() as client:
        found = client.latest()
        assert found is not None
        for name in ("model", "ema"):
            state: Any = found.read_shared(name)
            assert torch.equal(state[name], big(3)[name])
        with pytest.raises(Corrupt) as caught:
            found.read_shared("moments")
    assert caught.value.fields["object"].endswith(path.name)


def test_a_key_that_is_not_there_is_refused_with_those_that_are(drive: Drive) -> None:
    train(drive, [3])
    with Job(drive).client() as client:
        found = client.latest()
        assert found is not None
        with pytest.raises(Invalid, match="the checkpoint of step 3 has no 'modell'") as caught:
            found.load(only=["modell", "epoch"])
    assert "It has model, optimizer" in caught.value.do


# Several objects.


def written(storage: MemoryStorage, flat: Flat, names: set[str], save: str, writer: int = 0) -> ObjectRef:
    """One object with some of the tensors."""
    some = Flat(flat.tree, {name: source for name, source in flat.tensors.items() if name in names})
    key = layout.payload_key("r", save, writer, layout.new_nonce())
    with HostSnapshot().capture([some]) as captured:
        return payload.write(storage, key, captured, chunk_bytes=4096)


def part(writer: int, **fields: Any) -> Part:
    return Part(run="r", generation=1, save=SAVE, step=2, writer=writer, **fields)


def load(storage: MemoryStorage, parts: list[Part], tree: Any) -> tuple[Any, list[str]]:
    """The state, and the keys of the objects that were read."""
    sources = Sources(storage, soon())
    names = Names(sources, parts)
    blank = Blank(tree, names.size_of)
    chunks = sources.chunks()
    names.put(blank.places())
    sources.arrange()
    fill(storage, chunks, soon())
    return blank.finished(), list(dict.fromkeys(item.ref.key for item, _ in chunks))


def test_tensors_are_taken_from_whatever_objects_hold_them() -> None:
    storage = MemoryStorage()
    state: dict[str, Any] = {name: torch.rand(500) for name in "abcdef"} | {"blob": b"x" * 999}
    flat = flatten(state, "shared")
    earlier = written(storage, flat, {"shared/c", "shared/d", "shared/blob"}, EARLIER)
    old = Borrowed(save=EARLIER, object=earlier, names=("shared/d", "shared/blob"))
    first = written(storage, flat, {"shared/a", "shared/c"}, SAVE)
    parts = [
        part(0, payload=first, borrowed=(old,), shared=flat.tree),
        part(1, payload=written(storage, flat, {"shared/b", "shared/e"}, SAVE, 1)),
        part(2, payload=written(storage, flat, {"shared/f"}, SAVE, 2)),
    ]
    found, read = load(storage, parts, flat.tree)
    assert all(torch.equal(found[name], state[name]) for name in "abcdef")
    assert found["blob"] == state["blob"]
    assert sorted(read) == sorted([earlier.key, *(each.payload.key for each in parts if each.payload)])


def test_only_as_many_headers_are_read_as_there_are_names_to_find() -> None:
    storage = MemoryStorage()
    flat = flatten({"a": torch.rand(5)}, "shared")
    first = written(storage, flat, {"shared/a"}, SAVE)
    missing = ObjectRef(key="runs/r/data/never", size=10, chunk_bytes=10, chunks=("00",))
    found, read = load(storage, [part(0, payload=first, shared=flat.tree), part(1, payload=missing)], flat.tree)
    assert torch.equal(found["a"].isfinite(), torch.ones(5, dtype=torch.bool))
    assert read == [first.key]


def test_a_name_that_no_object_holds_is_corrupt() -> None:
    storage = MemoryStorage()
    flat = flatten({"a": torch.rand(5), "b": torch.rand(5)}, "shared")
    only_a = written(storage, flat, {"shared/a"}, SAVE)
    borrowed = Borrowed(save=EARLIER, object=written(storage, flat, {"shared/a"}, EARLIER), names=("shared/b",))
    for parts in ([part(0, payload=only_a)], [part(0, payload=only_a, borrowed=(borrowed,))]):
        with pytest.raises(Corrupt, match="the payload has no tensor 'shared/b'"):
            load(storage, parts, flat.tree)


def test_few_tensors_of_a_borrowed_object_cost_few_of_its_chunks() -> None:
    storage = MemoryStorage()
    state = {name: torch.rand(20_000) for name in "abc"}
    flat = flatten(state, "shared")
    earlier = written(storage, flat, set(flat.tensors), EARLIER)
    sources = Sources(storage, soon())
    borrowed = Borrowed(save=EARLIER, object=earlier, names=("shared/b",))
    names = Names(sources, [part(0, payload=written(storage, flat, set(), SAVE), borrowed=(borrowed,))])
    assert names.size_of("shared/b") == 80_000
    chunks = [index for item, index in sources.chunks() if item.ref is earlier]
    assert len(chunks) <= 80_000 // 4096 + 3 < len(earlier.chunks) // 2


# A storage that does not answer.


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_read_that_hangs_ends_at_the_deadline_and_names_the_object(tmp_path: Path, operation: str) -> None:
    folder = tmp_path / "drive"
    folder.mkdir()
    init_root(f"file://{folder}/root")
    url = f"file://{folder}/root"
    with CheckpointClient(url, "r", rank=0, world_size=1) as client:
        client.restore({"w": torch.zeros(100_000)})
        client.save({"w": torch.ones(100_000)}, step=1, wait=True)
    with Mount(folder, tmp_path / "mount") as mount:
        client = CheckpointClient(f"file://{mount.path}/root", "r", rank=0, world_size=1, start_deadline_seconds=3.0)
        client.latest()
        mount.order(Trouble(operation, ".safetensors", hang=True))
        live: dict[str, object] = {"w": torch.zeros(100_000)}
        began = time.monotonic()
        with pytest.raises(Unreachable, match=r"not read in time: runs/r/data/.*\.safetensors") as caught:
            client.restore(live)
        assert 2 < time.monotonic() - began < 20
        assert "End this process" in caught.value.do
        mount.until_hanging()
        mount.kill()
    client.close()


def test_work_ends_with_the_first_error_when_all_have_stopped() -> None:
    work, stopped = Work(), []

    def fails() -> None:
        raise ValueError("planned")

    def waits() -> None:
        assert work.stop.wait(60)
        stopped.append(True)

    with pytest.raises(ValueError, match="planned"):
        work.run([waits, fails, waits], soon())
    assert stopped == [True, True]


def test_within_gives_the_result_or_the_error() -> None:
    assert within(soon(), "it", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(soon(), "it", lambda: 1 // 0)
