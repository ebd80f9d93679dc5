"""Faults on the wire between the ledger and a real S3 server: what the caller is told is what the log holds.

The server is a SeaweedFS; `wired` reaches it through the proxy, `plain` without. The run lives in slots 1 to 4, so
that slot 5 is where a commit goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from ckptd import layout
from ckptd.digests import chunk_digest
from ckptd.errors import CkptdError, Corrupt, Fenced, NotFound, OutcomeUnknown, Unavailable
from ckptd.failpoints import hooked
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest, ObjectRef, Part
from ckptd.reading import observe
from ckptd.records import Damage
from ckptd.second import this_process
from ckptd.slots import all_slots
from ckptd.storage.s3 import S3Storage
from ckptd.testing.auditor import Auditor
from ckptd.testing.proxy import Proxy
from ckptd.testing.seaweed import SeaweedProcess
from ckptd.testing.wire_faults import HeldRequest, Injected, WireFault
from ckptd.wire import CommitRequest, DamageReport
from tests.core.by_hand import (
    LIVE,
    A,
    B,
    HandLog,
    live,
    opened,
    other_reader,
    started,
    write_manifest,
    write_save,
)

pytestmark = pytest.mark.e2e
T = TypeVar("T")
Plan = Callable[[Proxy], object]

LOG_SLOT = "/0000000000000005.json"
MIB = 1 << 20
PART_BYTES = 5 * MIB  # the least that S3 takes
SHORT_SECONDS = 2.5  # for requests that are not answered
LONG_SECONDS = 30.0
WAIT_SECONDS = 60.0


class Server:
    """One server, the proxy in front of it, and the ways there: `plain`, `wired`, and `hasty` for requests that are
    not answered."""

    def __init__(self, process: SeaweedProcess, proxy: Proxy) -> None:
        self.process, self.proxy = process, proxy
        through = {**process.env, "AWS_ENDPOINT_URL": proxy.url}
        self.plain = S3Storage(process.url("wire"), env=process.env)
        self.plain.initialise()
        self.wired = S3Storage(process.url("wire"), env=through, part_bytes=PART_BYTES)
        self.hasty = S3Storage(
            f"{process.url('wire')}?deadline_seconds={SHORT_SECONDS}", env=through, part_bytes=PART_BYTES
        )


class Place:
    """A live run of a test's own."""

    def __init__(self, server: Server) -> None:
        self.run = f"r{layout.new_nonce()}"
        self.server, self.plain, self.wired, self.hasty = server.process, server.plain, server.wired, server.hasty
        HandLog(self.plain, self.run).add(*LIVE)
        self.auditor = Auditor(self.plain, self.run)

    def ledger(
        self, *, hasty: bool = False, deadline_seconds: float = WAIT_SECONDS,
        pause: Callable[[float], None] = time.sleep,
    ) -> Ledger:  # fmt: skip
        """One that remembers nothing, behind the proxy."""
        storage = self.hasty if hasty else self.wired
        return Ledger(storage, second_reader=other_reader, deadline_seconds=deadline_seconds, pause=pause)

    def written(self, step: int = 5) -> CommitRequest:
        return write_save(self.plain, 1, step, writers=1, run=self.run)

    def rids(self) -> list[str]:
        keys = [layout.log_key(self.run, seq) for seq in all_slots(self.plain, self.run)]
        return [json.loads(self.plain.get(key, 1 << 16))["rid"] for key in keys]

    def assert_once(self, request: CommitRequest) -> None:
        """The commit is in the log, once, and everything fits."""
        assert self.rids()[4:] == [rid(request)]
        self.auditor.assert_clean(acknowledged=[request.save])

    def assert_not(self, request: CommitRequest) -> None:
        assert rid(request) not in self.rids()
        self.auditor.assert_clean()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with SeaweedProcess(tmp_path_factory.mktemp("seaweed")) as process, Proxy(process.endpoint) as proxy:
        yield Server(process, proxy)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    server.proxy.reset()
    yield server.proxy
    server.proxy.reset()


@pytest.fixture
def place(server: Server, proxy: Proxy) -> Place:
    return Place(server)


def rid(request: CommitRequest) -> str:
    return f"commit:{request.save}:{request.manifest.sha256}"


def read_back(proxy: Proxy, slot: str = LOG_SLOT) -> Callable[[str], bool]:
    """The GETs of a slot that come after its PUT."""

    def found(target: str) -> bool:
        put = any(method == "PUT" and at.endswith(slot) for method, at in proxy.requests)
        return put and target.endswith(slot)

    return found


