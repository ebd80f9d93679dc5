"""A short seeded chaos run on a folder, and what all ranks of a job learn of one rank's failure in a save."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.ledger import Ledger
from ckptd.testing.auditor import Auditor
from ckptd.testing.chaos.checks import Checks, curve_of
from ckptd.testing.chaos.job import WORLD, Job, signal_rank
from ckptd.testing.chaos.plan import make_plan
from ckptd.testing.chaos.ports import free_port
from ckptd.testing.chaos.run import STRIKES, Settings, possible, run_on, stage
from ckptd.testing.chaos.site import Site
from ckptd.testing.chaos.zygote import Zygote

pytestmark = pytest.mark.e2e
SEED = 20
KINDS = ("kill rank in save", "kill node", "zombie", "cut off service", "damage two", "disk full", "frozen storage")
KNOWN_SECONDS = 5.0
Stage = tuple[Site, list[Zygote]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("chaos"), "file") as prepared:
        yield prepared


@pytest.fixture
def job(prepared: Stage, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job of its own name that waits at step 4, which is durable."""
    site, zygotes = prepared
    name = f"job-{len(list(site.folder.glob('job-*.jsonl')))}"
    with contextlib.closing(Job(site.folder, name, url=site.proxy.url, seed=SEED)) as job:
        job.start(zygotes, free_port(), site.node_envs())
        job.until_generation(0)
        job.settle(4)
        yield job
        job.look()
        acknowledged = sorted({event["save"] for event in job.named("durable")})
        Auditor(site.storage, job.run).assert_clean(acknowledged=acknowledged)


def test_faults_of_different_kinds(prepared: Stage) -> None:
    site, zygotes = prepared
    said = list[str]()
    settings = Settings(SEED, len(KINDS), "file", site.folder, KINDS)
    report = run_on(settings, site, zygotes, said.append)
    assert report.held, "\n".join([f"seed {SEED}", *said, *report.lines()])
    assert {struck.fault.kind for struck in report.struck} == set(KINDS) & set(possible(site)[0])
    assert report.numbers["fired"] == len(KINDS)
    assert report.numbers["commits lost"] == report.numbers["wrong resumes"] == 0
    assert report.numbers["generations"] > 1
    report.write(site.folder / "report.json")
    assert json.loads((site.folder / "report.json").read_text())["fired"] == len(KINDS)


def test_a_cut_between_two_nodes_is_healed(tmp_path: Path) -> None:
    """Two network namespaces and a cable: both sides give the generation up, and come back together."""
    said = list[str]()
    with stage(tmp_path, "file", apart=True) as (site, zygotes):
        settings = Settings(SEED, 1, "file", tmp_path, ("cut network",), apart=True)
        report = run_on(settings, site, zygotes, said.append)
    assert report.held, "\n".join([f"seed {SEED}", *said, *report.lines()])
    assert (report.numbers["fired"], report.numbers["commits lost"]) == (1, 0)
    assert report.numbers["generations"] > 1


@pytest.mark.parametrize("place", ["payload-begin", "payload-written"])
def test_all_ranks_know_soon_that_one_could_not_write(job: Job, prepared: Stage, place: str) -> None:
    """Measured by their own clocks, from the failing rank's error to each other rank's. Training goes on."""
    job.tell(orders=f"{place}?rank=2&step=6:fail", limit=6)
    job.until("the failure", lambda: len(job.named("failed", step=6)) == WORLD)
    told = {event["rank"]: event["clock"] for event in job.named("failed", step=6)}
    assert max(told.values()) - told[2] < KNOWN_SECONDS
    assert all("ordered by" in event["reason"] for event in job.named("failed", step=6))
    job.tell(orders="")
    job.settle(8)
    assert job.generation == 1
    assert [c.step for c in Ledger(prepared[0].storage).checkpoints(job.run)] == [2, 4, 8]
    signal_rank(job.ranks()[0], signal.SIGKILL)
    job.until_generation(1)
    assert {event["step"] for event in job.ranks().values()} == {8}


