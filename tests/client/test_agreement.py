"""The ranks of one incarnation find each other, whatever a store still holds, and say who is missing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from ckptd.errors import Invalid, Unreachable
from ckptd_client import agreement
from ckptd_client.agreement import Alone, Group, Store, agree, default_store
from tests.client.ranks import DEADLINE_SECONDS, on_threads, results

WORLD = 4
BASE = "ckptd/r"
Stores = Callable[[], Store]


class WatchedStore:
    """A store that tells when a key is written."""

    def __init__(self, inner: Store, key: str) -> None:
        self._inner = inner
        self._key = key
        self.written = threading.Event()

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)
        if key == self._key:
            self.written.set()

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)


def groups(stores: Stores, world: int = WORLD, *, deadline_seconds: float = 30.0) -> list[Group]:
    return [Group(stores(), "r", rank, world, deadline_seconds=deadline_seconds) for rank in range(world)]


def form(group: Group, attempt: str) -> Callable[[], str]:
    return lambda: group.form(attempt)


def form_all(ranks: list[Group]) -> list[str]:
    return results(on_threads([form(group, f"attempt of {rank}") for rank, group in enumerate(ranks)]))


def shared(store: Store) -> Stores:
    return lambda: store


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Each kind of store, as each rank opens it."""
    match request.param:
        case "hash":
            return shared(HashStore())
        case "file":
            return lambda: FileStore(str(tmp_path / "store"), -1)
        case "tcp":
            server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            return lambda: TCPStore("127.0.0.1", server.port, None, False)
        case _:
            return shared(PrefixStore("a", HashStore()))


def test_all_ranks_get_rank_0s_attempt_and_hear_each_other(stores: Stores) -> None:
    ranks = groups(stores)
    assert form_all(ranks) == ["attempt of 0"] * WORLD
    ranks[0].say("word", "begun: 1")
    assert [group.hear("word") for group in ranks] == ["begun: 1"] * WORLD
    votes = results(on_threads([lambda r=rank: ranks[r].vote("v", f"ballot {r}") for rank in range(WORLD)]))  # type: ignore[misc]
    assert votes == [[f"ballot {rank}" for rank in range(WORLD)]] * WORLD


def test_S2_the_words_of_dead_ranks_are_not_believed() -> None:
    plain = HashStore()
    form_all(groups(shared(plain)))  # an incarnation lived here: hellos, a roster and acknowledgements stay behind
    old = json.loads(plain.get(f"{BASE}/roster"))
    watched = WatchedStore(plain, f"{BASE}/roster")
    ranks = groups(shared(watched))
    late = ranks.pop(2)
    done: list[str] = []

    def early() -> list[str]:
        done.extend(results(on_threads([form(group, "new") for group in ranks])))
        return done

    def rank_2() -> list[str]:
        assert watched.written.wait(DEADLINE_SECONDS)
        published = json.loads(plain.get(f"{BASE}/roster"))
        assert published["nonces"][2] == old["nonces"][2]  # rank 0 took the dead rank's hello at first
        assert done == []  # and went no further with it
        return [late.form("of no account")]

    assert results(on_threads([early, rank_2])) == [["new"] * 3, ["new"]]
    assert json.loads(plain.get(f"{BASE}/roster"))["id"] != old["id"]


def test_a_rank_that_comes_late_is_waited_for() -> None:
    watched = WatchedStore(HashStore(), f"{BASE}/hello/0")
    ranks = groups(shared(watched), 2)

    def late() -> str:
        assert watched.written.wait(DEADLINE_SECONDS)
        return ranks[1].form("x")

    assert results(on_threads([form(ranks[0], "mine"), late])) == ["mine", "mine"]


@settings(max_examples=25, deadline=None)
@given(
    hellos=st.sets(st.integers(0, 2)),
    listed=st.lists(st.sampled_from(["stale 0", "stale 1", "stale 2"]), max_size=4),
    acked=st.sets(st.integers(0, 2)),
)
def test_S2_no_leftover_makes_ranks_agree_on_a_dead_roster(
    hellos: set[int], listed: list[str], acked: set[int]
) -> None:
    store = HashStore()
    for rank in hellos:
        store.set(f"{BASE}/hello/{rank}", f"stale {rank}")
    store.set(f"{BASE}/roster", json.dumps({"id": "stale", "attempt": "dead", "nonces": listed}))
    for rank in acked:
        store.set(f"{BASE}/ack/stale/{rank}", "1")
    ranks = groups(shared(store), 3)
    assert form_all(ranks) == ["attempt of 0"] * 3
    assert len({group._prefix for group in ranks}) == 1
    assert ranks[0]._prefix != f"{BASE}/stale"


