"""The power goes at many moments of a small history, on ext4 and on xfs; see `power.py`. Needs root and nbdkit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ckptd.testing.drives import FileSystem, alone

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 280


def cut_power(*options: str) -> subprocess.CompletedProcess[str]:
    """In namespaces of its own: whatever happens, no mount and no process stays behind."""
    command = alone("tests.crash.power", *options)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_what_was_told_is_there_after_a_power_cut(kind: FileSystem) -> None:
    done = cut_power("--fs", kind)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {kind} | " in done.stdout


def test_a_storage_that_flushes_nothing_is_noticed() -> None:
    done = cut_power("--fs", "ext4", "--weakened", "unflushed")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "was told, and is not there" in done.stdout
