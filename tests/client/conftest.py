"""What the client's tests share: a drive that several ranks see, each through faults of its own."""

from __future__ import annotations

import pytest

from ckptd_client import filling, incarnation, patience, sharing
from tests.client.ranks import Drive


@pytest.fixture
def drive(home: str, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """A real folder, then a real S3 server, as the shared drive. What the environment says to a client is out of
    sight."""
    settings = ("CKPTD_URL", "CKPTD_RUN", "CKPTD_TOKEN", "CKPTD_STORAGE", "CKPTD_JOB", "CKPTD_FAILPOINTS")
    for name in (*settings, "RANK", "WORLD_SIZE", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return Drive(home, monkeypatch)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second of waiting where the test is not about it."""
    monkeypatch.setattr(patience, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(patience, "JITTER_SECONDS", 0.02)
    monkeypatch.setattr(incarnation, "RETRY_SECONDS", 0.02)


@pytest.fixture
def impatient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage at the start is given up soon, while the ranks wait for each other as long as ever: so a slow machine
    changes nothing."""
    for module in (incarnation, filling, sharing):
        monkeypatch.setattr(module, "patiently", lambda call, deadline_seconds: patience.patiently(call, 0.1))
