"""Every key is made here, and none leads out of its run."""

from __future__ import annotations

import posixpath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import layout
from ckptd.errors import Invalid
from ckptd.storage.keys import check_key

RUNS = st.from_regex(layout.RUN_NAME, fullmatch=True)
GENERATIONS = st.integers(1, 10**8 - 1)
STEPS = st.integers(0, layout.MAX_STEP)
WRITERS = st.integers(0, layout.MAX_WRITERS - 1)
SAVES = st.builds(
    lambda generation, step, everyone, count: layout.save_id(generation, step, all_ranks=everyone, count=count),
    GENERATIONS,
    STEPS,
    st.booleans(),
    st.integers(1, 999_999),
)
SHA256 = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(RUNS, SAVES, WRITERS, SHA256, st.integers(1, 10**16 - 1))
def test_T5_every_key_stays_in_its_run(run: str, save: str, writer: int, sha256: str, seq: int) -> None:
    keys = [
        layout.log_key(run, seq),
        layout.manifest_key(run, save, sha256),
        layout.part_key(run, save, writer, layout.new_nonce()),
        layout.payload_key(run, save, writer, layout.new_nonce()),
        layout.tmp_folder(layout.log_key(run, seq)) + "/x",
    ]
    for key in keys:
        assert posixpath.normpath(key) == key
        assert key.startswith(f"runs/{run}/")
        check_key(key)


@given(st.text(max_size=200))
def test_T5_a_name_that_is_not_allowed_makes_no_key(run: str) -> None:
    if layout.RUN_NAME.fullmatch(run):
        return
    for make in (layout.run_folder, layout.log_folder, lambda name: layout.log_key(name, 1)):
        with pytest.raises(Invalid, match="run name"):
            make(run)


@pytest.mark.parametrize(
    "run",
    ["", ".", "..", "../x", "a/b", "/a", "a\n", "A", "-a", ".a", "_a", "a b", "a\0", "ä", "a" * 129, "a\\b", None, 7],
)
def test_T5_names_that_lead_elsewhere_are_refused(run: Any) -> None:
    with pytest.raises(Invalid) as caught:
        layout.check_run(run)
    assert caught.value.fields["field"] == "run"


@pytest.mark.parametrize("run", ["a", "0", "en-it", "a..b", "a.b_c-d", "a" * 128])
def test_names_that_are_allowed(run: str) -> None:
    assert layout.check_run(run) == run


@given(GENERATIONS, STEPS, st.booleans(), st.integers(1, 999_999))
def test_a_save_says_its_generation(generation: int, step: int, everyone: bool, count: int) -> None:
    save = layout.save_id(generation, step, all_ranks=everyone, count=count)
    assert layout.check_save(save) == save
    assert layout.generation_of(save) == generation
    assert f"-{step:012d}-" in save


@given(
    st.lists(st.tuples(GENERATIONS, STEPS, st.booleans(), st.integers(1, 99)), min_size=2, max_size=2, unique=True)
)
def test_different_saves_have_different_names(saves: list[tuple[int, int, bool, int]]) -> None:
    one, other = (layout.save_id(g, s, all_ranks=e, count=c) for g, s, e, c in saves)
    assert one != other


@pytest.mark.parametrize(
    "save",
    ["", "..", "g1-2-a1", "g00000001-000000000001-x1", "g00000001-000000000001-a", "g00000001-000000000001-a1\n"],
)
def test_a_save_that_is_no_name_is_refused(save: str) -> None:
    for use in (
        layout.check_save,
        layout.generation_of,
        lambda name: layout.payload_key("r", name, 0, "n"),
        lambda name: layout.manifest_folder("r", name),
    ):
        with pytest.raises(Invalid, match="save id"):
            use(save)


@pytest.mark.parametrize("step", [-1, layout.MAX_STEP + 1, True, 1.0, "1", None])
def test_a_step_that_is_none_is_refused(step: Any) -> None:
    with pytest.raises(Invalid, match="step"):
        layout.check_step(step)


@given(st.integers(1, 10**16 - 1))
def test_a_slot_says_its_number(seq: int) -> None:
    assert layout.seq_of(layout.log_key("r", seq).rpartition("/")[2]) == seq


@pytest.mark.parametrize("name", ["", "1.json", "0000000000000001.json.tmp", "٠" * 16 + ".json", "0" * 17 + ".json"])
def test_another_name_is_no_slot(name: str) -> None:
    assert layout.seq_of(name) is None


@given(WRITERS)
def test_a_part_says_its_writer(writer: int) -> None:
    save = layout.save_id(1, 1, all_ranks=True, count=1)
    assert layout.writer_of(layout.part_key("r", save, writer, layout.new_nonce()).rpartition("/")[2]) == writer
    assert layout.writer_of(layout.manifest_key("r", save, "0" * 64).rpartition("/")[2]) is None


def test_temporary_files_lie_in_the_same_run() -> None:
    assert layout.tmp_folder("runs/r/log/00000000000000/1.json") == "runs/r/tmp/00000000000000"
    assert layout.tmp_folder(layout.log_key("r", 2345)) == "runs/r/tmp/00000000000023"
    assert layout.tmp_folder(layout.snapshot_key("r", 2345, "0" * 64)) == "runs/r/tmp/00000000000023"
    save = "g00000007-000000000001-a1"
    for key in (layout.part_key("r", save, 0, "0" * 64), layout.manifest_key("r", save, "0" * 64)):
        assert layout.tmp_folder(key) == "runs/r/tmp/g00000007"
    assert layout.tmp_folder("runs/r/data/g/s/x") == "runs/r/tmp"
    assert layout.tmp_folder(layout.payload_key("r", "g00000007-000000000001-a1", 0, "n")) == "runs/r/tmp/g00000007"
    assert layout.tmp_folder(layout.ROOT_MARKER) == "tmp"


def test_nonces_and_attempts_do_not_repeat() -> None:
    assert len({layout.new_nonce() for _ in range(1000)} | {layout.new_attempt() for _ in range(1000)}) == 2000
    assert layout.TOKEN_ID.fullmatch(layout.new_attempt())
