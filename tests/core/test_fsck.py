"""Checking a run as it is stored: each kind of damage is found where it is, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd import layout
from ckptd.errors import NotFound, Unavailable
from ckptd.fsck import FsckAnswer, fsck
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest
from ckptd.reading import read_manifest
from ckptd.retaining import RetainRequest, retain
from ckptd.storage.base import Storage
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.faulty import FaultyStorage
from tests.core.by_hand import RUN, B, HandLog, a_ledger, aborted, live, overwrite, save, write_payload, write_save


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def ledger(storage: MemoryStorage) -> Ledger:
    ledger = a_ledger(storage)
    live(ledger)
    for step in (1, 2, 3):
        ledger.commit(RUN, write_save(storage, 1, step))
    return ledger


def check(storage: Storage, *, deep: bool = False) -> FsckAnswer:
    """It may not change anything, whatever it finds."""

    def content() -> dict[str, bytes]:
        inner = storage.inner if isinstance(storage, FaultyStorage) else storage
        assert isinstance(inner, MemoryStorage)
        return {key: bytes(value) for key, value in inner._objects.items()}

    before = content()
    answer = fsck(storage, RUN, deep=deep)
    assert content() == before
    return answer


def found(answer: FsckAnswer) -> list[tuple[str, str]]:
    return [(finding.severity, finding.object) for finding in answer.findings]


def manifest(storage: Storage, ledger: Ledger, step: int) -> Manifest:
    return read_manifest(storage, ledger.checkpoint_at(RUN, step).manifest)


@pytest.mark.parametrize("deep", [False, True])
def test_a_healthy_run(storage: MemoryStorage, ledger: Ledger, deep: bool) -> None:
    answer = check(storage, deep=deep)
    assert answer.findings == ()
    assert not answer.damaged
    assert (answer.records, answer.checkpoints, answer.objects) == (ledger.state(RUN).seq, 3, 9)
    payload = sum(checkpoint.payload_bytes for checkpoint in ledger.checkpoints(RUN))
    assert answer.read_bytes == (payload if deep else 0)


def test_a_run_that_is_none(storage: MemoryStorage) -> None:
    with pytest.raises(NotFound, match="no run"):
        fsck(storage, RUN)


def test_an_error_of_the_storage_is_no_finding(storage: MemoryStorage, ledger: Ledger) -> None:
    faulty = FaultyStorage(storage)
    faulty.fail_before("size", ".safetensors")
    with pytest.raises(Unavailable):
        fsck(faulty, RUN)


@pytest.mark.parametrize(
    ("spoil", "detail"),
    [
        (lambda data: data[:-1], "expected the bytes that its sum is of"),
        (lambda data: data.replace(b'"actor"', b'"actoR"'), "expected the bytes that its sum is of"),
        (lambda data: b"x" * 70_000, "too long"),
        (lambda data: None, "the slot is empty"),
    ],
)
def test_a_damaged_slot_is_found_and_the_reading_goes_on_behind_it(
    storage: MemoryStorage, ledger: Ledger, spoil: Callable[[bytes], bytes | None], detail: str
) -> None:
    two, four = layout.log_key(RUN, 2), layout.log_key(RUN, 4)
    for key in (two, four):
        spoiled = spoil(storage.get(key, 1 << 20))
        storage.delete(key)
        if spoiled is not None:
            storage.put(key, [spoiled], len(spoiled))
    answer = check(storage)
    assert found(answer) == [("damage", two), ("damage", four)]
    assert all(detail in finding.detail for finding in answer.findings)


def test_a_broken_chain(storage: MemoryStorage, ledger: Ledger) -> None:
    """A slot holds a good record of another history."""
    other = MemoryStorage()
    live(a_ledger(other), B)
    key = layout.log_key(RUN, 3)
    overwrite(storage, key, other.get(key, 1 << 20))
    answer = check(storage)
    assert ("damage", key) in found(answer)
    assert "it chains to a record" in answer.findings[0].detail


def test_a_kind_that_a_later_version_wrote(storage: MemoryStorage, ledger: Ledger) -> None:
    slot = HandLog(storage).add(aborted(1, 9), kind="checkpoint-praised")
    answer = check(storage)
    assert found(answer) == [("damage", layout.log_key(RUN, slot))]
    assert "a record this version does not know" in answer.findings[0].detail


def test_a_name_that_is_no_slot_and_one_that_is_no_save(storage: MemoryStorage, ledger: Ledger) -> None:
    for key in ("log/0000.json", "log/00000000000001/0000000000000001.json", "manifests/notes/x", "data/notes/x"):
        storage.put(f"runs/{RUN}/{key}", [b"x"], 1)
    assert {severity for severity, _ in found(check(storage))} == {"strange"}
    assert len(check(storage).findings) == 4


def test_a_manifest_that_is_gone_or_other(storage: MemoryStorage, ledger: Ledger) -> None:
    keys = [ledger.checkpoint_at(RUN, step).manifest.key for step in (1, 2)]
    storage.delete(keys[0])
    overwrite(storage, keys[1], storage.get(keys[1], 1 << 20).replace(b"world", b"wOrld"))
    answer = check(storage)
    assert ("damage", keys[0]) in found(answer)
    assert ("damage", keys[1]) in found(answer)
    assert answer.damaged


@pytest.mark.parametrize("deep", [False, True])
def test_an_object_that_is_gone_cut_or_changed(storage: MemoryStorage, ledger: Ledger, deep: bool) -> None:
    gone, cut, changed = (manifest(storage, ledger, step).objects()[1].key for step in (1, 2, 3))
    storage.delete(gone)
    overwrite(storage, cut, storage.get(cut, 1 << 20)[:-1])
    data = bytearray(storage.get(changed, 1 << 20))
    data[20] ^= 1
    overwrite(storage, changed, bytes(data))
    answer = check(storage, deep=deep)
    assert found(answer) == [("damage", key) for key in ((gone, cut, changed) if deep else (gone, cut))]
    if deep:
        assert "chunk 1: expected " in answer.findings[2].detail


def test_damage_of_a_checkpoint_in_quarantine_is_known(storage: MemoryStorage, ledger: Ledger) -> None:
    key = manifest(storage, ledger, 3).objects()[0].key
    storage.delete(key)
    Keeper(ledger).quarantine(RUN, save(1, 3), who="ann", reason="")
    answer = check(storage)
    assert found(answer) == [("known", key)]
    assert not answer.damaged


def test_leftovers(storage: MemoryStorage, ledger: Ledger) -> None:
    lost = write_save(storage, 1, 4)
    answer = check(storage)
    assert {finding.save for finding in answer.findings} == {lost.save}
    assert all("not committed yet" in finding.detail for finding in answer.findings)
    live(ledger, B)
    assert all("its generation ended; 2 is the last" in finding.detail for finding in check(storage).findings)
    beside = write_payload(storage, save(1, 3), 0)  # a second try of a writer whose first one was committed
    assert ("leftover", beside.key) in found(check(storage))
    storage.put(f"runs/{RUN}/tmp/0123", [b"x"], 1)
    assert ("leftover", f"runs/{RUN}/tmp") in found(check(storage))
    assert not check(storage).damaged


def test_what_is_retired_may_be_there_or_not(storage: MemoryStorage, ledger: Ledger) -> None:
    faulty = FaultyStorage(storage)
    keeper = Keeper(a_ledger(faulty))
    faulty.fail_before("delete", ".safetensors")
    with pytest.raises(Unavailable):
        retain(keeper, RUN, RetainRequest(keep_last=2))
    answer = check(storage)
    assert {finding.severity for finding in answer.findings} == {"leftover"}
    assert {finding.detail for finding in answer.findings} == {"of a retired one: collection deletes it"}
    assert keeper.collect(RUN).purged == (save(1, 1),)
    assert check(storage).findings == ()
    write_payload(storage, save(1, 1), 0)
    assert [f.detail for f in check(storage).findings] == ["of a checkpoint whose bytes were collected"]
