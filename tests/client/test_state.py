"""The state codec: what goes in comes out, to the bit; what has no kind is refused with its path."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import struct
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import JsonValue

from ckptd.digests import canonical_json
from ckptd.errors import Corrupt, Invalid
from ckptd.manifest import Part
from ckptd_client import dtypes
from ckptd_client.state import Flat, flatten, unflatten
from ckptd_client.tree import MAX_DEPTH

torch.set_num_threads(1)

NUMPY_TYPE_STRINGS = [
    *(
        "|b1",
        "|i1",
        "|u1",
        "<i2",
        ">i2",
        "<u4",
        ">u8",
        "<i8",
        "<f2",
        ">f4",
        "<f8",
        ">f8",
        "<c8",
        ">c16",
        "<f16",
        "<c32",
    ),
    *("<M8[ns]", ">M8[D]", "<M8[25s]", "<M8", "<m8[us]", "|S1", "|S5", "<U3", ">U4", "|V7"),
]


def stored(flat: Flat) -> tuple[JsonValue, dict[str, torch.Tensor]]:
    """The tree as it comes out of a manifest, and the tensors' bytes."""
    part = Part(run="r", generation=1, save="g00000001-000000000001-a1", step=1, writer=0, shared=flat.tree)
    tree = Part.model_validate_json(part.stored()).shared
    return tree, {name: raw_bytes(source.data) for name, source in flat.tensors.items()}


def raw_bytes(data: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        flat = data.resolve_conj().resolve_neg().contiguous().reshape(-1)
        return flat.view(torch.uint8).clone()
    return torch.from_numpy(np.frombuffer(bytearray(data.tobytes()), np.uint8)) if data.nbytes else no_bytes()


def no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def round_trip(state: object) -> Any:
    return unflatten(*stored(flatten(state, "shared")))


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype and left.shape == right.shape and torch.equal(raw_bytes(left), raw_bytes(right))
        )
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        if left.dtype.char in "gG":  # x87 numbers carry padding of any content
            return bool(left == right) or bool(left != left and right != right)
        return bool(left.dtype == right.dtype) and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return vars_of(left) == vars_of(right) and same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return same([left.real, left.imag], [right.real, right.imag])
    return bool(left == right)


def vars_of(value: dict[Any, Any]) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


floats = st.floats(allow_nan=False) | st.binary(min_size=8, max_size=8).map(lambda b: float(struct.unpack("d", b)[0]))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
keys = texts | st.integers()
numpy_arrays = st.sampled_from(NUMPY_TYPE_STRINGS).flatmap(
    lambda name: hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).flatmap(
        lambda shape: st.binary(min_size=(n := math.prod(shape) * np.dtype(name).itemsize), max_size=n).map(
            lambda data: np.ndarray(shape, name, buffer=bytearray(data))
        )
    )
)
tensors = st.sampled_from(sorted(dtypes.TORCH)).flatmap(
    lambda name: hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3).flatmap(
        lambda shape: st.binary(min_size=(n := math.prod(shape) * dtypes.TORCH[name].itemsize), max_size=n).map(
            lambda data: tensor_of(data, name, shape)
        )
    )
)


def tensor_of(data: bytes, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else no_bytes()
    return raw.view(dtypes.TORCH[name]).view(shape)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    floats,
    st.tuples(floats, floats).map(lambda pair: complex(*pair)),
    texts,
    st.binary(max_size=600),
    st.binary(max_size=600).map(bytearray),
    st.sampled_from(list(dtypes.ALL_TORCH.values())),
    st.sampled_from(["cpu", "cuda:1", "meta", "mps"]).map(torch.device),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    numpy_arrays,
    tensors,
    hnp.arrays(st.sampled_from([n for n in NUMPY_TYPE_STRINGS if n[1] not in "SUV"]), ()).map(
        lambda array: array.astype(array.dtype.newbyteorder("="))[()]
    ),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_any_state_comes_back_to_the_bit(state: object) -> None:
    assert same(round_trip(state), state)


@given(st.binary(min_size=8, max_size=8))
def test_every_float_keeps_its_64_bits(data: bytes) -> None:
    value = struct.unpack("d", data)[0]
    assert struct.pack("d", round_trip([value])[0]) == struct.pack("d", value)


@pytest.mark.parametrize("name", sorted(dtypes.TORCH))
def test_every_torch_dtype_in_every_form(name: str) -> None:
    dtype = dtypes.TORCH[name]
    data = bytes(index * 37 % 256 for index in range(24 * dtype.itemsize))
    whole = tensor_of(data, name, (4, 6))
    state = {
        "whole": whole,
        "scalar": tensor_of(data[: dtype.itemsize], name, ()),
        "empty": [tensor_of(b"", name, (0,)), tensor_of(b"", name, (0, 3))],
        "view": whole[1:3],
    }
    back = round_trip(state)
    assert same(back, state)
    assert all(tensor.is_contiguous() for tensor in (back["whole"], back["view"]))


@pytest.mark.parametrize("name", NUMPY_TYPE_STRINGS)
def test_every_numpy_dtype_in_every_form(name: str) -> None:
    dtype = np.dtype(name)
    whole = np.ndarray((4, 6), dtype, buffer=bytearray(np.arange(24 * dtype.itemsize).astype(np.uint8) % 5))
    state = [whole, whole.T, whole[::2, ::-1], whole[0, 0:0], whole.reshape(-1)[:1].reshape(())]
    back = round_trip(state)
    assert same(back, state)
    assert all(array.flags.writeable for array in back)


def test_structured_arrays_without_objects() -> None:
    plain = np.array([(1, 2.5, "ab")], dtype=[("i", "<i4"), ("f", ">f8"), ("text", "U2")])
    nested = np.zeros(3, dtype=[("a", [("b", "u1", (2, 2)), ("when", "M8[s]")]), ("c", "f4")])
    aligned = np.zeros(2, dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True))
    back = round_trip([plain, nested, aligned, plain[0]])
    assert same(back, [plain, nested, aligned, plain[0]])
    assert back[2].dtype.itemsize == 16


