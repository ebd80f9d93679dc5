"""A state that all ranks hold alike is divided the same way by all of them, and evenly."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd_client.dividing import Division, alike, owners
from ckptd_client.state import flatten

SIZES = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 10**9), max_size=40)


@given(SIZES, st.integers(1, 9), st.randoms(use_true_random=False))
def test_each_tensor_has_one_owner_whatever_the_order(sizes: dict[str, int], writers: int, random: object) -> None:
    names = list(sizes)
    random.shuffle(names)  # type: ignore[attr-defined]
    found = owners(sizes, writers)
    assert found == owners({name: sizes[name] for name in names}, writers)
    assert found.keys() == sizes.keys()
    assert set(found.values()) <= set(range(writers))


@given(SIZES, st.integers(1, 9))
def test_no_writer_has_much_more_than_another(sizes: dict[str, int], writers: int) -> None:
    """The fullest has at most one tensor more than a fair share."""
    loads = [0] * writers
    for name, writer in owners(sizes, writers).items():
        loads[writer] += sizes[name]
    assert max(loads) <= sum(sizes.values()) / writers + max(sizes.values(), default=0)


def test_the_shares_of_all_ranks_are_the_state_once() -> None:
    state = {"a": torch.zeros(10), "b": [torch.ones(3, 3), torch.ones(7)], "n": 3, "tied": None}
    state["tied"] = state["a"]
    flats = [Division(3).share(flatten(state, "shared"), writer) for writer in range(3)]
    whole = flatten(state, "shared")
    assert flats[0].tree == whole.tree
    assert [flat.tree for flat in flats[1:]] == [None, None]
    names = [name for flat in flats for name in flat.tensors]
    assert sorted(names) == sorted(whole.tensors)
    assert all(flat.tensors for flat in flats)


def test_a_division_follows_a_state_that_grows() -> None:
    division = Division(2)
    assert list(division.share(flatten({"a": torch.zeros(4)}, "shared"), 0).tensors) == ["shared/a"]
    grown = flatten({"a": torch.zeros(4), "b": torch.zeros(8)}, "shared")
    assert list(division.share(grown, 0).tensors) == ["shared/b"]
    assert list(division.share(grown, 1).tensors) == ["shared/a"]


def test_what_is_alike_has_the_same_names_dtypes_and_shapes() -> None:
    def form(**state: object) -> str:
        return alike(flatten(state, "shared").tensors)

    same = form(a=torch.zeros(4), b=torch.ones(2))
    assert form(b=torch.zeros(2), a=torch.ones(4)) == same
    assert form(a=torch.zeros(4), c=torch.ones(2)) != same
    assert form(a=torch.zeros(4), b=torch.ones(2, dtype=torch.int32)) != same
    assert form(a=torch.zeros(2, 2), b=torch.ones(2)) != same