def outcome(call: Callable[[], T]) -> T | CkptdError:
    try:
        return call()
    except CkptdError as error:
        return error


# One fault: the commit is OK, once.


ON_PUT: dict[str, Plan] = {
    "answer lost": lambda proxy: proxy.lose_answer("PUT", LOG_SLOT),
    "answers lost": lambda proxy: proxy.lose_answer("PUT", LOG_SLOT, times=3),
    "500": lambda proxy: proxy.answer("PUT", LOG_SLOT, 500, "InternalError"),
    "503": lambda proxy: proxy.answer("PUT", LOG_SLOT, 503, "SlowDown"),
    "409": lambda proxy: proxy.answer("PUT", LOG_SLOT, 409, "ConditionalRequestConflict"),
    "400": lambda proxy: proxy.answer("PUT", LOG_SLOT, 400, "RequestTimeout"),
    "412 of an empty slot": lambda proxy: proxy.answer("PUT", LOG_SLOT, 412, "PreconditionFailed"),
    "no error document": lambda proxy: proxy.answer("PUT", LOG_SLOT, 502, body=b"<html>Bad Gateway</html>"),
}
ON_READ_BACK: dict[str, Plan] = {
    "answer lost": lambda proxy: proxy.lose_answer("GET", read_back(proxy)),
    "500": lambda proxy: proxy.answer("GET", read_back(proxy), 500, "InternalError"),
    "503": lambda proxy: proxy.answer("GET", read_back(proxy), 503, "SlowDown"),
    "400": lambda proxy: proxy.answer("GET", read_back(proxy), 400, "RequestTimeout"),
    "cut": lambda proxy: proxy.cut_answer("GET", read_back(proxy), size=100),
    "cut at once": lambda proxy: proxy.cut_answer("GET", read_back(proxy), size=0),
    "a wrong byte": lambda proxy: proxy.flip("GET", read_back(proxy), at=100),
    "another document": lambda proxy: proxy.replace_answer("GET", read_back(proxy), b"<html>hotel</html>"),
}


@pytest.mark.parametrize("plan", [*ON_PUT.values(), *ON_READ_BACK.values()], ids=[*ON_PUT, *ON_READ_BACK])
def test_one_fault_does_not_change_the_outcome(place: Place, proxy: Proxy, plan: Plan) -> None:
    ledger, request = place.ledger(), place.written()
    plan(proxy)
    ledger.commit(place.run, request)
    proxy.assert_all_fired()
    place.assert_once(request)


STALLS: dict[str, Plan] = {
    "put": lambda proxy: proxy.stall("PUT", LOG_SLOT),
    "put that was done": lambda proxy: proxy.stall("PUT", LOG_SLOT, forwarded=True),
    "read back": lambda proxy: proxy.stall("GET", read_back(proxy)),
}


@pytest.mark.parametrize("plan", STALLS.values(), ids=[*STALLS])
def test_a_request_that_stalls_is_given_up_and_made_again(place: Place, proxy: Proxy, plan: Plan) -> None:
    ledger, request = place.ledger(hasty=True), place.written()
    plan(proxy)
    began = time.monotonic()
    ledger.commit(place.run, request)
    assert time.monotonic() - began < WAIT_SECONDS
    proxy.assert_all_fired()
    place.assert_once(request)


def test_connections_refused_in_the_middle_of_an_append(place: Place, proxy: Proxy) -> None:
    refused = list[WireFault]()

    def pause(seconds: float) -> None:
        for fault in refused:
            fault.heal()
        time.sleep(seconds)

    def refuse() -> None:
        if not refused:
            refused.append(proxy.refuse())

    ledger, request = place.ledger(pause=pause), place.written()
    with hooked("slot-begin", refuse):
        ledger.commit(place.run, request)
    proxy.assert_all_fired()
    place.assert_once(request)


# The fault stays: the outcome is unknown, with its first cause, and the same call finds out.


STAYING: dict[str, tuple[Plan, str, bool]] = {
    "put refused": (lambda proxy: proxy.answer("PUT", LOG_SLOT, 503, "SlowDown", times=None), "SlowDown", False),
    "put in conflict": (
        lambda proxy: proxy.answer("PUT", LOG_SLOT, 409, "ConditionalRequestConflict", times=None),
        "ConditionalRequestConflict",
        False,
    ),
    "put times out": (
        lambda proxy: proxy.answer("PUT", LOG_SLOT, 400, "RequestTimeout", times=None),
        "RequestTimeout",
        False,
    ),
    "a lie that the slot is taken": (
        lambda proxy: proxy.answer("PUT", LOG_SLOT, 412, "PreconditionFailed", times=None),
        "does not exist",
        False,
    ),
    "read back fails": (
        lambda proxy: proxy.answer("GET", read_back(proxy), 500, "InternalError", times=None),
        "InternalError",
        True,
    ),
    "read back is lost": (lambda proxy: proxy.lose_answer("GET", read_back(proxy), times=None), "get", True),
    "read back is cut": (
        lambda proxy: proxy.cut_answer("GET", read_back(proxy), size=100, times=None),
        "get",
        True,
    ),
}