def test_a_second_client_of_the_run_in_the_same_group_has_words_of_its_own() -> None:
    store = HashStore()
    first, second = groups(shared(store), 2), groups(shared(store), 2)
    for ranks in (first, second):
        form_all(ranks)
    first[0].say("word", "one")
    second[0].say("word", "two")
    assert [ranks[1].hear("word") for ranks in (first, second)] == ["one", "two"]


def test_the_deadline_names_the_ranks_that_did_not_come(stores: Stores) -> None:
    ranks = groups(stores, deadline_seconds=0.3)
    found = on_threads([form(ranks[0], "a"), form(ranks[1], "a"), form(ranks[3], "a")])
    texts = [str(error) for error in found if isinstance(error, Unreachable)]
    assert len(texts) == 3
    assert "rank 0 of 4 waited 0 s for ranks [2] to say hello" in texts[0]
    assert "ranks [0] to publish a roster" in texts[1]


def test_the_deadline_names_the_ranks_that_did_not_acknowledge() -> None:
    store = HashStore()
    store.set(f"{BASE}/hello/2", "stale")
    ranks = groups(shared(store), deadline_seconds=0.5)
    found = on_threads([form(ranks[0], "a"), form(ranks[1], "a"), form(ranks[3], "a")])
    assert isinstance(found[0], Unreachable)
    assert "ranks [2] to acknowledge" in found[0].message
    for other in found[1:]:
        assert isinstance(other, Unreachable)
        assert "the other ranks to come too" in other.message


def test_a_roster_of_another_incarnation_only_ends_at_the_deadline() -> None:
    store = HashStore()
    store.set(f"{BASE}/roster", json.dumps({"id": "x", "attempt": "dead", "nonces": ["a", "b"]}))
    with pytest.raises(Unreachable, match="a roster of this incarnation"):
        Group(store, "r", 1, 2, deadline_seconds=0.1).form("x")


def test_a_vote_names_the_ranks_that_did_not_vote(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE_SECONDS", 0.0)
    ranks = groups(stores, 3, deadline_seconds=5.0)
    form_all(ranks)
    ranks[2]._deadline_seconds = 0.1
    with pytest.raises(Unreachable, match=r"ranks \[0, 1\] to vote on loaded/1"):
        ranks[2].vote("loaded/1", "mine")
    ranks[1]._deadline_seconds = 0.1
    with pytest.raises(Unreachable, match=r"ranks \[0\] to say begin/0"):
        ranks[1].hear("begin/0")


def test_a_store_that_died_with_its_process_is_an_error_of_ours() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False)
    group = Group(client, "r", 1, 2, deadline_seconds=30.0)
    del server
    with pytest.raises(Unreachable, match="rank 1 of 2 lost the process group's store"):
        group.form("a")


def test_a_single_process_agrees_with_itself() -> None:
    alone = agree("r", 0, 1, store=None, deadline_seconds=1.0)
    assert isinstance(alone, Alone)
    assert alone.form("a") == "a"
    alone.say("w", "x")
    assert alone.hear("w") == "x"
    assert alone.vote("v", "mine") == ["mine"]


def test_several_ranks_need_a_process_group_or_a_store() -> None:
    with pytest.raises(Invalid, match="before the process group formed") as caught:
        agree("r", 1, 2, store=None, deadline_seconds=1.0)
    assert caught.value.fields["field"] == "store"


def test_the_process_groups_own_store_is_found() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        default_store().set("ckptd-test", "x")
        assert default_store().get("ckptd-test") == b"x"
    finally:
        dist.destroy_process_group()


def test_without_a_way_to_that_store_the_error_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(Invalid, match="does not give out") as caught:
        default_store()
    assert "store=" in caught.value.do
