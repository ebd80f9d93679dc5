"""What is borrowed is what a checkpoint holds with the same bytes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from ckptd import layout
from ckptd.manifest import ObjectRef
from ckptd_client.snapshot import PADDING, Captured, HostSnapshot
from ckptd_client.state import flatten
from ckptd_client.unchanged import FULL_AFTER, MAX_LENDERS, PAUSE, TRIES, Look, Unchanged

SNAPSHOT = HostSnapshot()
WRITTEN: dict[str, set[str]] = {}


@contextmanager
def captured(state: Mapping[str, torch.Tensor], unchanged: Unchanged) -> Iterator[Captured]:
    with SNAPSHOT.capture([flatten(dict(state), "shared")], last=unchanged.last) as capture:
        yield capture


def save(unchanged: Unchanged, name: str, state: Mapping[str, torch.Tensor], live: bool | None = True) -> Look:
    """One save from beginning to end."""
    with captured(state, unchanged) as capture:
        look = unchanged.look(layout.save_id(1, int(name[1:]), all_ranks=False, count=1), capture)
        unchanged.wrote(look, ref(name), capture, lambda: live)
        WRITTEN[look.save] = {entry.name for entry in capture.entries[: look.count]} - {PADDING}
    return look


def ref(name: str) -> ObjectRef:
    return ObjectRef(key=f"{name}.safetensors", size=1, chunk_bytes=1, chunks=("0",))


def borrowed(look: Look) -> dict[str, set[str]]:
    return {step_of(item.save): set(item.names) for item in look.borrowed}


def step_of(name: str) -> str:
    return f"s{int(name.split('-')[1])}"


def written(look: Look) -> set[str]:
    return WRITTEN[look.save]


def model(step: int, frozen: int = 0) -> dict[str, torch.Tensor]:
    """Two tensors that are trained, two that are not."""
    return {
        "base": torch.full((300,), float(frozen)),
        "embedding": torch.full((7, 9), 2.0 + frozen),
        "head": torch.full((40,), float(step)),
        "count": torch.tensor(step),
    }


FROZEN = {"shared/base", "shared/embedding"}


def test_what_did_not_change_is_borrowed_from_the_checkpoint_that_has_it() -> None:
    unchanged = Unchanged()
    first, second, third, fourth = (save(unchanged, f"s{step}", model(step)) for step in range(1, 5))
    assert borrowed(first) == borrowed(second) == {}  # seen to be the same, and not yet laid out for it
    assert borrowed(third) == {"s2": FROZEN}
    assert borrowed(fourth) == {"s2": FROZEN}  # never from one that borrowed itself
    assert written(fourth) == {"shared/head", "shared/count"}


def test_one_changed_bit_is_written() -> None:
    unchanged = Unchanged()
    for step in (1, 2, 3):
        save(unchanged, f"s{step}", model(step))
    state = model(4)
    state["base"].view(torch.int32)[17] ^= 1
    assert "shared/base" in written(save(unchanged, "s4", state))
    later = [save(unchanged, f"s{step}", {**model(step), "base": state["base"]}) for step in (5, 6)]
    assert "shared/base" in {name for names in borrowed(later[-1]).values() for name in names}


def test_the_same_bytes_as_another_dtype_or_shape_are_written() -> None:
    unchanged = Unchanged()
    for step in (1, 2, 3):
        save(unchanged, f"s{step}", model(step))
    other = {**model(4), "base": model(4)["base"].view(torch.int32), "embedding": model(4)["embedding"].reshape(9, 7)}
    assert borrowed(save(unchanged, "s4", other)) == {}


@pytest.mark.parametrize("live", [False, None])
def test_W10_only_a_checkpoint_lends(live: bool | None) -> None:
    """A save that failed, or whose outcome is not known yet, does not."""
    unchanged = Unchanged()
    looks = [save(unchanged, f"s{step}", model(step), live) for step in range(1, 6)]
    assert [borrowed(look) for look in looks] == [{}] * 5


def test_a_refused_borrower_makes_the_next_save_whole() -> None:
    unchanged = Unchanged()
    for step in (1, 2):
        save(unchanged, f"s{step}", model(step))
    assert borrowed(save(unchanged, "s3", model(3), live=False)) == {"s2": FROZEN}
    assert borrowed(save(unchanged, "s4", model(4))) == {}
    assert borrowed(save(unchanged, "s5", model(5))) == {"s4": FROZEN}


def test_something_is_always_written() -> None:
    unchanged = Unchanged()
    same = {"a": torch.ones(5), "b": torch.zeros(5)}
    looks = [save(unchanged, f"s{step}", same) for step in range(1, 5)]
    assert [len(written(look)) for look in looks] == [2, 2, 1, 1]


def test_where_nothing_stays_the_same_digests_are_left_out_for_a_while() -> None:
    unchanged = Unchanged()
    looks = [save(unchanged, f"s{step}", {"head": model(step)["head"]}) for step in range(1, TRIES + PAUSE + 3)]
    digested = [look.digested for look in looks]
    assert digested == [True] * (TRIES + 1) + [False] * PAUSE + [True]


def test_now_and_then_all_is_written_once_more() -> None:
    """So that not every checkpoint of a run hangs on the same object."""
    unchanged = Unchanged()
    looks = [save(unchanged, f"s{step}", model(step)) for step in range(1, FULL_AFTER + 10)]
    whole = [step_of(look.save) for look in looks if not look.borrowed]
    assert whole == ["s1", "s2", f"s{FULL_AFTER + 3}"]
    assert borrowed(looks[-1]) == {f"s{FULL_AFTER + 3}": FROZEN}


def test_off_means_off() -> None:
    unchanged = Unchanged(on=False)
    looks = [save(unchanged, f"s{step}", model(1)) for step in range(1, 5)]
    assert all(not look.borrowed and not look.digested for look in looks)


def test_a_checkpoint_hangs_on_few_others() -> None:
    """Layers that freeze one after the other lie in many saves: then all is written once more."""
    unchanged = Unchanged()
    count = MAX_LENDERS + 4
    most = 0
    for step in range(1, 4 * count):
        state = {f"layer{i:02}": torch.full((50,), float(min(step, 3 * i))) for i in range(count)}
        state["head"] = torch.full((1,), float(step))
        most = max(most, len(save(unchanged, f"s{step}", state).borrowed))
    assert 1 < most <= MAX_LENDERS
