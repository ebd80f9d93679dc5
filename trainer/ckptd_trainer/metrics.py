"""What rank 0 reports about a run: CSV always, TensorBoard and Weights & Biases where wanted.

`metrics.csv` grows over all incarnations of a run. Steps that were done again after a resume stand in it
twice; `read_metrics` gives the row that counts.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ckptd_trainer.config import TrainConfig
from ckptd_trainer.evaluate import Validation
from ckptd_trainer.lines import LineFile, read_lines


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. Floats are written so that they are read back to the last bit."""

    step: int
    epoch: int
    loss: float
    """Mean over the target tokens of the whole global batch."""
    lr: float
    samples: int
    """Samples seen since the run began."""
    generation: int
    """The incarnation that did this step."""
    seconds: float
    """Since this incarnation began to train."""


COLUMNS = tuple(field.name for field in fields(StepMetrics))


def read_metrics(path: Path) -> list[StepMetrics]:
    """The row that counts for each step, in the order of steps; any process, also while the file grows.

    That is the row of the youngest generation, and of its rows the last one. Lines that are no rows, like
    the torn last line of a killed writer, are left out.
    """
    counting: dict[int, StepMetrics] = {}
    for cells in csv.reader(read_lines(path)):
        row = _row(cells)
        if row and (row.step not in counting or row.generation >= counting[row.step].generation):
            counting[row.step] = row
    return [counting[step] for step in sorted(counting)]


def _row(cells: list[str]) -> StepMetrics | None:
    if len(cells) != len(COLUMNS):
        return None
    step, epoch, loss, lr, samples, generation, seconds = cells
    try:
        return StepMetrics(
            int(step), int(epoch), float(loss), float(lr), int(samples), int(generation), float(seconds)
        )
    except ValueError:  # the header, or a line that something else wrote
        return None


class Reporter:
    """Every output of global rank 0: metrics, events for programs that follow the run, the result."""

    def __init__(self, config: TrainConfig, generation: int, step: int, wandb_run_id: str) -> None:
        """After restore, so that reports go on at `step`."""
        self._output, self._generation = config.output, generation
        self._started = time.monotonic()
        self._metrics = LineFile(config.output / "metrics.csv", ",".join(COLUMNS))
        self._validation = LineFile(config.output / "validation.csv", "step,epoch,cer,wer,bleu")
        self._progress = LineFile(config.output / "progress.jsonl")
        self._tensorboard: Any = None
        self._wandb: Any = None
        if config.tensorboard and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what an earlier incarnation wrote beyond the step we resumed from.
            self._tensorboard = SummaryWriter(str(config.output / "tensorboard"), purge_step=step + 1)
        if config.wandb:
            self._wandb = _start_wandb(config, wandb_run_id)

    def event(self, name: str, **what: object) -> None:
        """One JSON line in progress.jsonl, for a program that follows the training."""
        who = {"generation": self._generation, "rank": 0, "pid": os.getpid(), "host": socket.gethostname()}
        self._progress.append(json.dumps({"event": name, "time": time.time(), **what, **who}))

    def step(self, step: int, epoch: int, loss: float, lr: float, samples: int) -> None:
        seconds = time.monotonic() - self._started
        row = StepMetrics(step, epoch, loss, lr, samples, self._generation, seconds)
        self._metrics.append(",".join(repr(value) for value in asdict(row).values()))
        self.event("step", step=step, epoch=epoch, loss=loss)
        self._scalars(step, {"train/loss": loss, "train/lr": lr})

    def validation(self, step: int, epoch: int, found: Validation) -> None:
        self._validation.append(f"{step},{epoch},{found.cer!r},{found.wer!r},{found.bleu!r}")
        scores = {"cer": found.cer, "wer": found.wer, "bleu": found.bleu}
        samples = [asdict(translation) for translation in found.samples(2)]
        self.event("validation", step=step, epoch=epoch, translations=samples, **scores)
        self._scalars(step, {f"validation/{name}": value for name, value in scores.items()})

    def result(self, **result: object) -> None:
        """Print the result as one JSON line and put it into result.json, whole or not at all."""
        line = json.dumps(result)
        temporary = self._output / f"result.json.{os.getpid()}"
        temporary.write_text(line + "\n")
        os.replace(temporary, self._output / "result.json")
        self.event("end", **result)
        print(line, flush=True)

    def close(self) -> None:
        for file in (self._metrics, self._validation, self._progress):
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({**values, "step": step})


def _start_wandb(config: TrainConfig, run_id: str) -> Any:
    import wandb

    run = wandb.init(
        id=run_id,  # checkpointed with the model, so every incarnation continues the same page
        resume="allow",
        project="ckptd",
        name=config.run_name,
        dir=str(config.output),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config={key: str(value) for key, value in asdict(config).items()},
    )
    # Steps done again after a resume are logged again; wandb's own step must not go back.
    run.define_metric("*", step_metric="step")
    return run
