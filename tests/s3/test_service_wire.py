"""Faults on the wire between a client and the service: a real service process, behind the proxy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from ckptd import layout
from ckptd.errors import Invalid, Unavailable
from ckptd.ledger import Ledger
from ckptd.slots import all_slots
from ckptd.storage import init_root, open_storage
from ckptd.storage.base import Storage
from ckptd.testing.auditor import Auditor
from ckptd.testing.processes import ServiceProcess
from ckptd.testing.proxy import Proxy
from ckptd.wire import BeginRequest, CommitRequest, OpenRequest
from ckptd_client.service import Service
from ckptd_client.transport import Transport
from tests.service.writing import write_save

pytestmark = pytest.mark.e2e
START = ["run-created", "attempt-opened", "generation-started", "generation-ready"]
LONG_SECONDS, SHORT_SECONDS = 60.0, 0.5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("wire")
    init_root(f"file://{folder}/root")
    with ServiceProcess(f"file://{folder}/root", log=folder / "service.log", init=False) as service:
        yield service


@pytest.fixture
def proxy(service: ServiceProcess) -> Iterator[Proxy]:
    with Proxy(service.url) as proxy:
        yield proxy


def answer_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a request that is not answered is given up soon."""
    defaults = Service.ask.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout_seconds", SHORT_SECONDS)


@dataclass
class Trainer:
    """Rank 0 of a job, by way of the proxy."""

    transport: Transport
    storage: Storage
    attempt: str = field(default_factory=layout.new_attempt)

    @property
    def run(self) -> str:
        return self.transport.run

    def open(self) -> None:
        self.transport.open(OpenRequest(attempt=self.attempt, job="job", host="host"))

    def begin(self) -> int:
        request = BeginRequest(attempt=self.attempt, job="job", world=1)
        return self.transport.begin(request).generation

    def live(self) -> int:
        self.open()
        generation = self.begin()
        self.transport.ready(self.attempt, generation)
        return generation

    def written(self, step: int = 5) -> CommitRequest:
        return write_save(self.storage, self.run, self.live(), step)

    def give_up_soon(self) -> None:
        """Be patient no longer with a service that does not answer."""
        self.transport._patience_seconds = SHORT_SECONDS

    def kinds(self) -> list[str]:
        keys = [layout.log_key(self.run, seq) for seq in all_slots(self.storage, self.run)]
        return [json.loads(self.storage.get(key, 65536))["kind"] for key in keys]

    def assert_committed_once(self, request: CommitRequest) -> None:
        assert self.kinds() == [*START, "checkpoint-committed"]
        Auditor(self.storage, self.run).assert_clean(acknowledged=[request.save])


@pytest.fixture
def trainer(service: ServiceProcess, proxy: Proxy) -> Iterator[Trainer]:
    """On a run of its own."""
    run = f"r{layout.new_nonce()}"
    transport = Transport(proxy.url, run, direct=False, patience_seconds=LONG_SECONDS)
    yield Trainer(transport, open_storage(service.storage_url))
    transport.close()


@pytest.fixture
def free_trainer(service: ServiceProcess, proxy: Proxy, trainer: Trainer) -> Iterator[Trainer]:
    """One that may go around the service."""
    transport = Transport(proxy.url, trainer.run, storage_url=service.storage_url, patience_seconds=SHORT_SECONDS)
    yield Trainer(transport, trainer.storage)
    transport.close()


def not_ours() -> bytes:
    return b"<html>Log in to the hotel</html>"


# The answer is lost.


@pytest.mark.parametrize("path", ["/attempts", "/generations", "/ready", "/commit"])
def test_a_lost_answer_is_asked_for_again(proxy: Proxy, trainer: Trainer, path: str) -> None:
    lost = proxy.lose_answer("POST", path)
    request = trainer.written()
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)
    assert lost.status in (200, 204)
    proxy.assert_all_fired()


def test_all_answers_are_lost(proxy: Proxy, trainer: Trainer) -> None:
    """The commit is in the log, and nobody was told: unknown, and found out later."""
    request = trainer.written()
    trainer.give_up_soon()
    lost = proxy.lose_answer("POST", "/commit", times=None)
    with pytest.raises(Unavailable, match="RemoteProtocolError"):
        trainer.transport.commit(request)
    assert lost.fired > 1
    trainer.assert_committed_once(request)
    proxy.heal()
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)


# The request is late.


def test_a_commit_that_lands_after_its_repeat(proxy: Proxy, trainer: Trainer) -> None:
    request = trainer.written()
    held = proxy.hold("POST", "/commit")
    trainer.transport.commit(request)
    assert held.release() == 200  # it is durable, as the repeat had said
    trainer.assert_committed_once(request)


def test_a_commit_that_lands_after_the_next_generation_began(
    proxy: Proxy, trainer: Trainer, service: ServiceProcess
) -> None:
    request = trainer.written()
    held = proxy.hold("POST", "/commit")
    trainer.give_up_soon()
    later = proxy.answer("POST", "/commit", 503, body=not_ours(), times=None)
    with pytest.raises(Unavailable):
        trainer.transport.commit(request)
    later.heal()
    younger = Trainer(Transport(service.url, trainer.run), trainer.storage)
    younger.live()
    assert held.release() == 409
    younger.transport.close()
    assert trainer.kinds() == [*START, *START[1:]]
    assert Ledger(trainer.storage).checkpoints(trainer.run) == []


