"""Every operation, killed at its system calls and with calls that fail; see `sweep.py`. Needs strace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.testing.durable import DOUBTFUL, VOLATILE, unsure
from ckptd.testing.syscalls import Call
from tests.crash.scenes import SCENES

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 280


def sweep(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which has one thread and little to fork."""
    command = [sys.executable, "-m", "tests.crash.sweep", *options]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )


@pytest.mark.parametrize("scene", [scene.name for scene in SCENES])
def test_killed_anywhere_an_operation_is_whole_or_not_there(scene: str) -> None:
    done = sweep("--only", scene)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {scene} |" in done.stdout


@pytest.mark.parametrize(
    ("weakened", "what"),
    [("unsynced", "could be lost"), ("trusting", "could be lost"), ("straight", "write #1 killed: Corrupt")],
)
def test_the_sweep_notices_a_storage_that_is_broken(weakened: str, what: str) -> None:
    done = sweep("--only", "commit", "--weakened", weakened)
    assert done.returncode == 1, done.stdout + done.stderr
    assert what in done.stdout


def test_without_strace_the_sweep_fails() -> None:
    done = sweep("--only", "open", PATH="/nonexistent")
    assert done.returncode == 1
    assert "strace is not installed" in done.stderr


# The model of what a power cut could take


def calls(*lines: str) -> list[Call]:
    """`fsync(3</r/x>)` went well; with a `!` behind it, it failed."""
    found = []
    for line in lines:
        name, _, args = line.removesuffix("!").removesuffix(")").partition("(")
        found.append(Call(1, name, 1, args, "-1 EIO" if line.endswith("!") else "0"))
    return found


NEW = ('openat(5</r/tmp>, "n", O_WRONLY|O_CREAT|O_EXCL, 0444)', 'write(6</r/tmp/n>, "x", 1)')
NAMED = ('linkat(5</r/tmp>, "n", 7</r/log>, "1.json", 0)', 'unlinkat(5</r/tmp>, "n", 0)')
BYTES, NAMES = "fsync(6</r/tmp/n>)", "fsync(8</r/log>)"


def test_bytes_and_name_are_safe_after_both_fsyncs() -> None:
    assert unsure(calls(*NEW, BYTES, *NAMED, NAMES), "/r") == {}
    assert VOLATILE in unsure(calls(*NEW, BYTES, *NAMED), "/r")["log/1.json"]
    assert VOLATILE in unsure(calls(*NEW, *NAMED, NAMES), "/r")["log/1.json"]


def test_a_failed_fsync_is_not_mended_by_a_later_one() -> None:
    assert DOUBTFUL in unsure(calls(*NEW, BYTES, *NAMED, f"{NAMES}!", NAMES), "/r")["log/1.json"]
    assert DOUBTFUL in unsure(calls(*NEW, f"{BYTES}!", BYTES, *NAMED, NAMES), "/r")["log/1.json"]


def test_a_name_made_anew_is_safe_again() -> None:
    copy = (
        'openat(5</r/tmp>, "m", O_WRONLY|O_CREAT|O_EXCL, 0444)',
        'write(9</r/tmp/m>, "x", 1)',
        "fsync(9</r/tmp/m>)",
        'renameat2(5</r/tmp>, "m", 7</r/log>, "1.json", RENAME_EXCHANGE)',
    )
    before = (*NEW, BYTES, *NAMED, f"{NAMES}!")
    assert unsure(calls(*before, *copy, NAMES), "/r") == {}
    assert VOLATILE in unsure(calls(*before, *copy), "/r")["log/1.json"]


def test_a_new_folder_is_safe_once_the_one_above_is_fsynced() -> None:
    assert VOLATILE in unsure(calls('mkdirat(5</r>, "log", 0777)'), "/r")["log"]
    assert unsure(calls('mkdirat(5</r>, "log", 0777)', "fsync(6</r>)"), "/r") == {}
