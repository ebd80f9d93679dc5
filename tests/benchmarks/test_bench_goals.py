"""Every goal is data, some group yields it, and both plans measure every group."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.goals import FIGURES, GOALS, Goal
from benchmarks.jobs import FULL, GROUPS, QUICK
from benchmarks.results import Figure, Part, Report, Row, ratio


def report(*figures: Figure) -> Report:
    part = Part(tables=(), figures=figures)
    return Report.of([part], mode="quick", started="now", seconds=1.0, machine={})


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.figure} {goal.at}")
def test_the_group_of_a_goal_yields_its_figure(goal: Goal) -> None:
    assert goal.group in GROUPS
    assert goal.figure in importlib.import_module(f"benchmarks.{goal.group}").YIELDS


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_group_yields_is_a_goal(group: str) -> None:
    assert importlib.import_module(f"benchmarks.{group}").YIELDS <= FIGURES


def test_both_plans_measure_every_group() -> None:
    assert {job.group for job in QUICK} == {job.group for job in FULL} == {goal.group for goal in GOALS}


def test_the_full_plan_reaches_every_size_that_a_goal_names() -> None:
    sizes = {(job.group, job.label) for job in FULL} | {(job.group, f"{job.count} ranks") for job in FULL}
    named = {(goal.group, goal.at) for goal in GOALS if goal.at.endswith("GB") or goal.group == "ranks"}
    assert named <= sizes


def test_a_ratio_is_of_medians_with_that_of_minima_beside_it() -> None:
    one, other = (
        Row(name="a", samples={"seconds": (3.0, 1.0, 2.0)}),
        Row(name="b", samples={"seconds": (9.0, 4.0, 4.0)}),
    )
    (figure,) = ratio("save/raw", "1 GB", one, other)
    assert (figure.value, figure.best) == (0.5, 0.25)


def test_no_ratio_with_somebody_who_is_missing() -> None:
    assert ratio("save/raw", "1 GB", Row(name="a", samples={"seconds": (1.0,)}), Row(name="b", missing="gone")) == ()


def test_a_verdict_takes_the_figure_of_its_size() -> None:
    figures = [Figure(figure="save/raw", at=at, value=value) for at, value in (("1 GB", 0.8), ("3 GB", 0.9))]
    one, three = report(*figures).verdicts()[:2]
    assert (one.value, one.held) == (0.8, True)
    assert (three.value, three.held) == (0.9, False)


def test_a_verdict_at_another_size_says_so() -> None:
    one, three = report(Figure(figure="save/raw", at="1 GB", value=0.85)).verdicts()[:2]
    assert (one.measured_at, one.held) == ("1 GB", True)
    assert (three.at, three.measured_at, three.held) == ("3 GB", "1 GB", True)


def test_of_several_figures_at_one_place_the_worst_counts() -> None:
    figures = [Figure(figure="memory", at="50 saves", value=value) for value in (1.0, 1.2, 1.1)]
    figures += [Figure(figure="s3 put, CPU", at=at, value=value) for at, value in (("1 GB", 2.0), ("0.25 GB", 1.0))]
    found = {verdict.text: verdict for verdict in report(*figures).verdicts() if verdict.value is not None}
    assert [(v.value, v.measured_at, v.held) for v in found.values()] == [
        (1.2, "50 saves", False),
        (2.0, "1 GB", False),
    ]


def test_every_goal_is_told_though_nothing_was_measured() -> None:
    verdicts = report().verdicts()
    assert len(verdicts) == len(GOALS)
    assert all(verdict.held is None for verdict in verdicts)