def test_an_opening_that_lands_after_its_repeat_makes_no_younger_attempt(proxy: Proxy, trainer: Trainer) -> None:
    held = proxy.hold("POST", "/attempts")
    trainer.open()
    younger = Trainer(trainer.transport, trainer.storage)
    younger.open()
    assert held.release() == 204
    assert younger.begin() == 1
    assert trainer.kinds() == ["run-created", "attempt-opened", "attempt-opened", "generation-started"]


# The answer is not the service's.


@pytest.mark.parametrize("status", [500, 502, 503])
def test_an_error_of_something_in_between_passes(proxy: Proxy, trainer: Trainer, status: int) -> None:
    request = trainer.written()
    proxy.answer("POST", "/commit", status, body=b"<html>Bad Gateway</html>", content_type="text/html")
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)
    proxy.assert_all_fired()


def test_an_error_that_stays_is_told_with_its_cause(proxy: Proxy, trainer: Trainer) -> None:
    request = trainer.written()
    trainer.give_up_soon()
    proxy.answer("POST", "/commit", 503, body=not_ours(), content_type="text/html", times=None)
    with pytest.raises(Unavailable, match=r"HTTP 503, and no answer of ckptd.*hotel"):
        trainer.transport.commit(request)
    assert trainer.kinds() == START


def test_a_cut_answer_is_asked_for_again(proxy: Proxy, trainer: Trainer) -> None:
    proxy.cut_answer("POST", "/generations", size=20)
    proxy.cut_answer("POST", "/commit", size=20)
    request = trainer.written()
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)
    proxy.assert_all_fired()


@pytest.mark.parametrize(
    "plan",
    [
        lambda proxy: proxy.replace_answer("POST", "/commit", not_ours()),
        lambda proxy: proxy.replace_answer("POST", "/commit", b'{"save": "g1", "status": "durable"}'),
        lambda proxy: proxy.flip("POST", "/commit", at=0),
    ],
    ids=["a page", "another answer", "a wrong byte"],
)
def test_wrong_bytes_are_no_answer(proxy: Proxy, trainer: Trainer, plan: Callable[[Proxy], object]) -> None:
    """Never read as durable, nor as refused. The same call finds the commit."""
    request = trainer.written()
    plan(proxy)
    with pytest.raises(Invalid, match="no answer of ckptd"):
        trainer.transport.commit(request)
    trainer.assert_committed_once(request)
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)
    proxy.assert_all_fired()


# No answer at all.


@pytest.mark.parametrize("one_way", [False, True])
def test_a_service_that_stalls_is_gone_around(
    proxy: Proxy,
    trainer: Trainer,
    free_trainer: Trainer,
    one_way: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it did it or not: on the storage the commit is found, or made."""
    request = trainer.written()
    assert free_trainer.transport.ledger.uuid
    answer_soon(monkeypatch)
    hole = proxy.black_hole(one_way=one_way)
    began = time.monotonic()
    free_trainer.transport.commit(request)
    assert time.monotonic() - began < 30
    assert hole.fired
    assert "ReadTimeout" in caplog.text
    assert "going to the storage directly" in caplog.text
    trainer.assert_committed_once(request)
    hole.heal()
    before = len(proxy.requests)
    free_trainer.transport.commit(request)  # over the service again
    assert len(proxy.requests) == before + 1
    trainer.assert_committed_once(request)


def test_a_stall_ends_with_its_cause_where_the_storage_must_not_be_used(
    proxy: Proxy, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = trainer.written()
    trainer.give_up_soon()
    answer_soon(monkeypatch)
    proxy.stall("POST", "/commit", times=None)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="commit: ReadTimeout"):
        trainer.transport.commit(request)
    assert time.monotonic() - began < 30
    assert trainer.kinds() == START


def test_a_stalled_commit_that_the_service_did_is_found(
    proxy: Proxy, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = trainer.written()
    answer_soon(monkeypatch)
    proxy.stall("POST", "/commit", forwarded=True)
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)
    proxy.assert_all_fired()


def test_a_service_that_refuses_connections_is_gone_around(
    proxy: Proxy, trainer: Trainer, free_trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    request = trainer.written()
    assert free_trainer.transport.ledger.uuid
    refused = proxy.refuse()
    free_trainer.transport.commit(request)
    assert "Connection refused" in caplog.text
    refused.heal()
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)
    proxy.assert_all_fired()


def test_a_service_that_is_killed_behind_the_proxy(service: ServiceProcess, proxy: Proxy, trainer: Trainer) -> None:
    """Connections break; after the restart the same call ends well."""
    request = trainer.written()
    service.kill()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{proxy.url}/health/live", timeout=60)
    service.restart()
    trainer.transport.commit(request)
    trainer.assert_committed_once(request)
