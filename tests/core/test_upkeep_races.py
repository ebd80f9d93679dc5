"""Somebody goes on with the run, retires and collects, while somebody else looks at what is about to go."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptd.errors import Conflict, Corrupt, Fenced
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.retention import Policy
from ckptd.second import read_here
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from tests.core.by_hand import RUN, B, C, a_ledger, beginning, live, opening, save, write_save


class Meanwhile(MemoryStorage):
    """Before a key of `planned` is read, something else happens, once."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: dict[str, Callable[[], object]] = {}

    def get(self, key: str, max_bytes: int) -> bytes:
        if key in self.planned:
            self.planned.pop(key)()
        return super().get(key, max_bytes)


@pytest.fixture
def storage() -> Meanwhile:
    return Meanwhile()


@pytest.fixture
def ledger(storage: Meanwhile) -> Ledger:
    return a_ledger(storage)


@pytest.fixture
def keeper(storage: Meanwhile) -> Keeper:
    """Somebody else's."""
    return Keeper(a_ledger(storage), reader=read_here)


def test_K2_a_commit_whose_save_is_collected_under_it_is_told_that_it_is_fenced(
    storage: Meanwhile, ledger: Ledger, keeper: Keeper
) -> None:
    live(ledger)
    request = write_save(storage, 1, 1)

    def take_over() -> None:
        keeper.ledger.open(RUN, opening(B))
        keeper.ledger.begin(RUN, beginning(B))
        assert keeper.collect(RUN).objects > 0

    storage.planned[request.manifest.key] = take_over
    with pytest.raises(Fenced, match="generation 2 started"):
        ledger.commit(RUN, request)
    assert storage.planned == {}


def test_W4_a_manifest_that_is_gone_without_that_is_damage(
    storage: Meanwhile, ledger: Ledger, keeper: Keeper
) -> None:
    live(ledger)
    request = write_save(storage, 1, 1)
    storage.planned[request.manifest.key] = lambda: storage.delete(request.manifest.key)
    with pytest.raises(Corrupt, match="missing"):
        ledger.commit(RUN, request)


def test_K1_a_start_that_looks_at_what_is_collected_under_it_looks_again(
    storage: Meanwhile, ledger: Ledger, keeper: Keeper
) -> None:
    live(ledger)
    ledger.commit(RUN, write_save(storage, 1, 1))
    manifest = ledger.checkpoint_at(RUN, 1).manifest

    def go_on() -> None:
        for step in (2, 3, 4):
            keeper.ledger.commit(RUN, write_save(storage, 1, step))
            keeper.verify(RUN, save(1, step))
        assert [decision.step for decision in keeper.retire(RUN, Policy(keep_last=2))] == [1, 2]
        assert keeper.collect(RUN).objects > 0

    ledger.open(RUN, opening(C))
    storage.planned[manifest.key] = go_on
    answer = ledger.begin(RUN, beginning(C))
    assert storage.planned == {}
    assert answer.checkpoint is not None
    assert answer.checkpoint.save == save(1, 4)
    assert ledger.state(RUN).quarantined == {}
    Auditor(storage, RUN).assert_clean(acknowledged=[save(1, 3), save(1, 4)])


def test_V16_a_roll_back_that_was_not_answered_can_be_asked_for_again(
    storage: Meanwhile, ledger: Ledger, keeper: Keeper
) -> None:
    live(ledger)
    for step in (1, 2, 3):
        ledger.commit(RUN, write_save(storage, 1, step))
    for _ in range(2):
        keeper.rollback(RUN, save(1, 1), who="ann", reason="diverged")
    assert ledger.state(RUN).turns["rollback"] == 1
    keeper.rollback(RUN, save(1, 2), who="ann", reason="not that far")
    keeper.quarantine(RUN, save(1, 2), who="ann", reason="diverged, too")
    with pytest.raises(Conflict, match="no valid checkpoint"):
        keeper.rollback(RUN, save(1, 2), who="ann", reason="")
    assert ledger.state(RUN).tip == save(1, 2)
