"""Several real ranks under torchrun: they agree before training, and their steps are one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptd.testing.torchrun import Node

SCRIPT = Path(__file__).with_name("agreeing_rank.py")


def run_ranks(folder: Path, what: str, count: int) -> list[dict[str, Any]]:
    folder.mkdir()
    with Node([str(SCRIPT), str(folder), what], folder / "log", ranks=count, max_restarts=0) as node:
        assert node.wait(120) == 0, node.output()[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.e2e
def test_ranks_agree_on_split_and_vocabulary(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path / "agree", "agree", 2)
    assert ranks[0] == ranks[1]
    assert [(r["rank"], isinstance(r["pid"], int)) for r in ranks[0]["ranks"]] == [(0, True), (1, True)]
    assert ranks[0]["ranks"][0]["pid"] != ranks[0]["ranks"][1]["pid"]


@pytest.mark.e2e
def test_ranks_with_other_data_are_refused_everywhere(tmp_path: Path) -> None:
    ranks = run_ranks(tmp_path / "differ", "differ", 2)
    for rank in ranks:
        assert rank["refused"].startswith("the ranks hold different training data: rank 0 on ")
        assert "rank 1 on" in rank["refused"]


@pytest.mark.e2e
def test_two_ranks_do_the_same_epoch_as_one(tmp_path: Path) -> None:
    """49 samples in global batches of 12; of the last one, a single sample, one rank's share is empty."""
    (alone,) = run_ranks(tmp_path / "one", "epoch", 1)
    first, second = run_ranks(tmp_path / "two", "epoch", 2)
    assert first == second
    assert alone["sizes"] == first["sizes"] == [12, 12, 12, 12, 1]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-3, abs=1e-3)
