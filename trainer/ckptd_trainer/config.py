"""The settings of one training run: one frozen dataclass, its docstrings are the command line's help.

`parse_config` runs first in every process. It reads nothing but the command line and the environment, so
that a wrong setting costs no time and is reported before a process group forms.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ckptd.errors import Invalid
from ckptd.layout import check_run


@dataclass(frozen=True)
class TrainConfig:
    url: str = ""
    """The service (http://...) or the storage itself (file://..., s3://...); default: CKPTD_URL."""
    run_name: str = ""
    """Under this name the run's checkpoints are found again; default: CKPTD_RUN."""
    spool: str = ""
    """Folder on the local disk for saves while the storage is away; default: CKPTD_SPOOL, else none."""
    spool_saves: int = 2
    """Most saves that wait there."""
    start_deadline_seconds: float = 600.0
    """How long a start waits for the storage and the other ranks."""
    output: Path = Path("output")
    """Folder for metrics, progress and the result; only rank 0 writes there."""

    dataset: str = "gettext"
    """gettext (installed catalogues, no download), opus_books (Hugging Face), or a two-column .tsv file."""
    limit: int = 4000
    """Number of sentence pairs to use, drawn by the seed; 0: all."""
    validation_fraction: float = 0.05
    """Part of the pairs that is kept from training."""
    max_length: int = 24
    """Longest sentence in tokens, with [SOS] or [EOS]; longer pairs are left out."""
    vocab_size: int = 4000
    """Most words a tokenizer knows, for each language."""

    epochs: int = 3
    """How often the training pairs are gone through."""
    max_steps: int = 0
    """Stop after this many optimizer steps, counted over all incarnations; 0: only epochs count."""
    micro_batch: int = 32
    """Pairs per rank and forward pass."""
    accumulate: int = 1
    """Micro batches per optimizer step."""
    save_every: int = 20
    """Optimizer steps between two checkpoints; one is saved at every epoch's end too."""
    seed: int = 0
    """Decides split, shuffling, initial weights and dropout."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    collective_timeout_seconds: float = 300.0
    """How long a rank waits for the others before it gives up."""

    d_model: int = 64
    """Width of the model."""
    heads: int = 4
    """Attention heads; must divide d_model."""
    layers: int = 2
    """Layers in the encoder and in the decoder."""
    d_feed_forward: int = 256
    """Width of the feed-forward blocks."""
    dropout: float = 0.1
    """Part of the activations that is dropped in training."""

    lr: float = 2e-3
    """Highest learning rate, reached when the warm-up ends; then it falls with 1/sqrt(step)."""
    warmup_steps: int = 50
    """Optimizer steps over which the learning rate rises."""
    label_smoothing: float = 0.1
    """Part of each target that is spread over the other words."""
    clip_norm: float = 1.0
    """Longest gradient; 0: not clipped."""

    validate_every: int = 1
    """Epochs between two validations on rank 0; 0: never."""
    validate_samples: int = 64
    """Pairs to translate in a validation. The other ranks wait meanwhile, so keep it short."""
    tensorboard: bool = True
    """Write TensorBoard events when the package is installed."""
    wandb: bool = False
    """Log to Weights & Biases, offline unless WANDB_MODE says otherwise."""

    def __post_init__(self) -> None:
        """Check each setting and each combination; raises `Invalid` that names the field."""
        if not self.url:
            raise _invalid("url", self.url, "an address, by --url or CKPTD_URL, e.g. file:///data/ckptd")
        if not self.run_name:
            raise _invalid("run_name", self.run_name, "a name, by --run-name or CKPTD_RUN")
        check_run(self.run_name)
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise _invalid(name, getattr(self, name), "at least 1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise _invalid(name, getattr(self, name), "0 or more")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise _invalid(name, getattr(self, name), "from 0 to below 1")
        for name in ("lr", "collective_timeout_seconds", "start_deadline_seconds"):
            if not getattr(self, name) > 0:
                raise _invalid(name, getattr(self, name), "more than 0")
        if not 0 < self.validation_fraction < 1:
            raise _invalid("validation_fraction", self.validation_fraction, "between 0 and 1")
        if self.max_length < 3:
            raise _invalid("max_length", self.max_length, "at least 3: one word, [SOS] and [EOS]")
        if self.vocab_size < 5:
            raise _invalid("vocab_size", self.vocab_size, "at least 5: four special tokens and a word")
        if self.d_model % self.heads:
            raise _invalid("heads", self.heads, f"a divisor of d_model, which is {self.d_model}")
        if self.d_model % 2:
            raise _invalid("d_model", self.d_model, "an even number: positions are pairs of sine and cosine")
        if self.device not in ("auto", "cpu", "cuda"):
            raise _invalid("device", self.device, "auto, cpu or cuda")
        if self.dataset not in ("gettext", "opus_books") and not self.dataset.endswith(".tsv"):
            raise _invalid("dataset", self.dataset, "gettext, opus_books or the path of a .tsv file")
        if self.wandb and importlib.util.find_spec("wandb") is None:
            do = "pip install wandb, or leave --wandb out: metrics.csv is always written."
            raise Invalid("setting wandb: the package wandb is not installed", do=do, field="wandb")
        if self.output.exists() and not self.output.is_dir():
            raise _invalid("output", str(self.output), "a folder, and this is a file")

    def contract(self) -> dict[str, bool | int | float | str]:
        """What decides how training goes on, to be recorded with each checkpoint and compared at each start."""
        return {name: getattr(self, name) for name in (*STRICT, *_CONTRACT)}


STRICT = ("seed", "dataset", "limit", "max_length", "d_model", "heads", "layers", "d_feed_forward")
"""Another value of these is another training; a start with one is refused."""
_CONTRACT = (
    "micro_batch",
    "accumulate",
    "lr",
    "warmup_steps",
    "clip_norm",
    "dropout",
    "label_smoothing",
    "validation_fraction",
    "vocab_size",
)
_FROM_ENVIRONMENT = {"url": "CKPTD_URL", "run_name": "CKPTD_RUN", "spool": "CKPTD_SPOOL"}
_AT_LEAST_ONE = (
    "epochs",
    "micro_batch",
    "accumulate",
    "save_every",
    "spool_saves",
    "d_model",
    "heads",
    "layers",
    "d_feed_forward",
)
_NOT_NEGATIVE = ("limit", "max_steps", "warmup_steps", "clip_norm", "validate_every", "validate_samples")


def parse_config(argv: Sequence[str]) -> TrainConfig:
    """The checked settings of a command line (without the program's name). Any process; raises `Invalid`."""
    parser = argparse.ArgumentParser(
        prog="ckptd_trainer",
        description="Train an English-Italian Transformer that survives the loss of any process.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    help_texts = field_docs(TrainConfig)
    for field in fields(TrainConfig):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if field.name in _FROM_ENVIRONMENT:
            default = os.environ.get(_FROM_ENVIRONMENT[field.name], "")
        text = help_texts[field.name].replace("%", "%%") + ("" if default == "" else " (%(default)s)")
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        else:
            parser.add_argument(flag, type=type(field.default), default=default, help=text, metavar="")
    try:
        found, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        name = (error.argument_name or "").lstrip("-").replace("-", "_")
        raise Invalid(f"setting {name}: {error.message}", field=name) from error
    if unknown:
        raise Invalid(f"unknown option {unknown[0]}", do="See `python -m ckptd_trainer --help`.", field=unknown[0])
    return TrainConfig(**vars(found))


def field_docs(settings: type) -> dict[str, str]:
    """The docstring under each field of a settings class, by field name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            docs[field.target.id] = str(text.value.value)
    return docs


def _invalid(field: str, found: object, expected: str) -> Invalid:
    return Invalid(f"setting {field} is {found!r}: expected {expected}", field=field)
