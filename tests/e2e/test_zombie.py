"""A process that was stopped while it saved, and wakes up when another has taken its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.ledger import Ledger
from ckptd.storage import open_storage
from ckptd.testing.auditor import Auditor
from ckptd.testing.processes import ServiceProcess
from tests.e2e.processes import Loop

pytestmark = pytest.mark.e2e


@contextmanager
def way(kind: str, home: str, folder: Path) -> Iterator[str]:
    """The URL that trainers are given: a service's or the storage's."""
    if kind == "direct":
        yield home
    else:
        with ServiceProcess(home, log=folder / "service.log") as service:
            yield service.url


@pytest.mark.parametrize("kind", ["direct", "service"])
@pytest.mark.parametrize("place", ["payload-begin", "part-written", "before-commit"])
def test_a_zombie_cannot_commit(tmp_path: Path, home: str, kind: str, place: str) -> None:
    with way(kind, home, tmp_path) as url, Loop(tmp_path, url, "run", failpoints=f"{place}?step=4:stop") as zombie:
        zombie.until_stopped()
        with Loop(tmp_path, url, "run") as healthy:
            assert healthy.end() == 0, healthy.output()
            assert healthy.events("start")[0]["step"] == 2
        zombie.go_on()
        assert zombie.end() == 3, zombie.output()
        assert "younger" in zombie.output() or "generation 2 started" in zombie.output()
    storage = open_storage(home)
    assert [(c.step, c.generation) for c in Ledger(storage).checkpoints("run")] == [(2, 1), (4, 2), (6, 2)]
    Auditor(storage, "run").assert_clean(acknowledged=[2, 4, 6])


def test_a_zombie_cannot_begin(tmp_path: Path, home: str) -> None:
    """Stopped after its attempt was opened and before it began: a younger one began meanwhile."""
    with Loop(tmp_path, home, "run", failpoints="slot-begin?seq=3:stop") as zombie:
        zombie.until_stopped()
        with Loop(tmp_path, home, "run") as healthy:
            assert healthy.end() == 0, healthy.output()
            assert healthy.events("start")[0] == {
                "event": "start",
                "rank": 0,
                "generation": 1,
                "step": 0,
                "world": 1,
                "seen": 0,
            }
        zombie.go_on()
        assert zombie.end() == 3, zombie.output()
    storage = open_storage(home)
    assert [(c.step, c.generation) for c in Ledger(storage).checkpoints("run")] == [(2, 1), (4, 1), (6, 1)]
    Auditor(storage, "run").assert_clean(acknowledged=[6])
