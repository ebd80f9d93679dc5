"""The trainer goes on with another number of ranks: same batches, same losses but for rounding, and it says so."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptd.ledger import Ledger
from ckptd.storage import init_root, open_storage
from ckptd.testing.torchrun import Node
from ckptd_trainer.learner import lr_factor
from ckptd_trainer.lines import read_lines
from ckptd_trainer.metrics import read_metrics
from ckptd_trainer.train import main

SMALL = [
    "--limit=150",
    "--d-model=16",
    "--heads=2",
    "--layers=1",
    "--d-feed-forward=16",
    "--max-length=12",
    "--dropout=0",  # with it, other ranks would draw other numbers
    "--device=cpu",
    "--save-every=3",
    "--validate-every=0",
    "--no-tensorboard",
]
SAMPLES, GLOBAL_BATCH = 142, 12


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "CKPTD_URL", "CKPTD_RUN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/root"
    init_root(url)
    return url


def arguments(tmp_path: Path, url: str, run: str, options: Sequence[str]) -> list[str]:
    return [f"--url={url}", f"--run-name={run}", f"--output={tmp_path / run}", *SMALL, *options]


@pytest.mark.e2e
def test_four_ranks_then_three_see_the_batches_and_losses_of_an_undisturbed_run(tmp_path: Path, url: str) -> None:
    """The global batch is 12 in each: 4 x 3, 3 x 2 x 2, 1 x 12. The last one of an epoch has 10 samples."""
    assert main(arguments(tmp_path, url, "calm", ["--micro-batch=12", "--max-steps=18"])) == 0
    killed = ["-m", "ckptd_trainer", *arguments(tmp_path, url, "run", ["--micro-batch=3", "--max-steps=18"])]
    env = {"CKPTD_FAILPOINTS": "payload-begin?rank=3&step=9:kill", "CKPTD_JOB": "the-job"}
    with Node(killed, tmp_path / "four.log", ranks=4, max_restarts=0, env=env) as node:
        assert node.wait(200) != 0
    options = ["--micro-batch=2", "--accumulate=2", "--max-steps=18"]
    command = ["-m", "ckptd_trainer", *arguments(tmp_path, url, "run", options)]
    with Node(command, tmp_path / "three.log", ranks=3, env={"CKPTD_JOB": "the-job"}) as node:
        assert node.wait(200) == 0, node.output()[-4000:]
        said = node.output()

    calm, disturbed = (read_metrics(tmp_path / run / "metrics.csv") for run in ("calm", "run"))
    places = [(row.step, row.epoch, row.samples) for row in disturbed]
    assert places == [(row.step, row.epoch, row.samples) for row in calm]
    assert [row.generation for row in disturbed] == [1] * 6 + [2] * 12  # rank 3 asked when step 6 was durable
    assert [row.samples for row in disturbed][10:13] == [132, SAMPLES, SAMPLES + GLOBAL_BATCH]
    for one, other in zip(calm, disturbed, strict=True):
        assert math.isfinite(other.loss)
        assert other.loss == pytest.approx(one.loss, rel=1e-3)
        assert other.lr == one.lr == 2e-3 * lr_factor(other.step - 1, 50)

    starts = [json.loads(line) for line in read_lines(tmp_path / "run" / "progress.jsonl")]
    found = [(e["generation"], e["step"], e["world"]) for e in starts if e["event"] == "start"]
    assert found == [(1, 0, 4), (2, 6, 3)]
    for difference in (
        "accumulate: saved 1, now 2 (warning)",
        "micro_batch: saved 3, now 2 (warning)",
        "world: saved 4, now 3 (warning)",
    ):
        assert said.count(f"resume contract, step 6: {difference}") == 1
    assert "step 6 has no per-rank state for this start: it was saved by 4 ranks, now there are 3" in said


def test_another_seed_or_model_is_refused_before_anything_is_loaded(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, url, "run", ["--max-steps=2"])) == 0
    capsys.readouterr()
    assert main(arguments(tmp_path, url, "run", ["--max-steps=4", "--seed=1", "--lr=0.01"])) == 2
    told = capsys.readouterr().err
    assert "seed: saved 0, now 1 (refused)" in told
    assert "lr: saved 0.002, now 0.01 (warning)" in told
    assert main(arguments(tmp_path, url, "run", ["--max-steps=4", "--d-model=32"])) == 2
    assert "d_model: saved 16, now 32 (refused)" in capsys.readouterr().err
    ledger = Ledger(open_storage(url))
    assert [c.step for c in ledger.checkpoints("run")] == [2]
    assert main(arguments(tmp_path, url, "run", ["--max-steps=4"])) == 0
    contract = ledger.manifest(ledger.checkpoint_at("run", 4).manifest).contract
    names = (
        "seed",
        "micro_batch",
        "accumulate",
        "world",
        "app_state.optimizer",
        "app_state.schedule",
        "per_rank.rng",
    )
    assert [contract[name] for name in names] == [0, 32, 1, 1, "optimizer Adam", "scheduler LambdaLR", "stateful"]
