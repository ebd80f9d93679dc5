"""Two hosts on one shared drive, each with memories of its own, a minute old, and with troubles of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptd import layout, second
from ckptd.errors import CkptdError, Conflict, Fenced, Unavailable, Unreachable
from ckptd.ledger import Ledger
from ckptd.manifest import ObjectRef
from ckptd.reading import observe
from ckptd.second import this_process
from ckptd.storage import init_root
from ckptd.storage.local import LocalStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.passthrough import Mount, Trouble
from ckptd.wire import DamageReport
from tests.core.by_hand import RUN, a_ledger, beginning, live, opening, save, write_save

ROUNDS = 6


@dataclass
class Drive:
    """The folder itself, and two hosts' views of it."""

    folder: Path
    one: Mount
    two: Mount
    told: list[str] = field(default_factory=list)

    def storage(self, host: Mount) -> LocalStorage:
        return LocalStorage(host.path / "root")

    def ledger(self, host: Mount) -> Ledger:
        return a_ledger(self.storage(host))

    def audit(self) -> None:
        """As the folder is, and as each host sees it."""
        for root in (self.folder, self.one.path, self.two.path):
            Auditor(LocalStorage(root / "root"), RUN).assert_clean(acknowledged=self.told)

    def remember(self, host: Mount, slots: int = 12) -> None:
        """The host looks for names that are not there yet, as a reader at the end of a log does, and remembers it."""
        for slot in range(1, slots):
            os.path.exists(host.path / "root" / layout.log_key(RUN, slot))


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    folder = tmp_path / "folder"
    folder.mkdir()
    init_root(str(folder / "root"))
    with Mount(folder, tmp_path / "one") as one, Mount(folder, tmp_path / "two") as two:
        yield Drive(folder, one, two)


def commit(drive: Drive, ledger: Ledger, generation: int, step: int) -> None:
    request = write_save(ledger.storage, generation, step)
    ledger.commit(RUN, request)
    drive.told.append(request.save)


def payload_of(drive: Drive, name: str) -> str:
    folder = layout.payload_folder(RUN, name)
    return f"{folder}/{LocalStorage(drive.folder / 'root').list(folder)[0]}"


def test_the_mounts_remember(drive: Drive) -> None:
    """Else the tests below would prove nothing."""
    path = drive.two.path / "root" / "new"
    assert not path.exists()
    (drive.folder / "root" / "new").write_bytes(b"x")
    assert "new" in os.listdir(path.parent)
    assert not path.exists()


def test_S7_incarnations_that_alternate_between_hosts_see_what_the_other_was_told(drive: Drive) -> None:
    ledgers = [drive.ledger(drive.one), drive.ledger(drive.two)]
    for number in range(1, ROUNDS + 1):
        mine, other = ledgers[number % 2], (drive.one, drive.two)[(number + 1) % 2]
        drive.remember(other, slots=6 * number)
        attempt = layout.new_attempt()
        mine.open(RUN, opening(attempt))
        answer = mine.begin(RUN, beginning(attempt))
        assert answer.generation == number
        assert (answer.checkpoint.save if answer.checkpoint else None) == (drive.told[-1] if drive.told else None)
        mine.ready(RUN, attempt, number)
        commit(drive, mine, number, 10 * number)
        drive.remember(other, slots=6 * number + 4)
        commit(drive, mine, number, 10 * number + 5)
    drive.audit()


def test_S7_a_host_with_an_old_listing_finds_out_at_its_append(drive: Drive) -> None:
    """It remembers an empty log, and that there is no slot 1, 2, 3, ..: it is not told that the run is new."""
    one, two = drive.ledger(drive.one), drive.ledger(drive.two)
    live(one)
    folder = layout.segment_folder(RUN, 0)
    drive.two.order(Trouble("readdir", folder, stale=True))
    assert len(two.storage.list(folder)) == 4
    drive.remember(drive.two)
    for step in (10, 20, 30):
        commit(drive, one, 1, step)
    attempt = layout.new_attempt()
    two.open(RUN, opening(attempt))
    answer = two.begin(RUN, beginning(attempt))
    assert answer.checkpoint is not None
    assert answer.checkpoint.step == 30
    with pytest.raises(Fenced):
        one.commit(RUN, write_save(one.storage, 1, 40))
    drive.two.order()
    drive.audit()


def test_S7_a_host_that_remembers_an_empty_log_starts_nothing_from_zero(drive: Drive) -> None:
    (drive.folder / "root" / layout.log_folder(RUN)).mkdir(parents=True)
    two = drive.ledger(drive.two)
    drive.two.order(Trouble("readdir", "/log", stale=True))
    assert two.storage.list(layout.log_folder(RUN)) == []
    drive.remember(drive.two)
    one = drive.ledger(drive.one)
    live(one)
    commit(drive, one, 1, 10)
    attempt = layout.new_attempt()
    two.open(RUN, opening(attempt))
    answer = two.begin(RUN, beginning(attempt))
    assert (answer.answer, answer.generation) == ("found", 2)
    assert answer.checkpoint is not None
    assert answer.checkpoint.step == 10
    drive.two.order()
    drive.audit()


