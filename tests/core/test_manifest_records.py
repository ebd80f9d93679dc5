"""Manifests and records: their bytes, their limits, and what of a younger version is tolerated."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ckptd import layout
from ckptd.digests import ZERO_SHA256, canonical_json, chunk_count, sha256_hex
from ckptd.encoding import KINDS, MAX_RECORD_BYTES, decode, encode, record, sealed
from ckptd.errors import Corrupt
from ckptd.manifest import Manifest, ManifestRef, ObjectRef, Part
from ckptd.records import Body, CheckpointCommitted, SaveAborted
from ckptd.upkeep_records import (
    CheckpointHeld,
    CheckpointPinned,
    CheckpointReinstated,
    CheckpointReleased,
    CheckpointsPurged,
    CheckpointsRetired,
    CheckpointUnpinned,
    CheckpointVerified,
    RolledBack,
    RunClosed,
    RunReopened,
)
from tests.core.by_hand import ME, A, aborted, committed, created, opened, quarantined, ready, save, started

SAVE = save(1, 5)
BODIES: list[Body] = [
    created(),
    opened(A),
    started(1, A, SAVE, fallback_of=3),
    ready(1, A),
    committed(1, 5),
    aborted(1, 5),
    quarantined(SAVE),
    CheckpointReinstated(save=SAVE, who="me", turn=1),
    RolledBack(to=SAVE, who="me"),
    CheckpointPinned(save=SAVE, who="me"),
    CheckpointUnpinned(save=SAVE, who="me", turn=1),
    CheckpointHeld(save=SAVE, who="me"),
    CheckpointReleased(save=SAVE, who="me", turn=1),
    CheckpointVerified(save=SAVE, reader=ME),
    CheckpointsRetired(saves=(SAVE,)),
    CheckpointsPurged(saves=(SAVE,)),
    RunClosed(who="me", reason="done"),
    RunReopened(who="me", turn=1),
]


def an_object(writer: int = 0, size: int = 10, **changes: Any) -> ObjectRef:
    key = layout.payload_key("r", SAVE, writer, layout.new_nonce())
    values: dict[str, Any] = {"key": key, "size": size, "chunk_bytes": 4}
    values["chunks"] = ("x",) * chunk_count(size, 4)
    return ObjectRef(**values | changes)


def a_part(writer: int = 0, **changes: Any) -> Part:
    values: dict[str, Any] = {"run": "r", "generation": 1, "save": SAVE, "step": 5, "writer": writer}
    values["payload"] = an_object(writer)
    return Part(**values | changes)


def a_manifest(*parts: Part, **changes: Any) -> Manifest:
    values: dict[str, Any] = {"run": "r", "generation": 1, "save": SAVE, "step": 5, "world": 2, "parts": parts}
    return Manifest(**values | changes)


# Records


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.kind)
def test_a_record_comes_back_from_its_bytes(body: Body) -> None:
    item = record(3, ZERO_SHA256, body, actor="me", time="now")
    again = decode(encode(item), key="k", seq=3)
    assert again == item
    assert encode(again) == encode(item)
    assert again.body.rid == item.rid


def test_every_kind_is_known_and_named() -> None:
    assert {body.kind for body in BODIES} == set(KINDS)
    assert len({body.rid for body in BODIES}) == len(BODIES)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.kind)
def test_L3_unknown_keys_are_ignored(body: Body) -> None:
    value = json.loads(encode(record(3, ZERO_SHA256, body, actor="me", time="now")))
    value |= {"color": "red"}
    value["body"] |= {"shade": [1, {"deep": None}]}
    assert decode(sealed(value), key="k", seq=3).body == body


@pytest.mark.parametrize(("change", "found"), [({"version": 2}, "format 2"), ({"kind": "pinned"}, "'pinned'")])
def test_L3_an_unknown_kind_or_version_asks_for_another_ckptd(change: dict[str, Any], found: str) -> None:
    value = json.loads(encode(record(3, ZERO_SHA256, ready(1, A), actor="me", time="now"))) | change
    with pytest.raises(Corrupt, match=found) as caught:
        decode(sealed(value), key="k", seq=3)
    assert "Upgrade" in caught.value.do
    assert caught.value.fields["object"] == "k"


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 4},
        {"seq": "3"},
        {"rid": "ready:other:1"},
        {"prev": "short"},
        {"body": None},
        {"body": {}},
        {"body": {"generation": "1", "attempt": A}},
        {"body": {"generation": True, "attempt": A}},
        {"body": {"generation": 0, "attempt": A}},
        {"body": {"generation": 1, "attempt": f"{A}\n"}},
        {"body": {"generation": 1, "attempt": "../../etc"}},
    ],
)
def test_a_record_that_is_not_what_it_says_is_damage(change: dict[str, Any]) -> None:
    value = json.loads(encode(record(3, ZERO_SHA256, ready(1, A), actor="me", time="now"))) | change
    with pytest.raises(Corrupt, match="log slot k is damaged"):
        decode(sealed(value), key="k", seq=3)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_damage(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(data, key="k", seq=1)


@pytest.mark.parametrize("data", [b"[" * 30_000, b'{"a":' * 10_000, b"NaN", b'"\\ud800"', b"\xff\xfe"])
def test_bytes_made_to_trip_the_parser_are_damage(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(data, key="k", seq=1)


def test_a_record_has_a_limit() -> None:
    names = {f"{'x' * 60}{i:02d}": float(i) for i in range(64)}
    body = committed(1, 5).model_copy(update={"metrics": names})
    assert len(encode(record(1, ZERO_SHA256, body, actor="a", time="t"))) < MAX_RECORD_BYTES
    odd = committed(1, 5).model_copy(update={"metrics": {name * 20: 1.0 for name in names}})
    with pytest.raises(ValueError, match="at most 65536"):
        encode(record(1, ZERO_SHA256, odd, actor="a", time="t"))


def test_the_largest_allowed_bodies_fit_into_a_record() -> None:
    fields = json.loads(committed(1, 5).stored()) | {"metrics": {f"{'😀' * 62}{i:02d}": 1.5 for i in range(64)}}
    bodies = [
        CheckpointCommitted.model_validate_json(canonical_json(fields)),
        SaveAborted(generation=1, save=SAVE, reason="\x01" * 1000),
    ]
    for body in bodies:
        item = record(10**16 - 1, ZERO_SHA256, body, actor="é" * 200, time="t" * 200)
        assert len(encode(item)) < MAX_RECORD_BYTES


def test_a_record_is_about_a_save_of_its_own_generation() -> None:
    with pytest.raises(ValidationError, match="not of generation 2"):
        SaveAborted(generation=2, save=SAVE, reason="")


def test_rids_are_derived() -> None:
    assert created().rid == "create"
    assert opened(A).rid == f"open:{A}"
    assert started(2, A).rid == f"begin:{A}:0"
    assert started(2, A, fallback_of=1).rid == f"begin:{A}:1"
    assert ready(2, A).rid == f"ready:{A}:2"
    assert committed(1, 5).rid == f"commit:{SAVE}:{sha256_hex(b'x')}"
    assert aborted(1, 5).rid == f"abort:{SAVE}"
    assert quarantined(SAVE).rid == f"quarantine:{SAVE}:0"


# Manifests


def test_a_manifest_comes_back_from_its_bytes() -> None:
    manifest = a_manifest(a_part(0, shared={"a": [1]}), a_part(1), metrics={"loss": 0.5}, producer="test")
    again = Manifest.model_validate_json(manifest.stored())
    assert again == manifest
    assert again.stored() == manifest.stored()
    assert again.payload_bytes == 20
    assert [ref.size for ref in again.objects()] == [10, 10]


def test_metrics_of_a_run_that_diverged_are_kept() -> None:
    manifest = a_manifest(a_part(), metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5})
    again = Manifest.model_validate_json(manifest.stored()).metrics
    assert math.isnan(again["a"])
    assert [again[name] for name in "bcd"] == [math.inf, -math.inf, 1.5]
    assert b"NaN" in manifest.stored()
    body = committed(1, 5).model_copy(update={"metrics": manifest.metrics})
    record_metrics = decode(encode(record(1, ZERO_SHA256, body, actor="a", time="t")), key="k", seq=1).body
    assert isinstance(record_metrics, CheckpointCommitted)
    assert math.isnan(record_metrics.metrics["a"])


@pytest.mark.parametrize(
    "metrics", [{"a": "high"}, {"a": True}, {"a": None}, {"x" * 65: 1.0}, {str(i): 1.0 for i in range(65)}]
)
def test_metrics_that_are_no_numbers_or_too_many_are_refused(metrics: Any) -> None:
    with pytest.raises(ValidationError):
        a_manifest(a_part(), metrics=metrics)


def test_unknown_keys_of_a_manifest_are_ignored() -> None:
    value = json.loads(a_manifest(a_part()).stored()) | {"color": "red"}
    value["parts"][0] |= {"shade": 1}
    assert Manifest.model_validate_json(canonical_json(value)).parts[0].writer == 0


@pytest.mark.parametrize(
    "change",
    [
        {"run": "q"},
        {"generation": 2},
        {"save": save(1, 6)},
        {"step": 6},
        {"writer": 1},
        {"payload": None},
        {"error": "disk full"},
        {"payload": an_object(1)},
        {"payload": an_object(key=f"runs/q/data/g00000001/{SAVE}/0-ab.safetensors")},
        {"payload": an_object(key=f"runs/r/data/g00000001/{SAVE}/0-../../../x")},
        {"payload": an_object(key="/etc/passwd")},
    ],
)
def test_W3_parts_that_do_not_belong_together_are_no_checkpoint(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="part 0"):
        a_manifest(a_part(**change))


@pytest.mark.parametrize("writers", [(1, 0), (0, 0), (0, 2), (1,)])
def test_W3_the_writers_are_0_to_w_minus_1_in_order(writers: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="belongs elsewhere"):
        a_manifest(*(a_part(writer) for writer in writers))


@pytest.mark.parametrize(("size", "chunks"), [(10, 2), (10, 4), (0, 1), (4, 0)])
def test_D2_every_chunk_has_a_digest(size: int, chunks: int) -> None:
    with pytest.raises(ValidationError, match="digests"):
        an_object(size=size, chunks=("x",) * chunks)


def test_D2_a_reference_holds_size_and_sha256_of_the_manifest() -> None:
    manifest = a_manifest(a_part())
    data = manifest.stored()
    ref = ManifestRef.of(manifest, data)
    assert (ref.size, ref.sha256) == (len(data), sha256_hex(data))
    assert ref.key == layout.manifest_key("r", SAVE, ref.sha256)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none()))
def test_canonical_bytes_have_one_spelling(value: dict[str, Any]) -> None:
    try:
        data = canonical_json(value)
    except UnicodeEncodeError:  # a lone surrogate has no bytes
        return
    assert canonical_json(dict(reversed(value.items()))) == data
    assert json.loads(data) == value


def test_canonical_bytes_know_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": math.nan})


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.kind)
def test_L6_any_wrong_byte_in_a_record_is_noticed(body: Body) -> None:
    """By the record's own sum: no later record is needed."""
    data = encode(record(3, ZERO_SHA256, body, actor="me", time="now"))
    for at in range(len(data)):
        wrong = bytearray(data)
        wrong[at] ^= 1 << at % 8
        with pytest.raises(Corrupt, match="log slot k is damaged"):
            decode(bytes(wrong), key="k", seq=3)


def test_L6_a_record_without_a_sum_or_with_two_is_damage() -> None:
    data = encode(record(3, ZERO_SHA256, ready(1, A), actor="me", time="now"))
    value = json.loads(data)
    mark = b'"sum":"' + value["sum"].encode() + b'"'
    del value["sum"]
    for wrong in (canonical_json(value), data.replace(mark, mark + b"," + mark)):
        with pytest.raises(Corrupt, match="log slot k is damaged"):
            decode(wrong, key="k", seq=3)