@pytest.mark.parametrize(
    "value",
    [
        *(np.float32(0.1), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 + 2j)),
        *(np.str_("añ"), np.str_(""), np.bytes_(b"\x01\xff"), np.datetime64("2024-02-29"), np.timedelta64(5, "ms")),
        *(np.float16("nan"), np.datetime64("NaT"), np.longdouble("0.1"), np.void(b"abc")),
    ],
)
def test_numpy_scalars(value: np.generic) -> None:
    assert same(round_trip({"value": value}), {"value": value})


def test_only_the_elements_of_a_view_are_stored() -> None:
    base = torch.arange(1000.0)
    flat = flatten({"view": base[10:20], "strided": base[::100]}, "shared")
    assert [source.nbytes for source in flat.tensors.values()] == [40, 40]


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    back = round_trip([value.conj(), value.conj().imag])
    assert torch.equal(back[0], torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(back[1], torch.tensor([-2.0, 4.0]))
    assert not back[0].is_conj()


def test_parameters_come_back_as_plain_tensors_without_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    leaf = torch.ones(2, requires_grad=True)
    for back in round_trip([parameter, leaf, leaf * 2]):
        assert type(back) is torch.Tensor
        assert not back.requires_grad


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    state = {
        "embed": weight,
        "head": {"weight": weight.detach()},
        "flat": weight.detach().view(6),
        "copy": weight + 0,
    }
    flat = flatten(state, "shared")
    assert set(flat.tensors) == {"shared/embed", "shared/flat", "shared/copy"}
    back = unflatten(*stored(flat))
    assert isinstance(back, dict)
    assert back["embed"] is back["head"]["weight"]
    assert back["copy"] is not back["embed"]
    assert same(back["flat"], state["flat"])


def test_the_same_memory_with_another_reading_is_not_tied() -> None:
    base = torch.arange(4, dtype=torch.int32)
    same_place = [base, base.view(torch.float32), base.view(2, 2), base.view(2, 2).T, base[:2], base[1:3]]
    assert len(flatten(same_place, "shared").tensors) == len(same_place)
    empty = torch.empty(0)
    assert len(flatten([empty, empty, torch.empty(0)], "shared").tensors) == 2


def test_tied_arrays() -> None:
    array = np.arange(3)
    back = round_trip([array, array, array.copy()])
    assert back[0] is back[1]
    assert back[0] is not back[2]


def test_state_dicts_of_modules_keep_their_metadata() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    back = round_trip({"model": state})["model"]
    assert same(back, state)
    assert back._metadata == vars(state)["_metadata"]
    assert type(back._metadata) is OrderedDict


def test_counters_keep_order_and_odd_counts() -> None:
    counter = Counter({30: 1, 80: 2, "x": -1, 5: 0})
    back = round_trip(counter)
    assert type(back) is Counter
    assert list(back.items()) == list(counter.items())


def test_names_are_readable_escaped_and_unique() -> None:
    one = torch.zeros(1)
    state = {
        "model": {"encoder.weight": one, 1: one + 1, "1": one + 2, "a/b%\n": one + 3, "à": one + 4},
        "l": [one + 5],
    }
    flat = flatten(state, "shared")
    assert list(flat.tensors) == [
        *("shared/model/encoder.weight", "shared/model/1", "shared/model/1~1", "shared/model/a%2Fb%25%0A"),
        *("shared/model/à", "shared/l/0"),
    ]
    assert same(unflatten(*stored(flat)), state)
    long = flatten({"x" * 5000: one, "x" * 5000 + "y": one + 1}, "shared")
    assert len(long.tensors) == 2
    assert max(map(len, long.tensors)) < 200


def test_mixed_keys_and_their_order_survive_sorted_json() -> None:
    state = {"b": 1, 2: 2, "a": 3, "2": 4, -(2**70): 5}
    tree = json.loads(canonical_json(flatten(state, "shared").tree))
    assert list(unflatten(tree, {}).items()) == list(state.items())  # type: ignore[attr-defined]


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: int


class Text(str):
    pass


class MyTensor(torch.Tensor):
    pass


@dataclasses.dataclass
class Config:
    rate: float = 0.1


REFUSED: list[tuple[Any, str]] = [
    ({1, 2}, "set is not supported"),
    (frozenset(), "frozenset is not supported"),
    (Colour.RED, "Colour is not supported"),
    (Pair(1, 2), "Pair is not supported"),
    (Text("x"), "Text is not supported"),
    (Config(), "Config is not supported"),
    (print, "builtin_function_or_method is not supported"),
    (lambda: None, "function is not supported"),
    (range(3), "range is not supported"),
    (collections.defaultdict(int), "defaultdict is not supported"),
    (collections.deque(), "deque is not supported"),
    (Config, "type is not supported"),
    (torch.nn.Linear(1, 1), "Linear is not supported"),
    (np.random.default_rng(0), "Generator is not supported"),
    (np.dtype("f8"), "dtypes.Float64DType is not supported"),
    (np.ma.masked_array([1], [True]), "MaskedArray is not supported"),
    (torch.zeros(2).as_subclass(MyTensor), "MyTensor is not supported"),
    (torch.nn.parameter.UninitializedParameter(), "UninitializedParameter is not supported"),
    (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    (torch.empty(2, device="meta"), "meta tensor"),
    (np.array([object()]), "numpy dtype object"),
    (np.zeros(1, dtype=[("a", "O")]), "is not supported; convert"),
    (np.array(["a"], dtype=np.dtypes.StringDType()), "StringDType"),
    (np.zeros(1, dtype=[(("title", "a"), "i4")]), "is not supported; convert"),
    (np.str_("a\0"), "would not come back exactly"),
    ("\ud800", "not valid Unicode"),
    ({"\udfff": 1}, "not valid Unicode"),
    ({True: 1}, "its key True is a bool"),
    ({None: 1}, "its key None is a NoneType"),
    ({(1, 2): 1}, "its key (1, 2) is a tuple"),
    ({1.5: 1}, "its key 1.5 is a float"),
    ({Text("k"): 1}, "Text; keys are str or int"),
]


@pytest.mark.parametrize(("value", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_anything_else_is_refused_with_its_path(value: Any, reason: str) -> None:
    with pytest.raises(Invalid) as caught:
        flatten({"a": [0, 1, 2, value]}, "shared")
    assert caught.value.message.startswith("cannot save app_state['a'][3]")
    assert reason in caught.value.message
    assert caught.value.fields["path"].startswith("app_state['a'][3]")


def test_the_message_says_what_is_supported() -> None:
    with pytest.raises(
        Invalid, match=r"^cannot save app_state\['a'\]\[3\]: set is not supported; supported are None,"
    ):
        flatten({"a": [0, 0, 0, set()]}, "shared")


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_quantised_tensors_are_refused() -> None:
    value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(Invalid, match="quantized tensor"):
        flatten([value], "shared")


def test_freed_storage_is_refused() -> None:
    value = torch.ones(4)
    value.untyped_storage().resize_(0)
    with pytest.raises(Invalid, match="memory was freed"):
        flatten([value], "shared")


def test_an_ordered_dict_with_other_attributes_is_refused() -> None:
    value: OrderedDict[str, int] = OrderedDict()
    value.note = "lost"  # type: ignore[attr-defined]
    with pytest.raises(Invalid, match=r"attributes that would be lost: \['note'\]"):
        flatten(value, "shared")


def test_cycles_are_refused_and_shared_containers_are_not() -> None:
    shared = [1]
    assert round_trip([shared, shared, {"a": shared}]) == [[1], [1], {"a": [1]}]
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(Invalid, match=r"app_state\[1\]\['again'\]: the list contains itself"):
        flatten(cycle, "shared")


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for level in range(depth):
        value = {level: value}
    return value


def test_depth_is_bounded_in_both_directions() -> None:
    assert same(round_trip(nested(MAX_DEPTH)), nested(MAX_DEPTH))
    with pytest.raises(Invalid, match=f"more than {MAX_DEPTH} levels"):
        flatten(nested(MAX_DEPTH + 1), "shared")
    node: JsonValue = 1
    for _ in range(5000):
        node = [node]
    with pytest.raises(Corrupt, match=f"more than {MAX_DEPTH} levels"):
        unflatten({"version": 1, "state": node}, {})


def test_many_small_tensors_stay_compact() -> None:
    base = torch.arange(20_000.0)
    state = {"state": {index: {"exp_avg": tensor} for index, tensor in enumerate(base.unbind())}}
    flat = flatten(state, "shared/optimizer")
    text = canonical_json(flat.tree)
    assert len(text) < 100 * 20_000
    raw = dict(zip(flat.tensors, torch.split(base.view(torch.uint8), 4), strict=True))
    back: Any = unflatten(json.loads(text), raw)
    assert torch.equal(torch.stack([entry["exp_avg"] for entry in back["state"].values()]), base)