def test_A6_two_hosts_that_race_get_one_record_per_slot(drive: Drive) -> None:
    """In every round both begin and commit at the same time; who is refused is told so, and nobody is told NONE once
    something was committed."""
    ledgers = [Ledger(drive.storage(host)) for host in (drive.one, drive.two)]
    barrier = threading.Barrier(2, timeout=60)
    lock = threading.Lock()

    def incarnation(host: int, number: int) -> str:
        ledger, attempt = ledgers[host], layout.new_attempt()
        with lock:
            before = len(drive.told)
        barrier.wait()
        try:
            ledger.open(RUN, opening(attempt))
            answer = ledger.begin(RUN, beginning(attempt))
            assert answer.answer == "found" or not before
            ledger.ready(RUN, attempt, answer.generation)
            step = 10 * number + host
            request = write_save(ledger.storage, answer.generation, step)
            ledger.commit(RUN, request)
        except Conflict as error:
            return type(error).__name__
        except Fenced:
            return "Fenced"
        with lock:
            drive.told.append(request.save)
        return "durable"

    with ThreadPoolExecutor(2) as pool:
        for number in range(1, ROUNDS + 1):
            outcomes = list(pool.map(incarnation, (0, 1), (number, number)))
            assert "durable" in outcomes, outcomes
    told = drive.told
    drive.told = [max(told, key=layout.step_of)]
    drive.audit()
    counted = {checkpoint.save for checkpoint in ledgers[0].checkpoints(RUN)}
    assert set(told) <= counted


# Troubles of one host


def two_saves(drive: Drive) -> tuple[Ledger, Ledger]:
    one, two = drive.ledger(drive.one), drive.ledger(drive.two)
    live(one)
    commit(drive, one, 1, 10)
    commit(drive, one, 1, 20)
    return one, two


def begin(ledger: Ledger) -> int | None:
    attempt = layout.new_attempt()
    ledger.open(RUN, opening(attempt))
    answer = ledger.begin(RUN, beginning(attempt))
    return answer.checkpoint.step if answer.checkpoint else None


def test_T6_a_manifest_that_cannot_be_read_is_no_fresh_start(drive: Drive) -> None:
    two = two_saves(drive)[1]
    drive.two.order(Trouble("open", f"manifests/{save(1, 20)}/manifest-", error="EACCES"))
    with pytest.raises(Unreachable):
        begin(two)
    drive.two.order()
    assert begin(two) == 20
    drive.audit()


@pytest.mark.parametrize("operation", ["open", "read"])
def test_a_stale_handle_is_asked_for_once_more(drive: Drive, operation: str) -> None:
    two = two_saves(drive)[1]
    drive.two.order(Trouble(operation, f"manifests/{save(1, 20)}/manifest-", error="ESTALE", times=1))
    assert begin(two) == 20
    drive.audit()


@pytest.mark.parametrize("trouble", [{"mask": 1}, {"error": "EIO"}], ids=["wrong bits", "EIO"])
def test_I19_what_one_host_alone_sees_is_no_damage(drive: Drive, trouble: dict[str, int | str]) -> None:
    """A rank on host two cannot load; the second reading, by a process on host one, finds the object whole."""
    one, two = two_saves(drive)
    key = payload_of(drive, save(1, 20))
    (ref,) = (ref for ref in manifest_objects(one) if ref.key == key)
    drive.two.order(Trouble("read", key, **trouble))  # type: ignore[arg-type]
    damage = observe(two.storage, ref)
    assert damage is not None
    service = Ledger(one.storage)  # with the reader that it has in earnest
    answer = service.report_damage(RUN, DamageReport(save=save(1, 20), damage=damage, reader=this_process()))
    assert not answer.confirmed
    assert begin(one) == 20
    drive.two.order()
    assert observe(two.storage, ref) is None
    drive.audit()


def test_what_both_hosts_see_is_damage(drive: Drive) -> None:
    one, two = two_saves(drive)
    key = payload_of(drive, save(1, 20))
    (ref,) = (ref for ref in manifest_objects(one) if ref.key == key)
    for host in (drive.one, drive.two):
        host.order(Trouble("read", key, mask=1))
    damage = observe(two.storage, ref)
    assert damage is not None
    service = Ledger(one.storage)
    assert service.report_damage(RUN, DamageReport(save=save(1, 20), damage=damage, reader=this_process())).confirmed
    assert begin(two) == 10


def test_I22_a_second_reading_that_never_returns_is_given_up(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = two_saves(drive)
    key = payload_of(drive, save(1, 20))
    (ref,) = (ref for ref in manifest_objects(one) if ref.key == key)
    drive.two.order(Trouble("read", key, hang=True))
    monkeypatch.setattr(second, "DEADLINE_SECONDS", 2.0)
    with pytest.raises(Unavailable, match="took over 2 s"):
        second.read_in_new_process(two.storage, ref)
    assert begin(one) == 20


def test_a_mount_that_dies_under_a_read_is_unavailable(drive: Drive) -> None:
    """Reading and closing both fail then: the error is one that is waited out, whichever comes first."""
    _, two = two_saves(drive)
    key = payload_of(drive, save(1, 20))
    drive.two.order(Trouble("read", key, hang=True))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(two.storage.get, key, 1 << 20)
        drive.two.until_hanging()
        drive.two.kill()
        with pytest.raises(Unavailable):
            reading.result(60)


def test_a_host_whose_mount_dies_is_told_so_and_the_other_goes_on(drive: Drive) -> None:
    one, two = two_saves(drive)
    drive.two.kill()
    with pytest.raises(CkptdError):
        begin(two)
    assert begin(one) == 20
    drive.two.start()
    assert begin(drive.ledger(drive.two)) == 20
    drive.audit()


def manifest_objects(ledger: Ledger) -> list[ObjectRef]:
    point = ledger.latest(RUN).checkpoint
    assert point is not None
    return list(ledger.manifest(point.manifest).objects())
