"""What a soak asks of a log beside its rules: who is answerable for what became of each checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd import history, layout
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.lineage import CRASH_LOOP_STARTS
from ckptd.retention import Policy
from ckptd.second import read_here
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.soak_custody import Custody
from ckptd.testing.soak_journal import Journal, Tally
from ckptd.verdicts import ACCEPTED
from tests.core.by_hand import (
    RUN,
    B,
    C,
    HandLog,
    a_ledger,
    beginning,
    live,
    opened,
    opening,
    overwrite,
    quarantined,
    save,
    started,
    write_save,
)

HOLD_SECONDS = 5.0
FAR_AWAY = 1e11  # in seconds since the epoch
ONE, TWO, THREE = (save(1, step) for step in (1, 2, 3))


@pytest.fixture
def ledger() -> Ledger:
    """A run with commits of steps 1 to 3."""
    ledger = a_ledger(MemoryStorage())
    live(ledger)
    for step in (1, 2, 3):
        ledger.commit(RUN, write_save(ledger.storage, 1, step))
    return ledger


@pytest.fixture
def keeper(ledger: Ledger) -> Keeper:
    return Keeper(ledger, reader=read_here)


@pytest.fixture
def custody(ledger: Ledger) -> Custody:
    return Custody(ledger.storage, RUN, hold_seconds=HOLD_SECONDS)


def tally_of(folder: Path, *meant: tuple[str, str], told: tuple[tuple[str, str, str, float], ...] = ()) -> Tally:
    """What a process means to decide, and what it was told."""
    with Journal(folder / "one.jsonl") as journal:
        for step in (1, 2, 3):
            journal.durable(RUN, save(1, step), f"rid {step}")
        for verb, name in meant:
            journal.means(RUN, verb, name, "ann")
        for verb, name, who, at in told:
            journal.told(RUN, verb, name, who, at)
    tally = Tally(folder)
    tally.read_on()
    return tally


def begin(ledger: Ledger, attempt: str) -> None:
    ledger.open(RUN, opening(attempt))
    ledger.begin(RUN, beginning(attempt))


def test_every_checkpoint_is_somewhere(ledger: Ledger, keeper: Keeper, custody: Custody, tmp_path: Path) -> None:
    keeper.rollback(RUN, TWO, who="ann", reason="")
    keeper.quarantine(RUN, TWO, who="ann", reason="")
    begin(ledger, B)
    assert list(custody.check(tally_of(tmp_path, ("rollback", TWO), ("quarantine", TWO)))) == []
    assert custody.fates() == {ONE: "on the line", TWO: "in quarantine", THREE: "left by a roll-back"}
    keeper.reinstate(RUN, TWO, who="ann", reason="")
    tally = tally_of(tmp_path, ("reinstate", TWO))
    assert list(custody.check(tally)) == []
    assert custody.fates()[TWO] == "passed over in quarantine"
    keeper.rollback(RUN, THREE, who="ann", reason="")  # all of it is back
    assert list(custody.check(tally_of(tmp_path, ("rollback", THREE)))) == []
    assert set(custody.fates().values()) == {"on the line"}


def test_what_nobody_wanted_is_found(keeper: Keeper, custody: Custody, tmp_path: Path) -> None:
    keeper.quarantine(RUN, THREE, who="a ghost", reason="")
    keeper.reinstate(RUN, THREE, who="a ghost", reason="")
    keeper.rollback(RUN, ONE, who="a ghost", reason="")
    found = [finding.partition(": ")[2] for finding in custody.check(tally_of(tmp_path))]
    assert found == [
        f"{THREE} is in quarantine by hand, and nobody wanted it",
        f"{THREE} is out of quarantine, and nobody wanted it",
        f"a roll-back to {ONE}, and nobody wanted it",
    ]


def test_what_was_told_and_did_not_happen_is_found(keeper: Keeper, custody: Custody, tmp_path: Path) -> None:
    keeper.pin(RUN, TWO, "bob")
    keeper.hold(RUN, TWO, "bob")
    verbs = ("pin", "hold", "quarantine", "rollback")
    told = (*((verb, ONE, "ann", 0.0) for verb in verbs), ("unpin", TWO, "bob", 0.0), ("release", TWO, "bob", 0.0))
    found = list(custody.check(tally_of(tmp_path, told=told)))
    assert found == [
        f"{ONE} was pinned for ann, and is not any more",
        f"{ONE} was held for ann, and is not any more: never released",
        f"{ONE} was put into quarantine by ann, and no record says so",
        f"the run was rolled back to {ONE} by ann, and no record says so",
        f"{TWO} was unpinned for bob, and is pinned",
        f"{TWO} was released for bob, and is held",
    ]


def test_a_hold_ends_by_its_readers_word_or_silence(keeper: Keeper, custody: Custody, tmp_path: Path) -> None:
    """Three holds that ended: too early, after a long silence, and as the reader wanted it."""
    for who in ("early", "late", "ann"):
        keeper.hold(RUN, ONE, who)
        keeper.release(RUN, ONE, who)
    told = (("hold", ONE, "early", FAR_AWAY), ("hold", ONE, "late", 0.0), ("hold", ONE, "ann", FAR_AWAY))
    found = list(custody.check(tally_of(tmp_path, ("release", ONE), told=told)))
    assert len(found) == 1
    assert found[0].startswith(f"{ONE} was held for early, and is not any more: -")
    assert custody.silenced == 2


def test_a_quarantine_for_damage_needs_damage(ledger: Ledger, custody: Custody, tmp_path: Path) -> None:
    HandLog(ledger.storage).add(quarantined(THREE))
    found = list(custody.check(tally_of(tmp_path)))
    assert [finding.partition(": ")[2] for finding in found] == [
        f"{THREE} is in quarantine for damage, and nobody damaged it"
    ]


def test_a_crash_loop_is_counted_and_no_finding(ledger: Ledger, custody: Custody, tmp_path: Path) -> None:
    for number in range(CRASH_LOOP_STARTS + 1):
        begin(ledger, f"{number:032x}")
    assert list(custody.check(tally_of(tmp_path))) == []
    assert custody.grounds == {"crash-loop": 1}
    assert custody.fates()[THREE] == "in quarantine"


def test_what_is_in_quarantine_by_hand_loses_no_byte(
    ledger: Ledger, keeper: Keeper, custody: Custody, tmp_path: Path
) -> None:
    keeper.quarantine(RUN, TWO, who="ann", reason="")
    tally = tally_of(tmp_path, ("quarantine", TWO))
    assert list(custody.check(tally)) == []
    key = ledger.manifest(ledger.checkpoint_at(RUN, 2).manifest).objects()[0].key
    overwrite(ledger.storage, key, b"other")
    assert list(custody.check(tally)) == [f"{key} of {TWO} is damaged, and {TWO} is in quarantine, not retired"]


def test_what_is_purged_is_gone(ledger: Ledger, keeper: Keeper, custody: Custody, tmp_path: Path) -> None:
    for name in (TWO, THREE):
        keeper.verify(RUN, name)
    assert len(keeper.retire(RUN, Policy(keep_last=2))) == 1
    assert keeper.collect(RUN).purged == (ONE,)
    tally = tally_of(tmp_path)
    assert list(custody.check(tally)) == []
    assert custody.fates()[ONE] == "retired"
    key = f"{layout.payload_folder(RUN, ONE)}/0-{layout.new_nonce()}.safetensors"
    ledger.storage.put(key, [b"back"], 4)
    assert list(custody.check(tally)) == [f"{ONE} is purged, and there is {[key]}"]


def test_what_was_collected_leaves_nothing(ledger: Ledger, keeper: Keeper, custody: Custody, tmp_path: Path) -> None:
    lost = write_save(ledger.storage, 1, 4)
    begin(ledger, B)
    assert list(custody.check(tally_of(tmp_path))) == []
    assert [left.partition(" ")[0] for left in custody.leftovers(set())] == [lost.save]
    keeper.collect(RUN)
    assert list(custody.leftovers(set())) == []


def test_a_start_from_an_older_checkpoint_is_found_though_readers_let_it_count(
    ledger: Ledger, custody: Custody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weakened reader: to it everything counts."""
    HandLog(ledger.storage).add(opened(C), started(2, C, ONE))
    monkeypatch.setattr(history, "judge", lambda state, body: ACCEPTED)
    found = [finding.partition(": ")[2] for finding in custody.check(tally_of(tmp_path))]
    assert sorted(found) == [f"a start left {name} behind, which was valid" for name in (TWO, THREE)]
