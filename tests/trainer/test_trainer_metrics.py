"""What rank 0 writes can be read again after any kill, to the last bit."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from ckptd_trainer.bar import Bar
from ckptd_trainer.config import TrainConfig
from ckptd_trainer.evaluate import Validation
from ckptd_trainer.lines import LineFile, read_lines
from ckptd_trainer.metrics import COLUMNS, Reporter, read_metrics


def reporter(output: Path, generation: int = 1, step: int = 0, tensorboard: bool = False) -> Reporter:
    config = TrainConfig(url="file:///x", run_name="r", output=output, tensorboard=tensorboard)
    return Reporter(config, generation, step, "abcd")


def test_rows_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    report = reporter(tmp_path)
    report.step(1, 0, 0.1 + 0.2, 1e-3 / 3, 32)
    report.close()
    (row,) = read_metrics(tmp_path / "metrics.csv")
    assert (row.step, row.epoch, row.loss, row.lr, row.samples, row.generation) == (
        1, 0, 0.1 + 0.2, 1e-3 / 3, 32, 1,
    )  # fmt: skip
    with (tmp_path / "metrics.csv").open() as file:
        assert tuple(next(csv.reader(file))) == COLUMNS


def test_steps_done_again_count_once_and_the_youngest_generation_wins(tmp_path: Path) -> None:
    old = reporter(tmp_path, generation=1)
    for step in (1, 2, 3):
        old.step(step, 0, step + 0.1, 1.0, step)
    new = reporter(tmp_path, generation=2, step=1)
    for step in (2, 3):
        new.step(step, 0, step + 0.2, 1.0, step)
    old.step(3, 0, 99.0, 1.0, 3)  # a process of the old generation that was not stopped yet
    old.close()
    new.close()
    assert [(row.step, row.loss) for row in read_metrics(tmp_path / "metrics.csv")] == [(1, 1.1), (2, 2.2), (3, 3.2)]
    assert len(read_lines(tmp_path / "metrics.csv")) == 1 + 3 + 2 + 1


@given(cut=st.integers(0, 400))
def test_a_file_torn_anywhere_gives_its_whole_rows_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    report = reporter(folder)
    for step in range(1, 5):
        report.step(step, 0, step / 3, 0.25, step)
    report.close()
    path = folder / "metrics.csv"
    path.write_bytes(path.read_bytes()[:cut])
    whole = read_metrics(path)
    assert [(row.step, row.loss) for row in whole] == [(step, step / 3) for step in range(1, len(whole) + 1)]
    assert len(whole) == max(0, len(read_lines(path)) - 1)
    report = reporter(folder, generation=2)
    report.step(9, 1, 0.5, 0.25, 9)
    report.close()
    assert [row.step for row in read_metrics(path)] == [row.step for row in whole] + [9]
    assert read_lines(path)[0] == ",".join(COLUMNS)


def test_lines_of_somebody_else_are_left_out(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "metrics.csv", ",".join(COLUMNS))
    file.append("not,a,row,at,all,of,ours")
    file.append("short,row")
    file.append("1,0,2.5,0.1,32,1,0.5")
    file.close()
    assert [row.loss for row in read_metrics(tmp_path / "metrics.csv")] == [2.5]


def test_progress_events_can_be_followed(tmp_path: Path) -> None:
    report = reporter(tmp_path, generation=3)
    report.event("start", step=0, ranks=[{"rank": 0, "pid": 1, "host": "a"}])
    report.step(1, 0, 2.0, 0.1, 32)
    events = [json.loads(line) for line in read_lines(tmp_path / "progress.jsonl")]
    assert [event["event"] for event in events] == ["start", "step"]
    assert {"time", "step", "loss", "generation", "rank", "pid", "host"} <= set(events[1])
    assert (events[1]["step"], events[1]["loss"], events[1]["generation"]) == (1, 2.0, 3)
    report.close()


def test_the_result_is_printed_and_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = reporter(tmp_path)
    report.validation(5, 0, Validation(0.5, 0.75, 0.25, ()))
    report.result(step=5, loss=1.5)
    report.close()
    assert json.loads(capsys.readouterr().out) == {"step": 5, "loss": 1.5}
    assert json.loads((tmp_path / "result.json").read_text()) == {"step": 5, "loss": 1.5}
    assert read_lines(tmp_path / "validation.csv")[1] == "5,0,0.5,0.75,0.25"
    assert not list(tmp_path.glob("result.json.*"))


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path: Path) -> None:
    old = reporter(tmp_path, generation=1, tensorboard=True)
    for step in (1, 2, 3):
        old.step(step, 0, float(step), 1.0, step)
    old.close()
    new = reporter(tmp_path, generation=2, step=1, tensorboard=True)
    for step in (2, 3):
        new.step(step, 0, step + 0.5, 1.0, step)
    new.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars] == [(1, 1.0), (2, 2.5), (3, 3.5)]


def test_without_a_terminal_the_bar_prints_few_lines() -> None:
    text = io.StringIO()
    with Bar(100, step=0, shown=True, console=Console(file=text)) as bar:
        for step in range(1, 101):
            bar.step(step, 0, 2.0)
    assert text.getvalue().splitlines() == ["step 1/100 epoch 0 loss 2.0000", "step 100/100 epoch 0 loss 2.0000"]


def test_in_a_terminal_the_bar_moves_and_other_ranks_stay_silent() -> None:
    text, silent = io.StringIO(), io.StringIO()
    with Bar(10, step=4, shown=True, console=Console(file=text, force_terminal=True)) as bar:
        bar.step(5, 0, 2.0)
    assert "5/10" in text.getvalue()
    with Bar(10, step=4, shown=False, console=Console(file=silent, force_terminal=True)) as bar:
        bar.step(5, 0, 2.0)
        bar.say("nothing")
    assert silent.getvalue() == ""