@pytest.mark.parametrize(("plan", "cause", "landed"), STAYING.values(), ids=[*STAYING])
def test_a_fault_that_stays_makes_the_outcome_unknown(
    place: Place, proxy: Proxy, plan: Plan, cause: str, landed: bool
) -> None:
    ledger, request = place.ledger(deadline_seconds=0.5), place.written()
    plan(proxy)
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown, match=cause) as caught:
        ledger.commit(place.run, request)
    assert time.monotonic() - began < WAIT_SECONDS
    assert rid(request) in caught.value.message
    assert (rid(request) in place.rids()) is landed
    proxy.assert_all_fired()
    proxy.heal()
    ledger.commit(place.run, request)
    place.assert_once(request)


@pytest.mark.parametrize("one_way", [False, True])
def test_a_black_hole_ends_at_the_deadline(place: Place, proxy: Proxy, one_way: bool) -> None:
    """With one way open the commit is there all the same; nobody could say so."""
    ledger = place.ledger(hasty=True, deadline_seconds=0.5)
    request = place.written()
    holes = list[WireFault]()

    def fall() -> None:
        if not holes:
            holes.append(proxy.black_hole(one_way=one_way))

    began = time.monotonic()
    with hooked("slot-begin", fall), pytest.raises(OutcomeUnknown, match=r"no answer within 2.5 s"):
        ledger.commit(place.run, request)
    assert time.monotonic() - began < WAIT_SECONDS
    proxy.assert_all_fired()
    proxy.heal()
    ledger.commit(place.run, request)
    place.assert_once(request)


def test_a_fault_before_anything_is_written_is_no_unknown_outcome(place: Place, proxy: Proxy) -> None:
    ledger, request = place.ledger(deadline_seconds=0.5), place.written()
    proxy.answer("GET", lambda target: "list-type=2" in target, 503, "SlowDown", times=None)
    with pytest.raises(Unavailable, match="SlowDown") as caught:
        ledger.commit(place.run, request)
    assert not isinstance(caught.value, OutcomeUnknown)
    place.assert_not(request)


# A put that lands later.


def test_a_put_that_lands_after_its_repeat_finds_the_slot_taken(place: Place, proxy: Proxy) -> None:
    ledger, request = place.ledger(), place.written()
    held = proxy.hold("PUT", LOG_SLOT)
    ledger.commit(place.run, request)
    assert held.release() == 412
    place.assert_once(request)


def held_put(proxy: Proxy) -> tuple[HeldRequest, Injected]:
    """The put of the commit is held, and its repeats do not arrive until that is healed. Whoever makes them: HTTP
    clients repeat a PUT by themselves when a connection that was used before breaks."""
    return proxy.hold("PUT", LOG_SLOT), proxy.answer("PUT", LOG_SLOT, 503, "SlowDown", times=None)


def test_a_put_that_lands_after_the_next_generation_took_the_slot(place: Place, proxy: Proxy) -> None:
    """The slot is another's when the late put arrives, and the commit was refused for good."""
    held, repeats = held_put(proxy)

    def pause(seconds: float) -> None:
        assert held.fired
        if not repeats._healed:
            HandLog(place.plain, place.run).add(opened(B), started(2, B))
            repeats.heal()

    ledger, request = place.ledger(pause=pause), place.written()
    with pytest.raises(Fenced) as caught:
        ledger.commit(place.run, request)
    assert caught.value.fields["final"] is True
    assert held.release() == 412
    assert place.rids()[4:] == [f"open:{B}", f"begin:{B}:0"]
    place.auditor.assert_clean(refused=[rid(request)])


def unknown(place: Place, proxy: Proxy, request: CommitRequest) -> tuple[Ledger, Callable[[], int]]:
    """A commit that nobody knows the outcome of, for its put is held; what lets it land."""
    ledger = place.ledger(deadline_seconds=0.3)
    held, repeats = held_put(proxy)
    with pytest.raises(OutcomeUnknown, match=rf"put .*{LOG_SLOT}"):
        ledger.commit(place.run, request)
    assert held.fired
    repeats.heal()
    return ledger, held.release


