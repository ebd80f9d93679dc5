"""What the client's tests share: a drive that several ranks see, each through faults of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.client.ranks import Drive

torch.set_num_threads(1)


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """A real folder as the shared drive. What the environment says to a client is out of sight."""
    settings = ("CKPTD_URL", "CKPTD_RUN", "CKPTD_TOKEN", "CKPTD_STORAGE", "CKPTD_JOB", "CKPTD_FAILPOINTS")
    for name in (*settings, "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return Drive(tmp_path / "drive", monkeypatch)
