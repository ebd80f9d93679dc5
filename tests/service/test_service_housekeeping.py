"""Housekeeping and scrubbing: what a pass does, what it leaves alone, and that its errors hurt nobody."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest
from fastapi import FastAPI

from ckptd import layout
from ckptd.errors import Conflict, Unavailable
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.retaining import verify
from ckptd.retention import Policy
from ckptd.service.app import create_app
from ckptd.service.holds import Holds
from ckptd.service.housekeeping import LOOK_AGAIN, Housekeeper, HousekeepingOfRun
from ckptd.service.scrub import Scrubber
from ckptd.service.settings import ServiceSettings
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faulty import FaultyStorage
from ckptd.wire import ActRequest, BeginRequest, OpenRequest
from tests.core.by_hand import HandLog
from tests.homes import Stored, spoil
from tests.service.calling import get, ledger_on, make_app, post
from tests.service.writing import start, train, write_save

RUN = "en-it"
TWO = Policy(keep_last=2)
SILENT_SECONDS = 600.0
WEEK_SECONDS = 7 * 86400.0
DEADLINE_SECONDS = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def holds(clock: Clock) -> Holds:
    return Holds(silent_seconds=SILENT_SECONDS, clock=clock)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


@pytest.fixture
def ledger(storage: FaultyStorage) -> Ledger:
    return ledger_on(storage)


@pytest.fixture
def housekeeper(ledger: Ledger, holds: Holds) -> Housekeeper:
    return Housekeeper(Keeper(ledger), holds, TWO, interval_seconds=60.0)


def told(housekeeper: Housekeeper, run: str = RUN) -> HousekeepingOfRun:
    return next(info for info in housekeeper.info().runs if info.run == run)


def steps(ledger: Ledger, run: str = RUN) -> dict[int, str]:
    return {info.step: info.status for info in ledger.checkpoints(run)}


# Retention.


def test_a_pass_verifies_retires_and_collects_in_every_run(ledger: Ledger, housekeeper: Housekeeper) -> None:
    for run in ("de-en", RUN):
        train(ledger, run, 1, 2, 3)
    assert housekeeper.pass_once()
    for run in ("de-en", RUN):
        assert steps(ledger, run) == {1: "purged", 2: "valid", 3: "valid"}
        Auditor(ledger.storage, run).assert_clean()
    info = told(housekeeper)
    assert (info.verified, info.retired, info.purged, info.objects, info.error) == (2, 1, 1, 3, None)
    assert housekeeper.info().passes == 1


def test_without_a_policy_nothing_is_retired_and_leftovers_go(ledger: Ledger, holds: Holds) -> None:
    housekeeper = Housekeeper(Keeper(ledger), holds, None, interval_seconds=60.0)
    train(ledger, RUN, 1, 2, 3)
    write_save(ledger.storage, RUN, 1, 4)
    start(ledger, RUN)
    assert housekeeper.pass_once()
    assert set(steps(ledger).values()) == {"valid"}
    assert (told(housekeeper).objects, told(housekeeper).verified) == (3, 0)
    assert ServiceSettings(storage="memory://x").policy is None


def test_a_start_blocks_retirement_until_it_is_ready(ledger: Ledger, housekeeper: Housekeeper) -> None:
    train(ledger, RUN, 1, 2, 3)
    attempt = layout.new_attempt()
    ledger.open(RUN, OpenRequest(attempt=attempt, job="j", host="h"))
    ledger.begin(RUN, BeginRequest(attempt=attempt, job="j", world=1))
    assert housekeeper.pass_once()
    assert "no generation is ready" in (told(housekeeper).waiting or "")
    assert set(steps(ledger).values()) == {"valid"}
    ledger.ready(RUN, attempt, 2)
    assert housekeeper.pass_once()
    assert (told(housekeeper).waiting, steps(ledger)[1]) == (None, "purged")


def test_a_run_in_which_nothing_happened_is_left_alone(
    ledger: Ledger, housekeeper: Housekeeper, storage: FaultyStorage
) -> None:
    train(ledger, RUN, 1, 2, 3)
    housekeeper.pass_once()
    housekeeper.pass_once()  # its own records are looked at once more
    zombie = write_save(ledger.storage, RUN, 1, 7)
    start(ledger, RUN)
    housekeeper.pass_once()
    assert storage.list(f"runs/{RUN}/manifests/{zombie.save}") == []
    write_save(ledger.storage, RUN, 1, 8)  # of an ended generation, after the look
    before, seq = len(storage.history), ledger.state(RUN).seq
    housekeeper.pass_once()
    assert not [key for _, key in storage.history[before:] if "/data" in key]
    objects = told(housekeeper).objects
    for _ in range(LOOK_AGAIN):
        housekeeper.pass_once()
    assert told(housekeeper).objects == objects + 3
    assert ledger.state(RUN).seq == seq


def test_two_services_do_it_at_once(storage: FaultyStorage, holds: Holds, clock: Clock) -> None:
    """One is stopped in the middle of a retirement while the other does all of it."""
    ledger = ledger_on(storage)
    train(ledger, RUN, 1, 2, 3, 4)
    slow = Housekeeper(Keeper(ledger), holds, TWO, interval_seconds=60.0)
    other = Housekeeper(Keeper(ledger_on(storage)), holds, TWO, interval_seconds=60.0)
    hang = storage.pause("delete")
    thread = threading.Thread(target=slow.pass_once)
    thread.start()
    assert hang.arrived.wait(DEADLINE_SECONDS)
    assert other.pass_once()
    hang.resume.set()
    thread.join(DEADLINE_SECONDS)
    assert told(slow).error is None
    assert steps(ledger) == {1: "purged", 2: "purged", 3: "valid", 4: "valid"}
    Auditor(storage, RUN).assert_clean()


def test_damage_found_on_the_way_is_told(
    ledger: Ledger, housekeeper: Housekeeper, caplog: pytest.LogCaptureFixture
) -> None:
    commits = train(ledger, RUN, 1, 2, 3, 4)
    spoil(Stored(ledger.storage, ledger.manifest(commits[3].manifest).objects()[0].key))
    assert housekeeper.pass_once()
    assert (told(housekeeper).damaged, told(housekeeper).verified) == (1, 2)
    assert "step 4 is damaged" in caplog.text
    assert steps(ledger) == {1: "purged", 2: "valid", 3: "valid", 4: "quarantined"}


# Errors.


def test_errors_are_told_once_and_hurt_no_other_run(
    ledger: Ledger, housekeeper: Housekeeper, storage: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    train(ledger, "a-run", 1, 2, 3)
    train(ledger, RUN, 1, 2, 3)
    faults = storage.fail_before("delete", lambda key: "a-run" in key, times=None)
    for _ in range(3):
        assert not housekeeper.pass_once()
    assert steps(ledger)[1] == "purged"
    assert "Unavailable" in (told(housekeeper, "a-run").error or "")
    assert caplog.text.count("housekeeping of run a-run failed") == 1
    faults.heal()
    caplog.set_level(logging.INFO, "ckptd")
    assert housekeeper.pass_once()
    assert told(housekeeper, "a-run").error is None
    assert "housekeeping of run a-run works again" in caplog.text
    assert steps(ledger, "a-run")[1] == "purged"


def test_a_damaged_run_is_told_and_slows_nothing_down(ledger: Ledger, housekeeper: Housekeeper) -> None:
    train(ledger, "torn", 1)
    train(ledger, RUN, 1, 2, 3)
    log = HandLog(ledger.storage, "torn")
    log.raw(b"{")
    assert housekeeper.pass_once()
    assert "Corrupt" in (told(housekeeper, "torn").error or "")
    assert steps(ledger)[1] == "purged"


def test_a_storage_that_is_away_is_told_and_readiness_stays_its_own(ledger: Ledger, storage: FaultyStorage) -> None:
    app = make_app(ledger, keep_last=2)
    train(ledger, RUN, 1, 2, 3)
    storage.fail_before("list", error=Unavailable("the drive went away"))
    app.state.service.housekeeper.pass_once()
    info = get(app, "/v1/housekeeping").json()
    assert info["housekeeping"]["error"] == "Unavailable: the drive went away"
    assert info["housekeeping"]["policy"] == {"keep_last": 2, "keep_every": None}
    assert get(app, "/health/ready").status_code == 200
    assert get(app, f"/v1/runs/{RUN}/latest").status_code == 200
    app.state.service.housekeeper.pass_once()
    info = get(app, "/v1/housekeeping").json()["housekeeping"]
    assert (info["error"], info["passes"], info["runs"][0]["retired"]) == (None, 2, 1)


def test_a_commit_beside_a_collection_that_hangs(
    ledger: Ledger, housekeeper: Housekeeper, storage: FaultyStorage
) -> None:
    """Training does not notice what becomes of a pass."""
    train(ledger, RUN, 1, 2, 3)
    hang = storage.pause("delete")
    thread = threading.Thread(target=housekeeper.pass_once)
    thread.start()
    assert hang.arrived.wait(DEADLINE_SECONDS)
    ledger.commit(RUN, write_save(ledger.storage, RUN, 1, 4))
    hang.resume.set()
    thread.join(DEADLINE_SECONDS)
    assert steps(ledger) == {1: "purged", 2: "valid", 3: "valid", 4: "valid"}


def test_the_thread_goes_on_after_a_fault_and_ends_when_told(
    ledger: Ledger, holds: Holds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    housekeeper = Housekeeper(Keeper(ledger), holds, TWO, interval_seconds=0.001)
    passes, again = list[str](), threading.Event()
    real = housekeeper.pass_once

    def pass_once() -> bool:
        passes.append(threading.current_thread().name)
        if len(passes) == 1:
            raise ZeroDivisionError("planned")
        again.set()
        return real()

    monkeypatch.setattr(housekeeper, "pass_once", pass_once)
    housekeeper.start()
    assert again.wait(DEADLINE_SECONDS)
    housekeeper.stop()
    for thread in threading.enumerate():
        if thread.name == "ckptd-housekeeping":
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()
    assert set(passes) == {"ckptd-housekeeping"}
    assert "a fault of ckptd" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_the_service_starts_and_ends_it(ledger: Ledger) -> None:
    app = create_app(ServiceSettings(storage=ledger.storage.url), ledger)

    async def scenario() -> set[str]:
        async with app.router.lifespan_context(app):
            return {thread.name for thread in threading.enumerate()}

    names = asyncio.run(scenario())
    assert {"ckptd-housekeeping", "ckptd-scrub"} <= names
    assert app.state.service.housekeeper._stopped.is_set()
    assert app.state.service.scrubber._stopped.is_set()


# Holds.


def hold(app: FastAPI, who: str = "eval-7", step: int = 1) -> None:
    assert post(app, f"/v1/runs/{RUN}/checkpoints/{step}/hold", ActRequest(who=who)).status_code == 200


def test_a_reader_that_fell_silent_lets_go_by_a_record(ledger: Ledger, holds: Holds, clock: Clock) -> None:
    app = make_app(ledger, holds=holds, keep_last=2)
    housekeeper = app.state.service.housekeeper
    train(ledger, RUN, 1, 2, 3)
    hold(app)
    for _ in range(3):
        clock.now += SILENT_SECONDS * 0.9
        housekeeper.pass_once()
        assert ledger.checkpoint_at(RUN, 1).held_by == ("eval-7",)
        hold(app)
    clock.now += SILENT_SECONDS * 1.1
    housekeeper.pass_once()
    state = ledger.state(RUN)
    assert (state.held, state.void) == ({}, {})
    assert steps(ledger)[1] == "purged"
    assert told(housekeeper).released == 1


def test_after_a_restart_of_the_service_silence_begins_anew(ledger: Ledger, clock: Clock) -> None:
    train(ledger, RUN, 1, 2, 3)
    hold(make_app(ledger))
    clock.now += SILENT_SECONDS * 100
    restarted = make_app(ledger, holds=Holds(silent_seconds=SILENT_SECONDS, clock=clock), keep_last=2)
    housekeeper = restarted.state.service.housekeeper
    for _ in range(2):
        housekeeper.pass_once()
        assert ledger.checkpoint_at(RUN, 1).held_by == ("eval-7",)
        clock.now += SILENT_SECONDS * 0.6
    housekeeper.pass_once()
    assert ledger.state(RUN).held == {}


def two_services(storage: FaultyStorage, clock: Clock) -> tuple[FastAPI, FastAPI]:
    """With a ledger and an ear each, on one storage."""
    one, other = (
        make_app(ledger_on(storage), holds=Holds(silent_seconds=SILENT_SECONDS, clock=clock), keep_last=2)
        for _ in range(2)
    )
    return one, other


def test_V17_a_reader_that_goes_on_through_another_service_is_not_silent(
    storage: FaultyStorage, ledger: Ledger, clock: Clock
) -> None:
    train(ledger, RUN, 1, 2, 3)
    one, other = two_services(storage, clock)
    hold(one)
    for number in range(24):
        clock.now += SILENT_SECONDS / 4
        hold(other)
        for app in (one, other):
            app.state.service.housekeeper.pass_once()
            assert ledger.checkpoint_at(RUN, 1).held_by == ("eval-7",), f"refresh {number}"
    turns = sum(turn for topic, turn in ledger.state(RUN).turns.items() if topic.startswith("hold:"))
    assert turns <= 2 + 24 / 2  # half of what was said is in the log
    for _ in range(2):
        clock.now += SILENT_SECONDS * 0.6
        for app in (one, other):
            app.state.service.housekeeper.pass_once()
    assert ledger.state(RUN).held == {}
    assert ledger.state(RUN).void == {}


def test_V17_a_reader_that_is_sent_to_each_service_in_turn_is_not_silent(
    storage: FaultyStorage, ledger: Ledger, clock: Clock
) -> None:
    train(ledger, RUN, 1, 2, 3)
    services = two_services(storage, clock)
    for number in range(24):
        hold(services[number % 2])
        clock.now += SILENT_SECONDS / 4
        for app in services:
            app.state.service.housekeeper.pass_once()
            assert ledger.checkpoint_at(RUN, 1).held_by == ("eval-7",), f"refresh {number}"


def test_V17_who_hears_last_is_right_about_the_end(storage: FaultyStorage, ledger: Ledger, clock: Clock) -> None:
    """One service ends the hold at the moment in which the reader says to the other that it is there."""
    (commit, *_) = train(ledger, RUN, 1, 2, 3)
    one, other = two_services(storage, clock)
    hold(one)
    housekeeper, keeper = one.state.service.housekeeper, one.state.service.keeper
    housekeeper.pass_once()
    clock.now += SILENT_SECONDS * 1.1
    ((save, who, turn),) = one.state.service.holds.silent(RUN, ledger.state(RUN))
    hold(other)
    with pytest.raises(Conflict, match="was decided 2 times"):
        keeper.release_silent(RUN, save, who, turn)
    housekeeper.pass_once()
    assert (save, ledger.state(RUN).held) == (commit.save, {commit.save: {"eval-7"}})


def test_a_hold_that_ended_and_began_again_is_a_new_one(ledger: Ledger, holds: Holds, clock: Clock) -> None:
    keeper = Keeper(ledger)
    (commit,) = train(ledger, RUN, 1)
    keeper.hold(RUN, commit.save, "a")
    assert holds.silent(RUN, ledger.state(RUN)) == []
    clock.now += SILENT_SECONDS + 1
    keeper.release(RUN, commit.save, "a")
    keeper.hold(RUN, commit.save, "a")
    assert holds.silent(RUN, ledger.state(RUN)) == []
    clock.now += SILENT_SECONDS + 1
    assert holds.silent(RUN, ledger.state(RUN)) == [(commit.save, "a", 3)]


# Scrubbing.


@pytest.fixture
def waited() -> list[float]:
    return []


@pytest.fixture
def scrub(ledger: Ledger, waited: list[float]) -> Callable[..., Scrubber]:
    def make(*, days_ahead: float = 0.0) -> Scrubber:
        def wait(seconds: float) -> bool:
            waited.append(seconds)
            return False

        return Scrubber(
            Keeper(ledger),
            mib_per_second=1.0,
            again_seconds=WEEK_SECONDS,
            idle_seconds=60.0,
            wait=wait,
            now=lambda: time.time() + days_ahead * 86400,
        )

    return make


def test_scrubbing_reads_what_was_never_read_and_keeps_its_pace(
    ledger: Ledger, scrub: Callable[..., Scrubber], waited: list[float]
) -> None:
    train(ledger, RUN, 1, 2)
    train(ledger, "other", 5)
    scrubber = scrub()
    done = [scrubber.scrub_once() for _ in range(4)]
    assert [(d.step, d.result) if d else None for d in done] == [(2, "whole"), (5, "whole"), (1, "whole"), None]
    assert all(info.verified for run in (RUN, "other") for info in ledger.checkpoints(run))
    assert sum(waited) == pytest.approx(3 * 2048 / 2**20)
    info = scrubber.info()
    assert (info.whole, info.damaged, info.read_bytes, info.reading) == (3, 0, 3 * 2048, None)


def test_it_comes_back_when_the_last_time_is_long_ago_to_the_oldest_first(
    ledger: Ledger, scrub: Callable[..., Scrubber]
) -> None:
    train(ledger, RUN, 1, 2)
    scrubber = scrub()
    assert [scrubber.scrub_once().step for _ in range(2)] == [2, 1]  # type: ignore[union-attr]
    assert scrub(days_ahead=6.9).scrub_once() is None  # another service, which has read nothing itself
    later = scrub(days_ahead=7.1)
    assert later.scrub_once().step == 2  # type: ignore[union-attr]


def test_scrubbing_finds_damage_while_there_are_others(
    ledger: Ledger, scrub: Callable[..., Scrubber], caplog: pytest.LogCaptureFixture
) -> None:
    commits = train(ledger, RUN, 1, 2)
    spoil(Stored(ledger.storage, ledger.manifest(commits[0].manifest).objects()[0].key))
    scrubber = scrub()
    done = [scrubber.scrub_once() for _ in range(3)]
    assert [(d.step, d.result) if d else None for d in done] == [(2, "whole"), (1, "damaged"), None]
    assert scrubber.info().damaged == 1
    assert "step 1 is damaged" in caplog.text
    assert steps(ledger) == {1: "quarantined", 2: "valid"}


def test_one_that_only_this_reader_finds_damaged_is_not_read_again_at_once(
    ledger: Ledger, storage: FaultyStorage, scrub: Callable[..., Scrubber]
) -> None:
    train(ledger, RUN, 1)
    clean = ledger_on(storage.inner)
    ledger._second_reader = lambda _, ref: clean._second_reader(storage.inner, ref)
    fault = storage.flip(".safetensors", at=0)
    scrubber = scrub()
    first = scrubber.scrub_once()
    assert fault.fired
    assert first is not None
    assert (first.result, scrubber.scrub_once()) == ("unconfirmed", None)


def test_one_that_is_retired_while_it_is_read(
    ledger: Ledger, storage: FaultyStorage, housekeeper: Housekeeper, scrub: Callable[..., Scrubber]
) -> None:
    commits = train(ledger, RUN, 1, 2, 3)
    keeper = Keeper(ledger)
    hang = storage.pause("read", lambda key: commits[0].save in key)
    for commit in commits[1:]:
        verify(keeper, RUN, commit.step)
    scrubber = scrub()
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(scrubber.scrub_once()))
    thread.start()
    assert hang.arrived.wait(DEADLINE_SECONDS)
    assert scrubber.info().reading == commits[0].save
    housekeeper.pass_once()
    hang.resume.set()
    thread.join(DEADLINE_SECONDS)
    assert (results, scrubber.info().damaged, scrubber.info().reading) == ([None], 0, None)
    assert steps(ledger)[1] == "purged"


def test_a_storage_that_is_away_is_tried_again(
    ledger: Ledger, storage: FaultyStorage, scrub: Callable[..., Scrubber]
) -> None:
    train(ledger, RUN, 1)
    storage.fail_before("reader", ".safetensors")
    scrubber = scrub()
    with pytest.raises(Unavailable):
        scrubber.scrub_once()
    assert scrubber.info().reading is None
    assert scrubber.scrub_once() is not None


def test_the_scrubbing_thread_tells_an_error_goes_on_and_ends_when_told(
    ledger: Ledger, storage: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    train(ledger, RUN, 1)
    storage.fail_before("reader", ".safetensors", times=2)
    scrubber = Scrubber(Keeper(ledger), mib_per_second=1e6, again_seconds=WEEK_SECONDS, idle_seconds=0.001)
    idle = threading.Event()
    due = scrubber._due

    def watched(run: str) -> object:
        found = due(run)
        if found is None:
            idle.set()
        return found

    scrubber._due = watched  # type: ignore[method-assign,assignment]
    scrubber.start()
    assert idle.wait(DEADLINE_SECONDS)
    scrubber.stop()
    assert ledger.checkpoint_at(RUN, 1).verified
    assert caplog.text.count("scrubbing failed, and is tried again") == 1


def test_without_a_rate_there_is_no_scrubbing(ledger: Ledger) -> None:
    app = make_app(ledger, verify_mib_per_second=0)
    assert app.state.service.scrubber is None
    assert get(app, "/v1/housekeeping").json()["scrub"] is None
    assert get(make_app(ledger), "/v1/housekeeping").json()["scrub"]["mib_per_second"] == 20.0
