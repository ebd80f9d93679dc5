"""Small jobs in real child processes: what they give has the shape that tables and goals need. Never how fast."""

from __future__ import annotations

import importlib
import mmap
from pathlib import Path

import pytest

from benchmarks.costs import alone
from benchmarks.jobs import Job
from benchmarks.results import Part
from benchmarks.running import JobFailed, run_job
from benchmarks.states import make

OURS = "ckptd"
SMALL = (
    Job(group="saving", gigabytes=0.001, rounds=1, tensors=50),
    Job(group="stalls", gigabytes=0.001, rounds=1, peers=False),
    Job(group="training", gigabytes=0.001, rounds=1, peers=False),
    Job(group="memory", gigabytes=0.001, count=11),
    Job(group="loading", gigabytes=0.001, rounds=2, peers=False),
)
OF_PEERS = {"durable/dcp", *(f"load/{peer}, {how}" for peer in ("torch", "dcp") for how in ("warm", "cold"))}


@pytest.mark.parametrize("job", SMALL, ids=lambda job: f"{job.group} {job.label}")
def test_a_small_job_gives_all_its_figures(job: Job, tmp_path: Path) -> None:
    done: list[str] = []
    part = run_job(job, tmp_path, done.append)
    yields = importlib.import_module(f"benchmarks.{job.group}").YIELDS
    assert {figure.figure for figure in part.figures} == yields - (set() if job.peers else OF_PEERS)
    assert all(figure.value > 0 for figure in part.figures if figure.figure != "memory growth")
    for table in part.tables:
        assert table.group == job.group
        assert table.row(OURS).samples
        assert not table.reference or table.row(table.reference).samples
        for row in table.rows:
            assert bool(row.samples) != bool(row.missing)
            assert row.missing in ("", "not installed", job.left_out), row
    assert Part.model_validate_json(part.model_dump_json()) == part
    assert done
    assert [path.name for path in tmp_path.iterdir()] == ["bench.log"]


def test_a_job_that_fails_says_where_to_look_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"bench\.log"):
        run_job(Job(group="nobody"), tmp_path, lambda doing: None)
    assert "there is no group nobody" in (tmp_path / "bench.log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["bench.log"]


def test_a_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    job = Job(group="saving", gigabytes=0.001, rounds=100_000, deadline_seconds=3.0)
    with pytest.raises(JobFailed, match="more than 3 s"):
        run_job(job, tmp_path, lambda doing: None)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.log"]


def test_a_state_has_the_size_and_the_tensors_that_were_asked_for() -> None:
    state = make(0.02)
    assert abs(state.size_bytes / 0.02e9 - 1) < 0.05
    assert len(state.tensors()) == 496
    assert len(make(0.001, 70).tensors()) == 70


def test_a_load_that_did_nothing_is_noticed() -> None:
    state = make(0.001, 3)
    state.remember()
    state.check("nobody")
    state.spoil()
    with pytest.raises(ValueError, match="somebody did not bring"):
        state.check("somebody")


def test_change_makes_every_tensor_new() -> None:
    state = make(0.001)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    state.change()
    assert all(bool((tensor != before[name]).all()) for name, tensor in state.tensors().items())


def test_costs_alone_are_those_of_another_process() -> None:
    kept: list[mmap.mmap] = []

    def touch() -> None:
        kept.append(mmap.mmap(-1, 20_000_000))  # memory that this process has not had before
        kept[0].write(bytes(1000) * 20_000)

    found = alone(touch)
    assert not kept
    assert found["peak_bytes"] >= 19_000_000
    assert found["seconds"] > 0
