"""One run put in order: what is verified for it, what is retired, and what waits."""

from __future__ import annotations

import pytest

from ckptd import layout
from ckptd.errors import Conflict, Invalid, NotFound
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.retaining import RetainRequest, retain, verify
from ckptd.retention import Policy
from ckptd.storage.memory import MemoryStorage
from ckptd.testing.auditor import Auditor
from ckptd.testing.faulty import FaultyStorage
from ckptd.wire import ActRequest, Verb
from tests.core.by_hand import RUN, B, a_ledger, beginning, live, opening, overwrite, save, write_save

TWO = RetainRequest(keep_last=2)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


@pytest.fixture
def ledger(storage: FaultyStorage) -> Ledger:
    ledger = a_ledger(storage)
    live(ledger)
    return ledger


@pytest.fixture
def keeper(ledger: Ledger) -> Keeper:
    return Keeper(ledger)


def commit(ledger: Ledger, *steps: int, generation: int = 1, count: int = 1) -> list[str]:
    for step in steps:
        ledger.commit(RUN, write_save(ledger.storage, generation, step, count=count))
    return [save(generation, step, count) for step in steps]


def payload(ledger: Ledger, name: str) -> str:
    folder = layout.payload_folder(RUN, name)
    return f"{folder}/{ledger.storage.list(folder)[0]}"


def test_it_verifies_the_newest_retires_the_rest_and_deletes_it(ledger: Ledger, keeper: Keeper) -> None:
    names = commit(ledger, 1, 2, 3, 4)
    read: list[int] = []
    answer = retain(keeper, RUN, TWO, read.append)
    assert [(v.step, v.result, v.recorded) for v in answer.verified] == [(4, "whole", True), (3, "whole", True)]
    assert sum(read) == sum(v.payload_bytes for v in answer.verified)
    assert answer.retired == answer.purged == tuple(names[:2])
    assert [(d.step, d.keep) for d in answer.decisions] == [(1, False), (2, False), (3, True), (4, True)]
    assert answer.objects == 2 * 5  # two payloads, two parts and a manifest each
    again = retain(keeper, RUN, TWO)
    assert (again.verified, again.retired, again.objects) == ((), (), 0)
    Auditor(ledger.storage, RUN).assert_clean(acknowledged=names[2:])


def test_a_dry_run_reads_and_changes_nothing(ledger: Ledger, keeper: Keeper, storage: FaultyStorage) -> None:
    commit(ledger, 1, 2, 3)
    before, readers = ledger.state(RUN).seq, storage.calls["reader"]
    answer = retain(keeper, RUN, RetainRequest(keep_last=2, dry_run=True))
    assert [d.keep for d in answer.decisions] == [False, True, True]
    assert (ledger.state(RUN).seq, storage.calls["reader"]) == (before, readers)


def test_nothing_is_read_where_nothing_is_to_be_retired(
    ledger: Ledger, keeper: Keeper, storage: FaultyStorage
) -> None:
    commit(ledger, 1, 2)
    assert retain(keeper, RUN, TWO).verified == ()
    assert storage.calls["read"] == 0


def test_a_generation_that_is_starting_blocks_it(ledger: Ledger, keeper: Keeper) -> None:
    names = commit(ledger, 1, 2, 3)
    ledger.open(RUN, opening(B))
    answer = ledger.begin(RUN, beginning(B))
    with pytest.raises(Conflict, match="no generation is ready"):
        retain(keeper, RUN, TWO)
    ledger.ready(RUN, B, answer.generation)
    assert retain(keeper, RUN, TWO).retired == (names[0],)


def test_one_that_turns_out_damaged_is_given_up_and_the_ones_before_stay(ledger: Ledger, keeper: Keeper) -> None:
    names = commit(ledger, 1, 2, 3, 4)
    overwrite(ledger.storage, payload(ledger, names[3]), b"x")
    answer = retain(keeper, RUN, TWO)
    assert [(v.step, v.result) for v in answer.verified] == [(4, "damaged"), (3, "whole"), (2, "whole")]
    assert answer.retired == (names[0],)
    latest = ledger.latest(RUN)
    assert latest.checkpoint is not None
    assert latest.checkpoint.step == 3


