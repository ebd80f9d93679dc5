"""No wrong bit that a start reads gets into live state."""

from __future__ import annotations

from pathlib import Path

from tests.damage.flips import meet_flips


def test_a_wrong_bit_is_found_before_anything_is_installed(tmp_path: Path) -> None:
    ends = meet_flips(tmp_path, 150, seed=20)
    assert {kind for kind, end in ends if end == "found"} == {"log", "manifest", "payload"}
    assert {end for kind, end in ends} == {"found", "harmless"}