def test_a_put_that_lands_after_the_outcome_was_unknown(place: Place, proxy: Proxy) -> None:
    request = place.written()
    ledger, release = unknown(place, proxy, request)
    place.assert_not(request)
    assert release() == 200
    ledger.commit(place.run, request)
    place.assert_once(request)


def test_a_put_that_lands_after_the_repeat_of_an_unknown_one(place: Place, proxy: Proxy) -> None:
    request = place.written()
    ledger, release = unknown(place, proxy, request)
    ledger.commit(place.run, request)
    assert release() == 412
    place.assert_once(request)


def test_a_put_that_lands_too_late_stays_out(place: Place, proxy: Proxy) -> None:
    """Unknown, then a younger generation: the late put and the repeat are both refused."""
    request = place.written()
    ledger, release = unknown(place, proxy, request)
    live(Ledger(place.plain, second_reader=other_reader), B, place.run)
    assert release() == 412
    with pytest.raises(Fenced):
        ledger.commit(place.run, request)
    place.assert_not(request)
    place.auditor.assert_clean(refused=[rid(request)])


def test_a_start_whose_answers_are_lost_is_one_start(place: Place, proxy: Proxy) -> None:
    ledger = place.ledger()
    for seq in (5, 6, 7):
        proxy.lose_answer("PUT", f"/{seq:016d}.json")
    assert live(ledger, B, place.run) == 2
    proxy.assert_all_fired()
    assert place.rids()[4:] == [f"open:{B}", f"begin:{B}:0", f"ready:{B}:2"]
    place.auditor.assert_clean()


# Reading: an error is never read as absence, and wrong bytes never reach the log.


def listing(target: str) -> bool:
    return "list-type=2" in target


BAD_LISTINGS: dict[str, Plan] = {
    "lost": lambda proxy: proxy.lose_answer("GET", listing, times=None),
    "cut": lambda proxy: proxy.cut_answer("GET", listing, size=200),
    "no document": lambda proxy: proxy.replace_answer("GET", listing, b"{}"),
    "a wrong byte": lambda proxy: proxy.flip("GET", listing, at=0),
    "403": lambda proxy: proxy.answer("GET", listing, 403, "AccessDenied"),
    "404": lambda proxy: proxy.answer("GET", listing, 404, body=b"<html>Not here</html>"),
}


@pytest.mark.parametrize("plan", BAD_LISTINGS.values(), ids=[*BAD_LISTINGS])
def test_a_listing_that_fails_is_not_an_empty_one(place: Place, proxy: Proxy, plan: Plan) -> None:
    ledger = place.ledger()
    request = place.written()
    ledger.commit(place.run, request)
    plan(proxy)
    fresh = place.ledger()
    found = outcome(lambda: fresh.latest(place.run))
    assert isinstance(found, Unavailable), found
    proxy.assert_all_fired()
    proxy.heal()
    assert fresh.latest(place.run).answer == "found"


def test_a_record_that_arrives_wrong_is_not_built_upon(place: Place, proxy: Proxy) -> None:
    """A digit of slot 4 arrives as another one, so the record still decodes. The next look finds it out."""
    at = place.plain.get(layout.log_key(place.run, 4), 1 << 16).index(b'"never"') + 1
    proxy.flip("GET", "/0000000000000004.json", at=at)
    request = place.written()
    ledger = place.ledger()
    with pytest.raises(Corrupt, match="slot"):
        ledger.commit(place.run, request)
    proxy.assert_all_fired()
    place.assert_not(request)
    place.ledger().commit(place.run, request)
    place.assert_once(request)


def test_damage_that_was_on_the_wire_is_not_confirmed(place: Place, proxy: Proxy) -> None:
    """A wrong byte of payload is seen by its digest; the second reading finds the object whole."""
    ledger, request = place.ledger(), place.written()
    ledger.commit(place.run, request)
    ref = ledger.manifest(request.manifest).objects()[0]
    proxy.flip("GET", ref.key, at=3)
    damage = observe(ledger.storage, ref)
    assert isinstance(damage, Damage)
    report = DamageReport(save=request.save, damage=damage, reader=this_process())
    assert not ledger.report_damage(place.run, report).confirmed
    proxy.assert_all_fired()
    place.assert_once(request)


# Payload in parts.