def test_the_step_of_a_failed_save_is_saved_again(job: Job, prepared: Stage) -> None:
    """What the failed ones left is not in its way."""
    job.tell(orders="payload-written?rank=2&step=6:fail", limit=6, again=True)
    job.until("two failures", lambda: len(job.named("failed", step=6)) >= 2 * WORLD)
    job.tell(orders="")
    job.until("the save of step 6", lambda: len(job.named("durable", step=6)) == WORLD)
    assert job.generation == 1
    assert [c.step for c in Ledger(prepared[0].storage).checkpoints(job.run)] == [2, 4, 6]


@pytest.mark.parametrize("place", ["payload-begin", "payload-written"])
def test_all_ranks_know_soon_that_one_was_killed_in_a_save(job: Job, prepared: Stage, place: str) -> None:
    """From the moment its parent saw it gone, to the moment each other rank ends: torchrun starts all of them anew.
    The save of the same step is made again, beside what was left of the first."""
    job.tell(orders=f"{place}?rank=2&step=6&generation=1:kill", limit=6)
    pids = {rank: event["pid"] for rank, event in job.ranks().items()}
    job.until_generation(1)
    (died,) = job.named("gone", pid=pids[2])
    assert died["code"] == -signal.SIGKILL
    for rank in (0, 1, 3):
        told = min(e["clock"] for e in job.events if e.get("pid") == pids[rank] and e["event"] in ("ended", "gone"))
        assert told - died["clock"] < KNOWN_SECONDS
    assert {event["step"] for event in job.ranks().values()} == {4}
    job.settle(8)
    assert [(c.step, c.generation) for c in Ledger(prepared[0].storage).checkpoints(job.run)][2:] == [(6, 2), (8, 2)]


def test_checks_find_a_wrong_loss_and_a_wrong_start(job: Job, prepared: Stage) -> None:
    right = curve_of(job)
    assert len(right) == 4 * WORLD
    checks = Checks(job, prepared[0], right)
    checks.look("first")
    assert checks.findings == []
    loss, crc = right[1, 3]
    other = Checks(job, prepared[0], {**right, (1, 3): (loss, crc + 1)})
    job.named("start", rank=3)[0]["step"] = 2
    other.look("then")
    assert [finding.partition(" ")[2][:7] for finding in other.findings] == ["step 3,", "generat"]
    assert other.wrong_resumes == 1


def test_a_zygote_forks_what_python_would_run(tmp_path: Path) -> None:
    """Exit codes and outputs, and the end together with whoever asked for it."""
    with Zygote(tmp_path / "z", [], log=tmp_path / "zygote.log") as zygote:
        script = tmp_path / "script.py"
        script.write_text("import os, sys, time\nprint(os.environ['WORD'], flush=True)\nsys.exit(int(sys.argv[1]))")
        forked = zygote.fork([str(script), "7"], {"WORD": "hello"}, tmp_path / "out")
        assert forked.wait(60.0) == 7
        assert (tmp_path / "out").read_text() == "hello\n"
        script.write_text("import signal\nsignal.pause()")
        forked = zygote.fork([str(script)], {}, tmp_path / "out")
        assert forked.poll() is None
        forked.kill()
        assert forked.code == -signal.SIGKILL


def test_a_plan_is_its_seeds_and_has_every_kind() -> None:
    kinds = sorted(STRIKES)
    plan = make_plan(5, len(kinds), kinds)
    assert plan == make_plan(5, len(kinds), kinds)
    assert plan != make_plan(6, len(kinds), kinds)
    assert sorted(fault.kind for fault in plan) == kinds
    assert [fault.step for fault in plan] == sorted({fault.step for fault in plan})


def test_every_kind_of_fault_can_be_planned(prepared: Stage) -> None:
    have, missing = possible(prepared[0])
    assert sorted([*have, *missing]) == sorted(STRIKES)
