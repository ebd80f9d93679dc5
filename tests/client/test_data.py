"""Every sample exactly once per epoch, whatever happens to the world."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import Invalid
from ckptd_client.data import GlobalBatch, ResumableSampler, RngState, seed_rank


def samplers(
    size: int, world: int, micro_batch: int, accumulate: int = 1, seed: int = 0, data_digest: str = ""
) -> list[ResumableSampler]:
    return [
        ResumableSampler(
            size,
            seed=seed,
            rank=rank,
            world=world,
            micro_batch=micro_batch,
            accumulate=accumulate,
            data_digest=data_digest,
        )
        for rank in range(world)
    ]


def trained(batches: list[GlobalBatch]) -> list[int]:
    return [sample for batch in batches for micro in batch.micro_batches for sample in micro]


incarnations = st.lists(
    st.tuples(
        st.integers(1, 5),  # world
        st.integers(1, 4),  # micro batch
        st.integers(1, 3),  # accumulation
        st.integers(0, 6),  # steps until the world changes
    ),
    min_size=1,
    max_size=6,
)


@given(size=st.integers(1, 60), seed=st.integers(0, 3), plan=incarnations)
def test_every_sample_once_per_epoch_at_any_sequence_of_world_sizes(
    size: int, seed: int, plan: list[tuple[int, int, int, int]]
) -> None:
    seen: dict[int, Counter[int]] = {}
    state = None
    for number, (world, micro_batch, accumulate, steps) in enumerate(plan):
        ranks = samplers(size, world, micro_batch, accumulate, seed)
        if state is not None:
            for sampler in ranks:
                sampler.load_state_dict(state)
        last = number == len(plan) - 1
        while steps > 0 or (last and ranks[0].consumed > 0):
            batches = [sampler.next_batch() for sampler in ranks]
            assert len({len(batch.micro_batches) for batch in batches}) == 1
            assert 1 <= len(batches[0].micro_batches) <= accumulate
            assert all(len(micro) <= micro_batch for batch in batches for micro in batch.micro_batches)
            assert Counter(trained(batches)) == Counter(batches[0].samples)
            assert len({(batch.epoch, batch.samples, batch.ends_epoch) for batch in batches}) == 1
            seen.setdefault(batches[0].epoch, Counter()).update(trained(batches))
            steps -= 1
        states = [sampler.state_dict() for sampler in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert list(seen) == list(range(len(seen)))
    for counts in seen.values():
        assert counts == Counter(range(size))


@given(size=st.integers(1, 40), cut=st.integers(0, 20), world=st.integers(1, 4))
def test_a_resumed_sampler_hands_out_what_the_undisturbed_one_does(size: int, cut: int, world: int) -> None:
    (undisturbed, *_) = samplers(size, world, 3, 2)
    for _ in range(cut):
        undisturbed.next_batch()
    (resumed, *_) = samplers(size, world, 3, 2)
    resumed.load_state_dict(undisturbed.state_dict())
    assert [resumed.next_batch() for _ in range(10)] == [undisturbed.next_batch() for _ in range(10)]


def test_iteration_ends_with_the_epoch_and_set_epoch_keeps_the_place_in_the_current_one() -> None:
    (sampler,) = samplers(10, 1, 4)
    sampler.set_epoch(0)
    first = sampler.next_batch()
    sampler.set_epoch(0)
    rest = list(sampler)
    assert sorted(trained([first, *rest])) == list(range(10))
    assert [batch.ends_epoch for batch in rest] == [False, True]
    assert (sampler.epoch, sampler.consumed, sampler.samples_seen) == (1, 0, 10)
    sampler.set_epoch(5)
    assert {batch.epoch for batch in sampler} == {5}


def test_epochs_and_seeds_shuffle_differently() -> None:
    (one,) = samplers(50, 1, 50, seed=1)
    (two,) = samplers(50, 1, 50, seed=2)
    orders = [one.next_batch().samples, one.next_batch().samples, two.next_batch().samples]
    assert len(set(orders)) == 3


def test_a_short_last_batch_leaves_some_micro_batches_empty() -> None:
    batches = [sampler.next_batch() for sampler in samplers(5, 4, 1, 2)]
    assert [tuple(map(len, batch.micro_batches)) for batch in batches] == [(1, 1), (1, 0), (1, 0), (1, 0)]


@pytest.mark.parametrize("field", ["size", "seed", "data_digest", "order_digest"])
def test_a_position_in_other_data_is_refused_by_name(field: str) -> None:
    (sampler,) = samplers(10, 1, 2, data_digest="aa")
    state = sampler.state_dict() | {field: "other"}
    with pytest.raises(Invalid, match=f"the checkpoint's {field} is 'other'") as caught:
        sampler.load_state_dict(state)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    ("size", "world", "rank", "micro_batch", "field"),
    [(0, 1, 0, 1, "size"), (5, 0, 0, 1, "world"), (5, 2, 2, 1, "rank"), (5, 1, 0, 0, "micro_batch")],
)
def test_wrong_arguments_are_refused_by_name(size: int, world: int, rank: int, micro_batch: int, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        ResumableSampler(size, seed=0, rank=rank, world=world, micro_batch=micro_batch)
    assert caught.value.fields["field"] == field


def test_random_numbers_go_on_where_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    seed_rank(7, 3, 1)
    draw()
    state = RngState().state_dict()
    expected = draw()
    draw()
    RngState().load_state_dict(state)
    assert draw() == expected


def test_a_seed_is_another_one_for_each_rank_and_step() -> None:
    drawn = set()
    for place in [(7, 3, 0), (7, 3, 1), (7, 4, 0), (8, 3, 0)]:
        seed_rank(*place)
        drawn.add((random.random(), float(np.random.random()), float(torch.rand(()))))
    assert len(drawn) == 4
