"""4 ranks, then 2, one of them killed, then 4 again, then 3: every sample once per epoch, all the way."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.ledger import Ledger
from ckptd.storage import init_root, open_storage
from ckptd.testing.auditor import Auditor
from ckptd.testing.torchrun import Node
from ckptd_client.data import seed_rank
from tests.e2e.world_size_rank import LR, MICRO_BATCH, SEED, SIZE, Regression

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).with_name("world_size_rank.py")
# 41 samples, 3 for each rank and step: no global batch divides them.
# steps 1-3: 12 12 12 | 4-5: 5, 6 | 6-8 again and on: 6 6 6 | 9-11: 12 5, 12 | 12-15: 9 9 9 2
PHASES = [(4, 3, ""), (2, 8, "payload-begin?rank=1&step=6&generation=2:kill"), (4, 11, ""), (3, 15, "")]
STARTS = {1: (4, 0), 2: (2, 3), 3: (2, 5), 4: (4, 8), 5: (3, 11)}
"""Generation: world and step. The third one is torchrun's restart after the kill, with as many ranks."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The storage, and what all ranks of all incarnations said."""
    folder = tmp_path_factory.mktemp("world-size")
    url, events = f"file://{folder}/root", folder / "events.jsonl"
    init_root(url)
    for number, (ranks, until, failpoints) in enumerate(PHASES):
        command = [str(SCRIPT), url, "run", str(events), str(until)]
        log, env = folder / f"{number}.log", {"CKPTD_FAILPOINTS": failpoints, "CKPTD_JOB": "the-job"}
        with Node(command, log, ranks=ranks, env=env) as node:
            assert node.wait(200) == 0, node.output()[-4000:]
    return url, [json.loads(line) for line in events.read_text().splitlines()]


Story = tuple[str, list[dict[str, Any]]]


def starts(story: Story) -> list[dict[str, Any]]:
    return [event for event in story[1] if event["event"] == "start"]


def that_count(story: Story) -> list[dict[str, Any]]:
    """The steps that later ones build on, of all ranks: what a generation did beyond the next one's start is lost."""
    last = {generation: STARTS[generation + 1][1] for generation in STARTS if generation + 1 in STARTS}
    steps = [event for event in story[1] if event["event"] == "step"]
    return [event for event in steps if event["step"] <= last.get(event["generation"], math.inf)]


def test_all_ranks_start_from_the_same_step_whatever_the_world(story: Story) -> None:
    found = {
        generation: {(e["world"], e["step"]) for e in starts(story) if e["generation"] == generation}
        for generation in STARTS
    }
    assert found == {generation: {place} for generation, place in STARTS.items()}
    assert Counter(event["generation"] for event in starts(story)) == {g: world for g, (world, _) in STARTS.items()}
    storage = open_storage(story[0])
    assert [c.step for c in Ledger(storage).checkpoints("run")] == list(range(1, 16))
    Auditor(storage, "run").assert_clean(acknowledged=list(range(1, 16)))


def test_every_sample_is_trained_once_per_epoch_without_gap_or_double(story: Story) -> None:
    seen: dict[int, Counter[int]] = {}
    for event in that_count(story):
        seen.setdefault(event["epoch"], Counter()).update(event["samples"])
    assert seen == {epoch: Counter(range(SIZE)) for epoch in range(3)}
    sizes = Counter[int]()
    for event in that_count(story):
        sizes[event["step"]] += len(event["samples"])
    assert [sizes[step] for step in range(1, 16)] == [12, 12, 12, 5, 6, 6, 6, 6, 12, 5, 12, 9, 9, 9, 2]
    shares = [len(event["samples"]) for event in that_count(story) if event["step"] == 15]
    assert sorted(shares) == [0, 1, 1]  # the third rank had nothing, and took part
    assert max(len(event["samples"]) for event in that_count(story)) == MICRO_BATCH


def test_losses_are_those_of_one_process_on_the_same_batches(story: Story) -> None:
    """The gradient is the mean over the whole batch at any world size. A rate off by one step shows, too."""
    alone = Regression()
    for step in range(1, 16):
        events = [event for event in that_count(story) if event["step"] == step]
        samples = [sample for event in events for sample in event["samples"]]
        loss = alone.loss_sum(samples) / len(samples)
        for event in events:
            assert event["loss"] == pytest.approx(loss.item(), rel=1e-4)
            assert event["lr"] == pytest.approx(LR * 0.9 ** (step - 1), rel=1e-12)
        loss.backward()  # type: ignore[no-untyped-call]
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        alone.scheduler.step()


def test_each_rank_goes_on_with_its_own_random_numbers_or_with_derived_ones(story: Story) -> None:
    assert {event["generation"]: event["own"] for event in starts(story)} == {
        1: False, 2: False, 3: True, 4: False, 5: False,
    }  # fmt: skip
    drawn = {(e["generation"], e["rank"], e["step"]): e["drawn"] for e in story[1] if e["event"] == "step"}
    for generation in (1, 2, 4, 5):
        world, first = STARTS[generation]
        for rank in range(world):
            seed_rank(SEED, 0 if generation == 1 else generation, rank)
            assert drawn[generation, rank, first + 1] == float(torch.rand(()))
    for rank in range(2):  # the same world: as if nobody had been killed
        seed_rank(SEED, 2, rank)
        expected = [float(torch.rand(())) for _ in range(4, 9)]
        found = [drawn[2 if step <= 5 else 3, rank, step] for step in range(4, 9)]
        assert found == expected
    firsts = [drawn[generation, rank, STARTS[generation][1] + 1] for generation in (1, 2, 4, 5) for rank in range(2)]
    assert len(set(firsts)) == len(firsts)
