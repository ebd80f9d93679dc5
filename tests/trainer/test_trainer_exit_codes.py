"""What `python -m ckptd_trainer` ends with tells whoever restarts it what to do. Real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ckptd.cli.options import EXIT_CODES as COMMAND_CODES
from ckptd.ledger import Ledger
from ckptd.storage import init_root, open_storage
from ckptd.testing.processes import ServiceProcess
from ckptd_client import CheckpointClient, CkptdError, InUse
from ckptd_trainer.train import exit_code
from tests.homes import Stored, spoil

RUN = "run"
SMALL = ["--limit=150", "--d-model=16", "--heads=2", "--layers=1", "--d-feed-forward=16", "--max-length=12"]
SHORT = ["--device=cpu", "--save-every=1", "--max-steps=2", "--validate-every=0", "--no-tensorboard"]


@pytest.fixture
def home(tmp_path: Path) -> str:
    (tmp_path / "root").mkdir()
    init_root(f"file://{tmp_path}/root")
    return f"file://{tmp_path}/root"


def trained(
    folder: Path, url: str, options: Sequence[str] = (), *, before: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """A whole trainer process; `before` is done in it first."""
    known = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "CKPTD_URL",
        "CKPTD_RUN",
        "CKPTD_SPOOL",
        "CKPTD_STORAGE",
        "CKPTD_JOB",
    )
    clean = {name: value for name, value in os.environ.items() if name not in known}
    arguments = [f"--url={url}", f"--run-name={RUN}", f"--output={folder / 'out'}", *SMALL, *SHORT, *options]
    start = ["-m", "ckptd_trainer"]
    if before:
        start = [
            "-c",
            f"{before}\nimport runpy\nrunpy.run_module('ckptd_trainer', run_name='__main__', alter_sys=True)",
        ]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip


def test_the_numbers_are_those_of_the_command() -> None:
    for kind, code in COMMAND_CODES.items():
        assert exit_code(kind("planned")) == code
    assert exit_code(InUse("planned")) == 9
    assert exit_code(CkptdError("planned")) == 1


def test_done_is_0_with_a_spool_too(tmp_path: Path, home: str) -> None:
    done = trained(tmp_path, home, [f"--spool={tmp_path / 'spool'}"])
    assert done.returncode == 0, done.stderr
    assert [c.step for c in Ledger(open_storage(home)).checkpoints(RUN)] == [1, 2]
    assert list((tmp_path / "spool").iterdir()) == []


def test_an_invalid_call_is_2(tmp_path: Path, home: str) -> None:
    assert trained(tmp_path, home, ["--spool-saves=0"]).returncode == 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "file:///nowhere/at/all"])
def test_a_storage_that_is_away_at_the_start_is_4_and_nothing_starts_from_zero(tmp_path: Path, url: str) -> None:
    done = trained(tmp_path, url, ["--start-deadline-seconds=0.5"])
    assert done.returncode == 4, done.stderr
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in done.stderr


def test_fenced_is_5(tmp_path: Path, home: str) -> None:
    """A younger incarnation starts while this one is about to commit its first save."""
    overtake = f"""
from ckptd import failpoints
from ckptd_client import CheckpointClient

def overtake():
    if not done:
        done.append(1)
        with CheckpointClient({home!r}, {RUN!r}, takeover=True) as other:
            other.latest()

done = []
failpoints._hooks["before-commit"] = overtake
"""
    done = trained(tmp_path, home, before=overtake)
    assert done.returncode == 5, done.stderr
    assert "younger" in done.stderr or "started" in done.stderr


def test_no_valid_checkpoint_is_6(tmp_path: Path, home: str) -> None:
    with CheckpointClient(home, RUN) as client:
        client.restore({"w": torch.zeros(4)})
        client.save({"w": torch.ones(4)}, step=1, wait=True)
    storage = open_storage(home)
    ledger = Ledger(storage)
    (ref,) = ledger.manifest(ledger.checkpoint_at(RUN, 1).manifest).objects()
    spoil(Stored(storage, ref.key), cut=True)
    done = trained(tmp_path, home)
    assert done.returncode == 6, done.stderr
    assert "what to do: " in done.stderr


def test_in_use_is_9(tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_JOB", "another-job")
    no_wait = "from ckptd_client import incarnation\nincarnation.IN_USE_SECONDS = 0.0"
    with ServiceProcess(home, log=tmp_path / "service.log") as service, CheckpointClient(service.url, RUN) as other:
        other.latest()
        done = trained(tmp_path, service.url, before=no_wait)
    assert done.returncode == 9, done.stderr
    assert "another-job" in done.stderr


def test_a_fault_in_the_program_is_1(tmp_path: Path, home: str) -> None:
    broken = "from ckptd_trainer.learner import Learner\nLearner.warm_up = None"
    done = trained(tmp_path, home, before=broken)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
