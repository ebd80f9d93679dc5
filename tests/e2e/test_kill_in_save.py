"""kill -9 of rank 0 at every named place of a save: what does the next start get?"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ckptd.ledger import Ledger
from ckptd.storage import open_storage
from ckptd.testing.auditor import Auditor
from tests.e2e.processes import Loop

pytestmark = pytest.mark.e2e

# The commit of step 4 is the sixth record of a new run: created, opened, started, ready, commit of step 2, this.
PLACES = [
    ("payload-begin?step=4", 2),
    ("payload-written?step=4", 2),
    ("part-written?step=4", 2),
    ("manifest-written?step=4", 2),
    ("before-commit?step=4", 2),
    ("slot-begin?seq=6", 2),
    ("slot-filled?seq=6", 4),
    ("after-commit?step=4", 4),
]


@pytest.mark.parametrize(("place", "resumed"), PLACES, ids=[place for place, _ in PLACES])
def test_kill_in_a_save(tmp_path: Path, home: str, place: str, resumed: int) -> None:
    with Loop(tmp_path, home, "run", failpoints=f"{place}:kill") as first:
        assert first.end() == -signal.SIGKILL, first.output()
        assert [event["step"] for event in first.events("saved")] == [2]
    with Loop(tmp_path, home, "run") as second:
        assert second.end() == 0, second.output()
        (start,) = second.events("start")
        assert (start["step"], start["generation"], start["seen"]) == (resumed, 2, resumed * 4)
    storage = open_storage(home)
    assert [c.step for c in Ledger(storage).checkpoints("run")] == list(range(2, resumed + 1, 2)) + list(
        range(resumed + 2, 7, 2)
    )
    Auditor(storage, "run").assert_clean(acknowledged=[2, 6])


def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path: Path, home: str) -> None:
    """Weights to the last bit, random numbers included."""
    with Loop(tmp_path, home, "calm") as calm:
        assert calm.end() == 0, calm.output()
    with Loop(tmp_path, home, "killed", failpoints="manifest-written?step=4:kill") as killed:
        assert killed.end() == -signal.SIGKILL, killed.output()
    with Loop(tmp_path, home, "killed") as resumed:
        assert resumed.end() == 0, resumed.output()
    assert resumed.events("done")[0]["weights"] == calm.events("done")[0]["weights"]
