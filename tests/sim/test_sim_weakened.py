"""The simulator is worth something: whenever a rule of the product is dropped, some seed breaks an invariant."""

from __future__ import annotations

import pytest

from ckptd.testing.sim.search import search
from tests.sim.weakened import WEAKENINGS, Weakening

SEEDS = 60
OPERATIONS = SEEDS * 3000


@pytest.mark.parametrize("weakening", WEAKENINGS, ids=lambda weakening: weakening.drop.__name__)
def test_a_dropped_rule_is_found(weakening: Weakening, monkeypatch: pytest.MonkeyPatch) -> None:
    weakening.drop(monkeypatch)
    found = search(weakening.first_seed, OPERATIONS)
    assert [report.rule for report in found.failed] == [weakening.rule]
