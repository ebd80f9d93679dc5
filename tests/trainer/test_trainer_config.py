"""Settings are checked before any work, and each has its help."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ckptd.errors import Corrupt, Fenced, Invalid, Unreachable
from ckptd_trainer.config import TrainConfig, field_docs, parse_config
from ckptd_trainer.place import find_place, warn_about_restarts
from ckptd_trainer.train import exit_code

GIVEN = ["--url", "file:///data", "--run-name", "demo"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPTD_URL", "CKPTD_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)


def test_every_setting_has_its_docstring() -> None:
    docs = field_docs(TrainConfig)
    assert set(docs) == {field.name for field in fields(TrainConfig)}
    assert all(text.endswith(".") for text in docs.values())


def test_options_and_defaults() -> None:
    config = parse_config([*GIVEN, "--micro-batch", "4", "--lr", "0.5", "--no-tensorboard", "--output", "out"])
    expected = TrainConfig(
        url="file:///data", run_name="demo", micro_batch=4, lr=0.5, tensorboard=False, output=Path("out")
    )
    assert config == expected


def test_url_and_run_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_URL", "http://service:1")
    monkeypatch.setenv("CKPTD_RUN", "from-env")
    config = parse_config(["--run-name", "given"])
    assert (config.url, config.run_name) == ("http://service:1", "given")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--url", ""], "url"),
        (["--run-name", ""], "run_name"),
        (["--run-name", "Upper/Case"], "run"),
        (["--epochs", "0"], "epochs"),
        (["--epochs", "many"], "epochs"),
        (["--accumulate", "-1"], "accumulate"),
        (["--max-steps", "-1"], "max_steps"),
        (["--dropout", "1"], "dropout"),
        (["--label-smoothing", "nan"], "label_smoothing"),
        (["--lr", "0"], "lr"),
        (["--lr", "nan"], "lr"),
        (["--validation-fraction", "1"], "validation_fraction"),
        (["--heads", "3"], "heads"),
        (["--d-model", "5", "--heads", "5"], "d_model"),
        (["--max-length", "2"], "max_length"),
        (["--vocab-size", "4"], "vocab_size"),
        (["--device", "tpu"], "device"),
        (["--dataset", "wikipedia"], "dataset"),
        (["--output", __file__], "output"),
        (["--epoch", "3"], "--epoch"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(options: list[str], field: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_config([*GIVEN, *options])
    assert caught.value.fields["field"] == field


def test_wandb_without_its_package_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(Invalid, match="the package wandb is not installed"):
        parse_config([*GIVEN, "--wandb"])


def test_the_command_exits_with_2_and_one_message() -> None:
    command = [sys.executable, "-m", "ckptd_trainer", *GIVEN, "--heads", "7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == "setting heads is 7: expected a divisor of d_model, which is 64"
    assert "Traceback" not in done.stderr


def test_exit_codes_say_what_to_do_next() -> None:
    errors = [Invalid("x"), Fenced("x"), Unreachable("x"), Corrupt("x")]
    assert [exit_code(error) for error in errors] == [2, 5, 4, 6]


def test_the_place_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (find_place("cpu").rank, find_place("cpu").world, find_place("cpu").backend) == (0, 1, "gloo")
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    place = find_place("cpu")
    assert (place.rank, place.local_rank, place.world, place.is_first) == (5, 1, 8, False)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4096")
    with pytest.raises(Invalid, match="local rank 4096 has no GPU"):
        find_place("cuda")


def test_restarts_without_a_store_of_their_own_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    warn_about_restarts(find_place("cpu"))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    warn_about_restarts(find_place("cpu"))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    warn_about_restarts(find_place("cpu"))
    assert capsys.readouterr().err == ""
