"""Model, steps and validation of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ckptd_client.data import RngState, seed_rank
from ckptd_trainer.config import TrainConfig
from ckptd_trainer.data import Pair, Split
from ckptd_trainer.evaluate import greedy_decode, validate
from ckptd_trainer.learner import Learner, lr_factor
from ckptd_trainer.model import Transformer, weights_digest
from ckptd_trainer.place import find_place, process_group
from ckptd_trainer.train import is_due, steps_left
from ckptd_trainer.vocab import EOS, PAD, SOS, build_vocabulary

WORDS = [("one", "uno"), ("two", "due"), ("three", "tre"), ("four", "quattro")]
PAIRS = tuple(Pair(f"{a} {b} {c}", f"{x} {y} {z}") for a, x in WORDS for b, y in WORDS for c, z in WORDS)
SPLIT = Split(training=PAIRS[:-4], validation=PAIRS[-4:])
VOCABULARY = build_vocabulary(SPLIT.training, 100)
CPU = torch.device("cpu")
CONFIG = TrainConfig(
    url="file:///unused",
    run_name="learner",
    device="cpu",
    micro_batch=8,
    d_model=32,
    heads=2,
    layers=1,
    d_feed_forward=64,
    dropout=0.0,
    lr=5e-3,
    warmup_steps=10,
)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _group() -> Iterator[None]:
    with process_group(find_place("cpu"), 60):
        yield


def learner(config: TrainConfig) -> Learner:
    return Learner(config, find_place("cpu"), SPLIT, VOCABULARY)


@pytest.mark.usefixtures("_group")
def test_accumulation_is_the_same_step_as_one_large_batch() -> None:
    large, small = learner(replace(CONFIG, micro_batch=12)), learner(replace(CONFIG, micro_batch=4, accumulate=3))
    for _ in range(6):  # 60 samples: the last batch of the epoch is full, the epoch goes round
        one, other = large.sampler.next_batch(), small.sampler.next_batch()
        assert one.samples == other.samples
        assert small.step(other)[0] == pytest.approx(large.step(one)[0], rel=1e-4)


@pytest.mark.usefixtures("_group")
def test_the_warm_up_changes_nothing_that_lasts() -> None:
    warm, cold = learner(CONFIG), learner(CONFIG)
    warm.warm_up()
    assert weights_digest(warm.model) == weights_digest(cold.model)
    assert warm.optimizer.state_dict()["state"] == {}
    assert all(parameter.grad is None for parameter in warm.model.parameters())
    assert warm.sampler.state_dict() == cold.sampler.state_dict()


@pytest.mark.usefixtures("_group")
def test_it_learns_to_translate() -> None:
    trained = learner(CONFIG)
    for _ in range(20):
        for batch in trained.sampler:
            trained.step(batch)
        trained.sampler.set_epoch(trained.sampler.epoch)
    before = torch.get_rng_state()
    found = validate(trained.model, SPLIT.validation, VOCABULARY, CONFIG.max_length, CPU)
    assert trained.model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert found.wer < 0.2
    assert found.cer < 0.2
    assert found.translations[0].source == SPLIT.validation[0].source
    assert found.translations[0].reference == SPLIT.validation[0].target
    assert len(found.translations) == len(SPLIT.validation)


def test_padding_and_later_words_do_not_change_a_position() -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG, *VOCABULARY.sizes).eval()
    source, target = torch.tensor([[SOS, 4, 5, EOS]]), torch.tensor([[SOS, 4, 5]])
    logits = model(source, target)
    padded = model(
        torch.cat([source, torch.full((1, 3), PAD)], dim=1), torch.cat([target, torch.tensor([[6, PAD]])], dim=1)
    )
    assert torch.allclose(logits, padded[:, :3], atol=1e-5)


def test_greedy_decoding_of_a_batch_is_that_of_each_row_and_ends() -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG, *VOCABULARY.sizes).eval()
    rows = [[SOS, 4, 5, EOS], [SOS, 6, EOS, PAD]]
    together = greedy_decode(model, torch.tensor(rows), 6)
    assert together.shape[1] <= 5
    for row, decoded in zip(rows, together.tolist(), strict=True):
        alone = greedy_decode(model, torch.tensor([[t for t in row if t != PAD]]), 6)[0].tolist()
        assert VOCABULARY.decode(decoded) == VOCABULARY.decode(alone)
        if EOS in decoded:
            assert set(decoded[decoded.index(EOS) + 1 :]) <= {PAD}


def test_the_weights_digest_sees_one_bit() -> None:
    model = Transformer(CONFIG, *VOCABULARY.sizes)
    before = weights_digest(model)
    with torch.no_grad():
        weight = next(model.parameters())
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    assert weights_digest(model) != before


def test_random_numbers_continue_and_differ_by_step_and_rank() -> None:
    rng = RngState(CPU)
    seed_rank(1, 2, 3)
    state = rng.state_dict()
    drawn = torch.rand(4)
    rng.load_state_dict(state)
    assert torch.equal(torch.rand(4), drawn)
    others = []
    for key in ((1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)):
        seed_rank(*key)
        others.append(torch.rand(4))
    assert torch.equal(others[0], drawn)
    assert len({tuple(other.tolist()) for other in others}) == 4


def test_the_learning_rate_rises_then_falls() -> None:
    factors = [lr_factor(done, 4) for done in range(16)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[15] == 0.5
    assert lr_factor(0, 0) == 1.0


@pytest.mark.usefixtures("_group")
def test_steps_left_counts_what_will_really_be_done() -> None:
    config = replace(CONFIG, micro_batch=7, accumulate=2, epochs=3)  # 60 samples in blocks of 14
    sampler = learner(config).sampler
    for done in range(15):
        assert steps_left(config, sampler, done) == 15 - done
        assert steps_left(replace(config, max_steps=4), sampler, done) == max(0, 4 - done)
        sampler.next_batch()
    assert steps_left(config, sampler, 15) == 0


def test_validation_is_due_every_so_many_epochs() -> None:
    assert [is_due(epoch, 2) for epoch in range(4)] == [False, True, False, True]
    assert not is_due(0, 0)
