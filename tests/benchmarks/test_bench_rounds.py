"""Contenders take turns, and what comes of it is counted right."""

from __future__ import annotations

import pytest

from benchmarks.rounds import Contender, take_turns


def quiet(doing: str) -> None:
    return None


def named(names: str, order: list[str]) -> list[Contender]:
    return [Contender(name, lambda name=name: order.append(name)) for name in names]  # type: ignore[misc]


def test_every_round_starts_with_the_next_contender() -> None:
    order: list[str] = []
    take_turns(named("abc", order), 3, quiet)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"


def test_rounds_that_warm_up_do_not_count() -> None:
    order: list[str] = []
    (row,) = take_turns(named("a", order), 3, quiet, warm_up=2)
    assert len(order) == 5
    assert len(row.samples["seconds"]) == 3


def test_before_and_after_surround_each_turn_and_the_round_comes_first() -> None:
    order: list[str] = []

    def note(what: str) -> None:
        order.append(what)

    contender = Contender("a", lambda: note("run"), before=lambda: note("before"), after=lambda: note("after"))
    take_turns([contender], 1, quiet, each_round=lambda: note("round"))
    assert order == ["round", "before", "run", "after"] * 2


def test_figures_of_its_own_go_before_those_measured_around_it() -> None:
    (row,) = take_turns([Contender("a", lambda: {"seconds": 7.0, "more": 1.0})], 2, quiet)
    assert row.samples["seconds"] == (7.0, 7.0)
    assert row.samples["more"] == (1.0, 1.0)
    assert len(row.samples["cpu_seconds"]) == 2


def broken() -> None:
    raise OSError("no")


def test_a_peer_that_fails_is_shown_and_takes_no_further_turn() -> None:
    order: list[str] = []
    cleaned: list[str] = []
    peer = Contender("peer", broken, after=lambda: cleaned.append("peer"), peer=True)
    one, other = take_turns([peer, *named("a", order)], 2, quiet)
    assert one.missing == "failed: OSError: no"
    assert one.samples == {}
    assert cleaned == ["peer"]
    assert order == ["a"] * 3
    assert len(other.samples["seconds"]) == 2


def test_what_is_no_peer_may_not_fail() -> None:
    with pytest.raises(OSError, match="no"):
        take_turns([Contender("ours", broken)], 1, quiet)


def test_a_missing_contender_is_shown_and_never_called() -> None:
    (row,) = take_turns([Contender("gone", broken, missing="not installed")], 1, quiet)
    assert row.missing == "not installed"
