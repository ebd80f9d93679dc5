"""A tree from a stranger: bounded, never run, and every fault in it named with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from ckptd.errors import Corrupt, Invalid
from ckptd_client.state import flatten, unflatten
from ckptd_client.unflatten import _Builder, _Views

FOUR_BYTES = {"t": torch.arange(4, dtype=torch.uint8)}

BROKEN: list[tuple[JsonValue, str]] = [
    ({}, "a node of 0 keys"),
    ({"dict": [], "tuple": []}, "a node of 2 keys"),
    ({"dict": ["a"]}, "not a list of pairs"),
    ({"dict": {"a": 1}}, "not a list of pairs"),
    ({"dict": ["a", 1, "a", 2]}, "key 'a' twice"),
    ({"dict": [None, 1]}, "a key of type NoneType"),
    ({"dict": [True, 1]}, "a key of type bool"),
    ({"dict": [[1], 1]}, "a key of type list"),
    ({"tuple": 3}, "not a list"),
    ({"size": [1, -1]}, "not a shape"),
    ({"size": "3"}, "not a shape"),
    ({"size": [2**63]}, "not a shape"),
    ({"state_dict": []}, "without its metadata"),
    ({"int": "0x10"}, "not hexadecimal"),
    ({"int": 3}, "not hexadecimal"),
    ({"int": "1_0"}, "not hexadecimal"),
    ({"float": "7ff"}, "not 64 bits"),
    ({"float": "-ff0000000000000"}, "not 64 bits"),
    ({"complex": ["7ff8000000000000"]}, "not a pair"),
    ({"bytes": "a"}, "not base64"),
    ({"bytes": "é"}, "not base64"),
    ({"bytes": 3}, "unknown form"),
    ({"bytes": ["gone"]}, "no tensor 'gone'"),
    ({"dtype": "load"}, "no dtype 'load'"),
    ({"dtype": ["float32"]}, "no dtype"),
    ({"device": "nowhere"}, "not a device"),
    ({"device": 1}, "not a string"),
    ({"tensor": ["t"]}, "unknown form"),
    ({"tensor": ["gone", "float32", [1]]}, "no tensor 'gone'"),
    ({"tensor": ["t", "float32", [2]]}, "takes 8 bytes, the payload has 4"),
    ({"tensor": ["t", "float32", [0, 2**62, 2**62]]}, "takes 0 bytes"),
    ({"tensor": ["t", "float32", [2**62, 2**62]]}, "bytes, the payload has 4"),
    ({"tensor": ["t", "float32", [True]]}, "not a shape"),
    ({"tensor": ["t", "float32", [1] * 65]}, "not a shape"),
    ({"tensor": ["t", "qint8", [4]]}, "no dtype 'qint8'"),
    ({"tensor": ["t", "Tensor", [4]]}, "no dtype 'Tensor'"),
    ({"tensor": ["t", {"a": 1}, [4]]}, "no dtype"),
    ({"array": ["t", "|O", [1]]}, "no such dtype"),
    ({"array": ["t", "O8", [1]]}, "no such dtype"),
    ({"array": ["t", "f4,f4", [1]]}, "no such dtype"),
    ({"array": ["t", "(2,)f4", [1]]}, "no such dtype"),
    ({"array": ["t", "|V0", [4]]}, "not a fixed-size dtype"),
    ({"array": ["t", "<f3", [4]]}, "no such dtype"),
    ({"array": ["t", "<U9999999999", [1]]}, ""),
    ({"array": ["t", [["a", "|O"]], [1]]}, "no such dtype"),
    ({"array": ["t", [["a", "<f4", [2**40, 2**40]]], [1]]}, ""),
    ({"array": ["t", [["a", "|u1"], ["a", "|u1"]], [2]]}, ""),
    ({"array": ["t", [3], [2]]}, "no such field"),
    ({"array": ["t", "|u1", [3]]}, "takes 3 bytes, the payload has 4"),
    ({"array": ["empty", "|u1", [0, 2**62, 2**62]]}, ""),
    ({"scalar": ["<f4", "00"]}, "does not fit"),
    ({"scalar": ["<f4", "zz"]}, "does not fit"),
    ({"scalar": ["|O", "0000000000000000"]}, "does not fit"),
    ({"scalar": ["<U1", "ffffffff"]}, "does not fit"),
    ({"scalar": 1}, "unknown form"),
]


@pytest.mark.parametrize(("node", "reason"), BROKEN, ids=[json.dumps(node)[:60] for node, _ in BROKEN])
def test_a_malformed_node_is_corrupt_with_its_path(node: JsonValue, reason: str) -> None:
    tensors = {**FOUR_BYTES, "empty": torch.empty(0, dtype=torch.uint8)}
    with pytest.raises(Corrupt) as caught:
        unflatten({"version": 1, "state": {"dict": ["a", [0, node]]}}, tensors)
    assert caught.value.message.startswith("cannot read app_state['a'][1]")
    assert reason in caught.value.message


@pytest.mark.parametrize("tree", [None, 3, [], {}, {"state": 1}])
def test_what_is_no_tree_is_corrupt(tree: JsonValue) -> None:
    with pytest.raises(Corrupt, match="not a state tree"):
        unflatten(tree, {})


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_asks_for_another_ckptd(version: JsonValue) -> None:
    with pytest.raises(Invalid, match=r"state tree version .* reads 1"):
        unflatten({"version": version, "state": 1}, {})


def test_an_unknown_kind_asks_for_another_ckptd() -> None:
    with pytest.raises(Invalid, match=r"app_state\[0\]: unknown kind '__class__'"):
        unflatten({"version": 1, "state": [{"__class__": "os.system"}]}, {})


def test_one_tensor_under_two_shapes_is_corrupt() -> None:
    state: JsonValue = [{"tensor": ["t", "uint8", [4]]}, {"tensor": ["t", "uint8", [2, 2]]}]
    with pytest.raises(Corrupt, match=r"app_state\[1\]: tensor 't' is used with two"):
        unflatten({"version": 1, "state": state}, FOUR_BYTES)


def test_bytes_at_an_odd_address_are_copied_to_an_even_one() -> None:
    buffer = torch.arange(64, dtype=torch.uint8)
    for offset in range(8):
        nodes: JsonValue = [{"tensor": ["t", "float64", [4]]}, {"array": ["a", "<f8", [4]]}]
        raw = torch.frombuffer(buffer.numpy(), dtype=torch.uint8, count=32, offset=offset)
        state: Any = unflatten({"version": 1, "state": nodes}, {"t": raw, "a": raw})
        tensor, array = state
        assert tensor.data_ptr() % 8 == 0
        assert array.flags.aligned
        assert bytes(tensor.view(torch.uint8).numpy()) == array.tobytes() == bytes(raw.numpy())
        assert (tensor.data_ptr() == raw.data_ptr()) == (offset == 0)


nodes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["t", "<f4", "uint8"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*_Builder(_Views({}))._kinds, "other"]), inner, min_size=1, max_size=1)
    ),
    max_leaves=15,
)


@settings(max_examples=500, deadline=None)
@given(nodes)
def test_any_tree_is_read_or_refused_in_words(node: Any) -> None:
    message = "cannot read app_state"
    try:
        unflatten({"version": 1, "state": node}, FOUR_BYTES)
    except (Corrupt, Invalid) as error:
        message = error.message
    assert message.startswith("cannot read app_state")


def test_reading_does_not_need_what_writing_did() -> None:
    flat = flatten({"a": [1, 2.5, "x"], 3: (None, True)}, "shared")
    assert unflatten(json.loads(json.dumps(flat.tree)), {}) == {"a": [1, 2.5, "x"], 3: (None, True)}
