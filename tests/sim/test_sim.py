"""The simulator: it finds nothing in fixed seeds, replays a seed exactly, and explains what it finds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ckptd.testing.sim.__main__ import app
from ckptd.testing.sim.search import replay_line, search, shrink
from ckptd.testing.sim.weather import FAULTS
from ckptd.testing.sim.world import simulate
from tests.sim.weakened import collect_the_current_generation

OPERATIONS = 100_000


def test_nothing_breaks_in_a_hundred_thousand_operations() -> None:
    found = search(1, OPERATIONS)
    assert [f"seed {report.seed}: {report.finding}" for report in found.failed] == []
    assert found.operations >= OPERATIONS
    missed = [fault for fault in FAULTS if not found.counts[f"fault {fault}"]]
    assert not missed, f"these faults never happened: {missed}"
    for kind in (
        "generation-started",
        "checkpoint-committed",
        "checkpoints-retired",
        "checkpoints-purged",
        "rolled-back",
    ):
        assert found.counts[f"record {kind}"] > 10, kind
    assert found.counts["record fallbacks"] > 0


def test_a_seed_takes_the_same_course_in_another_process() -> None:
    def told(hash_seed: str) -> str:
        command = [sys.executable, "-m", "ckptd.testing.sim", "--seed", "6", "--trace", "1000000"]
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout

    first = told("1")
    assert first == told("2")
    assert len(first.splitlines()) > 300
    assert first.splitlines()[-1].endswith("nothing is broken")


def test_a_finding_is_told_with_fewer_operations_and_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    collect_the_current_generation(monkeypatch)
    (report,) = search(1, OPERATIONS).failed
    assert report.rule == "I13"
    operations, without = shrink(report)
    assert operations < report.operations + 100
    assert simulate(report.seed, operations, without=without).rule == "I13"
    again = replay_line(report.seed, operations, without)
    assert again.startswith(f"python -m ckptd.testing.sim --seed {report.seed} --operations {operations}")
    assert any("delete" in event for event in report.events[-5:])


def test_the_command_line_tells_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    collect_the_current_generation(monkeypatch)
    many = CliRunner().invoke(app, ["--operations", "9000", "--processes", "1", "--trace", "5"])
    assert many.exit_code == 1
    again, fewer = many.output.splitlines()[-2:]
    assert again.startswith("again:  python -m ckptd.testing.sim --seed ")
    for line in (again, fewer):
        one = CliRunner().invoke(app, line.partition("ckptd.testing.sim ")[2].split())
        assert one.exit_code == 1
        assert "broken: I13" in one.output.splitlines()[-1]


def test_an_error_nobody_expects_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.ledger.start_body", lambda run, state, request: 1 / 0)
    report = simulate(1)
    assert report.rule == "error"
    assert "division by zero" in str(report.finding)