def big(place: Place, storage: S3Storage, key: str) -> ObjectRef:
    """Three parts."""
    data = bytes(range(256)) * (11 * MIB // 256)
    storage.put(key, [data], len(data))
    chunks = tuple(chunk_digest(data[start : start + MIB]) for start in range(0, len(data), MIB))
    return ObjectRef(key=key, size=len(data), chunk_bytes=MIB, chunks=chunks)


def part(number: int) -> Callable[[str], bool]:
    return lambda target: f"partNumber={number}&" in f"{target}&"


def completion(target: str) -> bool:
    return "uploadId=" in target


# The first GET of a payload is a look whether its key is free.
ON_PARTS: dict[str, Plan] = {
    "answer of a part lost": lambda proxy: proxy.lose_answer("PUT", part(2)),
    "503": lambda proxy: proxy.answer("PUT", part(1), 503, "SlowDown"),
    "400": lambda proxy: proxy.answer("PUT", part(3), 400, "RequestTimeout"),
    "answer of the completion lost": lambda proxy: proxy.lose_answer("POST", completion),
    "completion 500": lambda proxy: proxy.answer("POST", completion, 500, "InternalError"),
    "range cut": lambda proxy: proxy.cut_answer("GET", ".safetensors", size=1000, nth=2),
    "range lost": lambda proxy: proxy.lose_answer("GET", ".safetensors", nth=2),
}


@pytest.mark.parametrize("plan", ON_PARTS.values(), ids=[*ON_PARTS])
def test_one_fault_in_the_payload_changes_nothing(place: Place, proxy: Proxy, plan: Plan) -> None:
    storage = place.wired
    plan(proxy)
    key = layout.payload_key(place.run, "g00000001-000000000005-a1", 0, layout.new_nonce())
    ref = big(place, storage, key)
    assert observe(storage, ref) is None
    proxy.assert_all_fired()


# The server is killed.


def whole_save(place: Place, ref: ObjectRef, step: int) -> CommitRequest:
    save = layout.save_id(1, step, all_ranks=True, count=1)
    one = Part(run=place.run, generation=1, save=save, step=step, writer=0, payload=ref)
    return write_manifest(
        place.plain, Manifest(run=place.run, generation=1, save=save, step=step, world=1, parts=(one,))
    )


def test_the_server_is_killed_in_the_middle_of_an_upload(place: Place, proxy: Proxy) -> None:
    """The upload fails with its cause, what was to be committed is not complete, and the next save goes well."""
    stalled = proxy.stall("PUT", part(2), times=None)
    keys = [
        layout.payload_key(place.run, layout.save_id(1, step, all_ranks=True, count=1), 0, layout.new_nonce())
        for step in (5, 6)
    ]
    storage = place.hasty
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(outcome, lambda: big(place, storage, keys[0]))
        assert stalled.happened.wait(WAIT_SECONDS)
        place.server.kill()
        found = upload.result(WAIT_SECONDS)
    assert isinstance(found, Unavailable), found
    assert keys[0].rpartition("/")[2] in found.message
    place.server.restart()
    proxy.heal()
    with pytest.raises(NotFound):
        place.plain.size(keys[0])
    ref = big(place, place.wired, keys[1])
    lost = ref.model_copy(update={"key": keys[0]})
    ledger = place.ledger()
    with pytest.raises((Corrupt, NotFound)):
        ledger.commit(place.run, whole_save(place, lost, 5))
    request = whole_save(place, ref, 6)
    ledger.commit(place.run, request)
    place.assert_once(request)


def test_the_server_is_killed_before_it_says_that_a_commit_landed(place: Place, proxy: Proxy) -> None:
    """Nothing that was answered is lost, and the repeat of what was not is no second commit."""
    ledger = place.ledger(hasty=True, deadline_seconds=0.5)
    first, second = place.written(), place.written(6)
    ledger.commit(place.run, first)
    slot = "/0000000000000006.json"
    lost = proxy.lose_answer("PUT", slot)
    asked = proxy.stall("GET", read_back(proxy, slot), times=None)
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(outcome, lambda: ledger.commit(place.run, second))
        assert asked.happened.wait(WAIT_SECONDS)
        place.server.kill()
        found = commit.result(WAIT_SECONDS)
    assert isinstance(found, OutcomeUnknown), found
    assert slot in found.message
    assert lost.status == 200
    proxy.heal()
    place.server.restart()
    ledger = place.ledger()
    ledger.commit(place.run, second)
    assert place.rids()[4:] == [rid(first), rid(second)]
    place.auditor.assert_clean(acknowledged=[first.save, second.save])
    assert live(ledger, A, place.run) == 1
