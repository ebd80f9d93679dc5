"""The service dies, comes back, or was never there; two jobs use one run's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.ledger import Ledger
from ckptd.storage import open_storage
from ckptd.testing.auditor import Auditor
from ckptd.testing.processes import ServiceProcess
from ckptd_client import CheckpointClient, InUse, Unreachable, incarnation
from tests.e2e.processes import Loop

pytestmark = pytest.mark.e2e


def steps(home: str) -> list[int]:
    storage = open_storage(home)
    Auditor(storage, "run").assert_clean()
    return [c.step for c in Ledger(storage).checkpoints("run")]


def test_the_service_is_killed_and_training_goes_on(tmp_path: Path, home: str) -> None:
    """The client does the same on the storage, and comes back to the service when that is back."""
    gate = tmp_path / "gate"
    with ServiceProcess(home, log=tmp_path / "service.log") as service:
        with Loop(tmp_path, service.url, "run", "--hold-at", "3", str(gate)) as loop:
            loop.until("saved", step=2)
            service.kill()
            gate.touch()
            loop.until("saved", step=4)
            assert "going to the storage directly" in loop.output()
            service.restart()
            assert loop.end() == 0, loop.output()
        with Loop(tmp_path, service.url, "run", "--steps", "8") as again:
            assert again.end() == 0, again.output()
            assert again.events("start")[0]["step"] == 6
    assert steps(home) == [2, 4, 6, 8]


def test_the_service_is_killed_in_a_save_and_started_again(tmp_path: Path, home: str) -> None:
    """With the way around it forbidden, the save waits until the service is back. A restart loses nothing."""
    with ServiceProcess(home, log=tmp_path / "service.log") as service:
        options = ("--no-direct", "--steps", "4")
        with Loop(tmp_path, service.url, "run", *options, failpoints="before-commit?step=4:stop") as loop:
            loop.until_stopped()
            service.kill()
            loop.go_on()
            service.restart()
            assert loop.end() == 0, loop.output()
    assert steps(home) == [2, 4]


def test_without_any_service(tmp_path: Path, home: str) -> None:
    """A service URL where nobody listens, and a storage that is known: the run is trained all the same."""
    with Loop(tmp_path, "http://127.0.0.1:9", "run", env={"CKPTD_STORAGE": home}) as loop:
        assert loop.end() == 0, loop.output()
    assert steps(home) == [2, 4, 6]


def test_without_service_and_storage_nothing_starts_from_zero() -> None:
    with pytest.raises(Unreachable, match="does not answer"):
        CheckpointClient("http://127.0.0.1:9", "run", start_deadline_seconds=1.0)


def test_two_jobs_with_one_name(tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told who is there. If it insists, the first one is fenced and stops."""
    gate = tmp_path / "gate"
    monkeypatch.setattr(incarnation, "IN_USE_SECONDS", 0.0)
    monkeypatch.setenv("CKPTD_JOB", "another-job")
    with (
        ServiceProcess(home, log=tmp_path / "service.log") as service,
        Loop(tmp_path, service.url, "run", "--hold-at", "3", str(gate)) as first,
    ):
        first.until("saved", step=2)
        with CheckpointClient(service.url, "run") as second, pytest.raises(InUse, match="the-job"):
            second.latest()
        with CheckpointClient(service.url, "run", takeover=True) as third:
            found = third.latest()
            assert found is not None
            assert found.step == 2
        gate.touch()
        assert first.end() == 3, first.output()
    assert steps(home) == [2]
