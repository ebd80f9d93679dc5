"""The whole trainer on real storage: interrupted anywhere, it ends with the weights of an undisturbed run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.storage import init_root
from ckptd.testing.torchrun import Node
from ckptd_trainer.learner import Learner
from ckptd_trainer.lines import read_lines
from ckptd_trainer.metrics import StepMetrics, read_metrics
from ckptd_trainer.train import main

SMALL = [
    "--limit=150",
    "--d-model=16",
    "--heads=2",
    "--layers=1",
    "--d-feed-forward=16",
    "--max-length=12",
    "--device=cpu",
    "--save-every=4",
    "--validate-samples=4",
    "--no-tensorboard",
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "CKPTD_URL", "CKPTD_RUN"):
        monkeypatch.delenv(name, raising=False)


Calm = Callable[..., Path]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """What an undisturbed run with these options leaves: made once, on a folder, wherever the disturbed ones run."""
    made: dict[tuple[int, tuple[str, ...]], Path] = {}

    def run(options: Sequence[str], ranks: int = 1) -> Path:
        if (ranks, tuple(options)) not in made:
            folder = tmp_path_factory.mktemp("calm")
            init_root(f"file://{folder}/root")
            command = arguments(folder, f"file://{folder}/root", "calm", options)
            if ranks == 1:
                assert main(command) == 0
            else:
                run_node(folder, command, "calm", ranks)
            made[ranks, tuple(options)] = folder / "calm"
        return made[ranks, tuple(options)]

    return run


def arguments(tmp_path: Path, home: str, run: str, options: Sequence[str]) -> list[str]:
    return [f"--url={home}", f"--run-name={run}", f"--output={tmp_path / run}", *SMALL, *options]


def result(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "result.json").read_text())
    return found


def losses(output: Path) -> list[tuple[int, int, float, float, int]]:
    def row(found: StepMetrics) -> tuple[int, int, float, float, int]:
        return (found.step, found.epoch, found.loss, found.lr, found.samples)

    return [row(found) for found in read_metrics(output / "metrics.csv")]


def assert_same_end(calm: Path, disturbed: Path) -> None:
    assert losses(disturbed) == losses(calm)
    for name in ("step", "loss", "samples", "weights_sha256"):
        assert result(disturbed)[name] == result(calm)[name]


def test_stopped_in_the_middle_of_an_accumulation_and_started_again(
    tmp_path: Path, home: str, calm: Calm, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--micro-batch=8", "--accumulate=2", "--epochs=2"]  # 142 samples, 9 steps an epoch
    undisturbed = calm(options)
    micro_losses = 0
    real = Learner._loss

    def failing(self: Learner, samples: Sequence[int]) -> torch.Tensor:
        nonlocal micro_losses
        micro_losses += 1
        if micro_losses == 2 + 2 * 10 + 1 + 1:  # the warm-up, ten whole steps, the second half of the eleventh
            raise RuntimeError("pulled the plug")
        return real(self, samples)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "_loss", failing)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            main(arguments(tmp_path, home, "stopped", options))
    assert main(arguments(tmp_path, home, "stopped", options)) == 0
    assert_same_end(undisturbed, tmp_path / "stopped")
    generations = [row.generation for row in read_metrics(tmp_path / "stopped" / "metrics.csv")]
    assert generations == [1] * 9 + [2] * 9  # the end of the first epoch was saved, step 10 was done again


def test_a_finished_run_started_again_does_nothing_and_says_the_same(tmp_path: Path, home: str) -> None:
    options = ["--micro-batch=16", "--epochs=3", "--max-steps=6"]
    assert main(arguments(tmp_path, home, "run", options)) == 0
    before, rows = result(tmp_path / "run"), losses(tmp_path / "run")
    assert main(arguments(tmp_path, home, "run", options)) == 0
    assert result(tmp_path / "run") == before | {"generation": 2}
    assert losses(tmp_path / "run") == rows
    assert before["step"] == 6


def test_a_failed_save_costs_a_checkpoint_and_not_the_training(
    tmp_path: Path, home: str, calm: Calm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--micro-batch=16", "--epochs=2"]
    undisturbed = calm(options)
    monkeypatch.setenv("CKPTD_FAILPOINTS", "manifest-written?step=4:fail")
    assert main(arguments(tmp_path, home, "failing", options)) == 0
    assert_same_end(undisturbed, tmp_path / "failing")
    assert "warning: a checkpoint is missing" in capsys.readouterr().out


def test_a_save_that_fails_at_the_end_is_no_success(
    tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTD_FAILPOINTS", "manifest-written?step=3:fail")
    assert main(arguments(tmp_path, home, "run", ["--micro-batch=16", "--max-steps=3"])) == 4
    assert not (tmp_path / "run" / "result.json").exists()
    assert "failpoint manifest-written" in capsys.readouterr().err


def test_other_data_under_the_same_run_is_refused(
    tmp_path: Path, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, home, "run", ["--max-steps=2"])) == 0
    assert main(arguments(tmp_path, home, "run", ["--max-steps=4", "--validation-fraction=0.051"])) == 0
    assert main(arguments(tmp_path, home, "run", ["--max-steps=6", "--validation-fraction=0.2"])) == 2
    message = capsys.readouterr().err
    assert "what to do: " in message
    assert "Traceback" not in message


def run_node(tmp_path: Path, command: list[str], name: str, ranks: int, failpoints: str = "") -> None:
    log = tmp_path / f"{name}.log"
    with Node(["-m", "ckptd_trainer", *command], log, ranks=ranks, env={"CKPTD_FAILPOINTS": failpoints}) as node:
        assert node.wait(200) == 0, node.output()[-4000:]


@pytest.mark.e2e
def test_four_ranks_one_of_them_killed_end_bit_for_bit_as_if_undisturbed(
    tmp_path: Path, home: str, calm: Calm
) -> None:
    options = ["--micro-batch=4", "--accumulate=2", "--epochs=3"]  # five steps an epoch, the last one short
    command = arguments(tmp_path, home, "killed", options)
    run_node(tmp_path, command, "killed", 4, "payload-begin?rank=2&step=8&generation=1:kill")
    assert_same_end(calm(options, 4), tmp_path / "killed")
    events = [json.loads(line) for line in read_lines(tmp_path / "killed" / "progress.jsonl")]
    starts = [event for event in events if event["event"] == "start"]
    assert [event["generation"] for event in starts] == [1, 2]
    assert starts[0]["step"] == 0
    assert starts[1]["step"] == 5  # rank 2 asked for the save of step 8 once that of step 5 was durable
    assert not {r["pid"] for r in starts[0]["ranks"]} & {r["pid"] for r in starts[1]["ranks"]}


@pytest.mark.e2e
def test_another_world_size_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, home: str) -> None:
    first = arguments(tmp_path, home, "run", ["--micro-batch=8", "--epochs=2", "--max-steps=4"])
    run_node(tmp_path, first, "two", 2)
    assert main(arguments(tmp_path, home, "run", ["--micro-batch=8", "--epochs=2"])) == 0
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    # 142 samples: four steps of 16 by two ranks, then 78 left for one, in steps of 8; then a whole epoch alone.
    assert Counter((row.generation, row.epoch) for row in rows) == {(1, 0): 4, (2, 0): 10, (2, 1): 18}
    assert [row.samples for row in rows][3:5] == [64, 72]
    assert result(tmp_path / "run")["samples"] == 2 * 142