def test_one_that_only_this_reader_finds_damaged_does_not_stop_the_rest(
    ledger: Ledger, keeper: Keeper, storage: FaultyStorage
) -> None:
    """The second reading finds it whole: it counts for nothing, neither damaged nor verified."""
    names = commit(ledger, 1, 2, 3, 4)
    fault = storage.flip(payload(ledger, names[3]), at=0)
    other = a_ledger(storage.inner)
    ledger._second_reader = lambda _, ref: other._second_reader(storage.inner, ref)
    answer = retain(keeper, RUN, TWO)
    assert fault.fired
    assert [(v.step, v.result) for v in answer.verified] == [(4, "unconfirmed"), (3, "whole"), (2, "whole")]
    assert answer.retired == (names[0],)


def test_a_checkpoint_in_quarantine_is_read_and_not_recorded(ledger: Ledger, keeper: Keeper) -> None:
    commit(ledger, 1, 2)
    keeper.quarantine(RUN, save(1, 2), who="ann", reason="")
    answer = verify(keeper, RUN, 2)
    assert (answer.result, answer.recorded, answer.detail) == ("whole", False, "in quarantine")
    keeper.reinstate(RUN, save(1, 2), who="ann", reason="")
    assert verify(keeper, RUN, 2).recorded


def test_a_retired_one_is_not_read(ledger: Ledger, keeper: Keeper, storage: FaultyStorage) -> None:
    commit(ledger, 1, 2, 3)
    retain(keeper, RUN, TWO)
    reads = storage.calls["read"]
    with pytest.raises(Invalid, match="is retired"):
        verify(keeper, RUN, 1)
    assert storage.calls["read"] == reads


def test_of_several_of_a_step_the_one_on_the_line_is_meant_or_the_one_that_is_named(
    ledger: Ledger, keeper: Keeper
) -> None:
    commit(ledger, 1, 2)
    keeper.rollback(RUN, save(1, 1), who="ann", reason="")
    live(ledger, B)
    commit(ledger, 2, generation=2)
    commit(ledger, 2, generation=2, count=2)
    assert keeper.chosen(RUN, 2).save == save(2, 2, 2)
    assert keeper.chosen(RUN, 2, save(1, 2)).save == save(1, 2)
    with pytest.raises(NotFound, match="no checkpoint g00000001-000000000001-a1 of step 2; it has"):
        keeper.chosen(RUN, 2, save(1, 1))
    keeper.act(RUN, 2, "pin", ActRequest(who="ann", save=save(1, 2)))
    assert ledger.state(RUN).pinned == {save(1, 2): {"ann"}}


@pytest.mark.parametrize(
    ("verb", "status", "pinned", "held"),
    [
        ("quarantine", "quarantined", (), ()),
        ("reinstate", "valid", (), ()),
        ("rollback", "valid", (), ()),
        ("pin", "valid", ("ann",), ()),
        ("unpin", "valid", (), ()),
        ("hold", "valid", (), ("ann",)),
        ("release", "valid", (), ()),
    ],
)
def test_every_act_says_what_the_checkpoint_is_like_afterwards(
    ledger: Ledger, keeper: Keeper, verb: Verb, status: str, pinned: tuple[str, ...], held: tuple[str, ...]
) -> None:
    commit(ledger, 1, 2)
    undoes: dict[Verb, Verb] = {"reinstate": "quarantine", "unpin": "pin", "release": "hold"}
    if verb in undoes:
        keeper.act(RUN, 2, undoes[verb], ActRequest(who="ann", reason="r"))
    info = keeper.act(RUN, 2, verb, ActRequest(who="ann", reason="r"))
    assert (info.step, info.status, info.pinned_by, info.held_by) == (2, status, pinned, held)
    assert ledger.state(RUN).void == {}


def test_the_newest_is_verified_though_older_ones_are(ledger: Ledger, keeper: Keeper) -> None:
    """Else the two that must stay would grow old."""
    names = commit(ledger, 1, 2, 3)
    for step in (1, 2):
        verify(keeper, RUN, step)
    assert keeper.unverified(RUN, Policy(keep_last=2)) == names[2]
    assert keeper.unverified(RUN, Policy(keep_last=2), passing=[names[2]]) is None
