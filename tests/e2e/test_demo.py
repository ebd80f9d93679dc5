"""The demo, as a user starts it, with fewer steps: two nodes, a killed rank, a killed node, equal losses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.storage import open_storage
from ckptd.testing.auditor import Auditor

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize("storage", ["folder", "s3"])
def test_the_demo_holds_what_it_promises(tmp_path: Path, storage: str) -> None:
    folder = tmp_path / "demo"
    options = ["--quick", "--storage", storage, "--output", str(folder)]
    command = [sys.executable, "-m", "ckptd_trainer.demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "steps where the losses differ: 0 of" in done.stdout
    assert "FAILED" not in done.stdout
    if storage == "folder":
        for run in ("undisturbed", "disturbed"):
            Auditor(open_storage(f"file://{folder}/shared-drive"), run).assert_clean()
