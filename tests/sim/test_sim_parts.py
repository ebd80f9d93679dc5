"""The pieces of the simulator: who holds the baton, what a view of the drive does, what the truth notices."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ckptd import layout
from ckptd.errors import AlreadyExists, NotFound, Unavailable
from ckptd.testing.sim.baton import Baton, BatonLock, Process
from ckptd.testing.sim.drive import Drive, View
from ckptd.testing.sim.truth import RUN, Truth, Violated
from ckptd.testing.sim.weather import CALM, FAULTS, Weather, draw

KEY = "runs/sim/data/g00000001/g00000001-000000000001-r1/0-0123456789abcdef.safetensors"
SLOT = layout.log_key(RUN, 1)


def interleaving(seed: int) -> list[str]:
    baton, seen = Baton(random.Random(seed), 0.3), list[str]()

    def worker(name: str) -> Callable[[], None]:
        def work() -> None:
            for _ in range(5):
                baton.step(0.1)
                seen.append(name)

        return work

    for name in "abc":
        baton.start(Process(name), worker(name))
    baton.run(lambda: False)
    return seen


def test_a_seed_decides_who_goes_on() -> None:
    assert interleaving(1) == interleaving(1)
    assert len({tuple(interleaving(seed)) for seed in range(20)}) > 10
    assert sorted(interleaving(3)) == sorted("abc" * 5)


def test_a_dead_process_does_nothing_more() -> None:
    baton, seen = Baton(random.Random(1), 0.0), list[int]()
    victim = Process("victim")

    def work() -> None:
        try:
            for number in range(100):
                baton.pause(1.0)
                seen.append(number)
        finally:
            seen.append(-1)

    def kill() -> None:
        baton.pause(5.5)
        victim.dead = True

    baton.start(victim, work)
    baton.start(Process("killer"), kill)
    baton.run(lambda: False)
    assert seen == [0, 1, 2, 3, 4, -1]


def test_a_stopped_process_wakes_up_late_and_time_goes_on() -> None:
    baton, seen = Baton(random.Random(1), 0.0), list[tuple[str, float]]()
    sleeper = Process("sleeper")
    sleeper.asleep_until = 100.0

    def note(name: str) -> Callable[[], None]:
        def work() -> None:
            baton.pause(3.0)
            seen.append((name, baton.now))

        return work

    baton.start(sleeper, note("late"))
    baton.start(Process("other"), note("early"))
    baton.run(lambda: False)
    assert seen == [("early", 3.0), ("late", 103.0)]


def test_a_lock_is_held_across_a_pause_and_let_go_by_the_dead() -> None:
    baton, seen = Baton(random.Random(1), 0.0), list[str]()
    lock, victim = BatonLock(baton), Process("victim")

    def first() -> None:
        with lock, lock:
            seen.append("first in")
            baton.pause(5.0)
            seen.append("first out")

    def second() -> None:
        baton.pause(1.0)
        victim.dead = True
        with lock:
            seen.append("second in")

    baton.start(victim, first)
    baton.start(Process("other"), second)
    baton.run(lambda: False)
    assert seen == ["first in", "second in"]


def test_what_a_task_dies_of_is_raised_to_who_runs_it() -> None:
    baton = Baton(random.Random(1), 0.0)
    baton.start(Process("one"), lambda: [][1])
    with pytest.raises(IndexError):
        baton.run(lambda: False)
    baton.end()


def on_drive(weather: Weather, work: Callable[[View, Drive, Baton], None]) -> Drive:
    """`work` on a view of a new drive, as the only task."""
    rng = random.Random(1)
    baton = Baton(rng, 0.0)
    drive = Drive(baton, rng, weather)
    view = drive.view(Process("one", mortal=False))
    baton.start(view.process, lambda: work(view, drive, baton))
    baton.run(lambda: False)
    return drive


def test_a_lost_put_has_landed_and_a_refused_one_has_not() -> None:
    def work(view: View, drive: Drive, baton: Baton) -> None:
        with pytest.raises(Unavailable):
            view.put(KEY, [b"x"], 1)

    assert on_drive(Weather(lost=1.0), work).medium.get(KEY, 10) == b"x"
    with pytest.raises(NotFound):
        on_drive(Weather(refused=1.0), work).medium.get(KEY, 10)


def test_a_delayed_put_lands_later_and_never_on_a_taken_key() -> None:
    def work(view: View, drive: Drive, baton: Baton) -> None:
        for key in (KEY, f"{KEY}2"):
            with pytest.raises(Unavailable):
                view.put(key, [b"late"], 4)
        drive.weather = CALM
        view.put(KEY, [b"mine"], 4)
        with pytest.raises(AlreadyExists):
            view.put(KEY, [b"other"], 5)
        baton.pause(1000.0)
        assert view.get(KEY, 10) == b"mine"
        assert view.get(f"{KEY}2", 10) == b"late"

    drive = on_drive(Weather(delayed=1.0), work)
    assert drive.met["landed late"] == 1


def test_an_old_listing_is_a_prefix_of_what_was_made() -> None:
    lengths = set[int]()

    def work(view: View, drive: Drive, baton: Baton) -> None:
        names = [f"{number:03d}" for number in range(30)]
        for name in names:
            view.put(f"runs/sim/tmp/{name}", [b"x"], 1)
        for _ in range(30):
            shown = view.list("runs/sim/tmp")
            assert shown == names[: len(shown)]
            lengths.add(len(shown))

    on_drive(Weather(stale=1.0), work)
    assert len(lengths) > 3


def test_a_slot_once_seen_is_never_told_to_be_absent() -> None:
    def work(view: View, drive: Drive, baton: Baton) -> None:
        drive.watcher = None
        drive.put(SLOT, b"x")
        with pytest.raises(NotFound):
            view.get(SLOT, 10)
        drive.weather = CALM
        assert view.get(SLOT, 10) == b"x"
        drive.weather = Weather(negative=1.0)
        assert view.get(SLOT, 10) == b"x"

    def later(view: View, drive: Drive, baton: Baton) -> None:
        view.list("runs")  # the view is older than the slot
        work(view, drive, baton)

    on_drive(Weather(negative=1.0), later)


def test_damage_can_be_repaired() -> None:
    def work(view: View, drive: Drive, baton: Baton) -> None:
        view.put(KEY, [b"whole"], 5)
        drive.damage(KEY, None)
        with pytest.raises(NotFound):
            view.get(KEY, 10)
        drive.repair()
        assert view.get(KEY, 10) == b"whole"

    assert on_drive(CALM, work).met["damaged"] == 1


def test_the_truth_notices_who_deletes_what_is_not_theirs() -> None:
    drive = on_drive(CALM, lambda view, drive, baton: view.put(KEY, [b"x"], 1))
    Truth(drive)
    for key in (KEY, SLOT, layout.ROOT_MARKER):
        with pytest.raises(Violated, match="I13"):
            drive.delete(key)


def test_the_truth_notices_a_gap_and_bytes_that_are_no_record() -> None:
    drive = on_drive(CALM, lambda view, drive, baton: None)
    Truth(drive)
    with pytest.raises(Violated, match="I2"):
        drive.put(layout.log_key(RUN, 2), b"{}")
    with pytest.raises(Violated, match="L3"):
        drive.put(SLOT, b"{}")


def test_seeds_have_all_kinds_of_weather() -> None:
    weathers = [draw(random.Random(seed)) for seed in range(100)]
    assert CALM in weathers
    for fault in FAULTS:
        assert 10 < sum(getattr(weather, fault) > 0 for weather in weathers) < 90
    assert CALM.words() == "calm"
    assert weathers[0].without(FAULTS) == CALM
