"""Rank 0's heart: it tells the service, learns early of being fenced, and takes no failure to heart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptd.errors import Conflict, Fenced, Unavailable
from ckptd.keeper import Keeper
from ckptd.ledger import Ledger
from ckptd.wire import BeginRequest, Heartbeat, HeartbeatAnswer, OpenRequest
from ckptd_client.heartbeat import Heart
from ckptd_client.transport import Transport
from tests.client.ranks import DEADLINE_SECONDS, RUN, Drive, Job, Trained, serving

MINE, OTHER = "0" * 32, "1" * 32
BEAT = Heartbeat(attempt=MINE, job="job", host="host")


def beating(
    transport: Transport, answers: list[Callable[[], HeartbeatAnswer | None]]
) -> tuple[Heart, threading.Event]:
    """A quick heart over a transport that answers so; the event comes when all answers were given."""
    given = threading.Event()

    def heartbeat(beat: Heartbeat) -> HeartbeatAnswer | None:
        assert beat == BEAT
        if len(answers) == 1:
            given.set()
        return answers.pop(0)() if len(answers) > 1 else answers[0]()

    transport.heartbeat = heartbeat  # type: ignore[method-assign]
    return Heart(transport, BEAT, beat_seconds=0.001), given


def raising(error: Exception) -> Callable[[], HeartbeatAnswer]:
    def answer() -> HeartbeatAnswer:
        raise error

    return answer


@pytest.fixture
def direct(drive: Drive) -> Transport:
    return Transport(drive.url, RUN)


def ended(heart: Heart) -> bool:
    heart._thread.join(DEADLINE_SECONDS)
    return not heart._thread.is_alive()


def test_it_goes_on_while_the_generation_is_its_own_and_whatever_fails(direct: Transport) -> None:
    mine = HeartbeatAnswer(generation=1, attempt=MINE)
    heart, given = beating(
        direct, [lambda: mine, raising(Unavailable("down")), raising(Conflict("odd")), lambda: mine, lambda: mine]
    )
    assert given.wait(DEADLINE_SECONDS)
    heart.check()
    assert heart._thread.is_alive()
    heart.stop()
    assert ended(heart)


def test_a_younger_incarnation_is_told_at_the_next_check_and_the_heart_stops(direct: Transport) -> None:
    heart, _ = beating(direct, [lambda: HeartbeatAnswer(generation=2, attempt=OTHER)])
    assert ended(heart)
    for _ in range(2):
        with pytest.raises(Fenced, match="generation 2 belongs to another incarnation"):
            heart.check()
    heart.stop()


def test_a_roll_back_is_told_at_the_next_check_and_the_heart_stops(direct: Transport) -> None:
    heart, _ = beating(direct, [lambda: HeartbeatAnswer(generation=3, attempt=MINE, ended="rolled back")])
    assert ended(heart)
    with pytest.raises(Fenced, match="was rolled back, which ended generation 3") as caught:
        heart.check()
    assert "its restart resumes from the checkpoint that was chosen" in caught.value.do
    heart.stop()


def test_without_a_service_there_is_nobody_to_tell(direct: Transport) -> None:
    heart = Heart(direct, BEAT, beat_seconds=0.001)
    assert ended(heart)
    heart.check()


def test_the_service_hears_it_and_tells_who_took_over(drive: Drive) -> None:
    with serving(drive) as url:
        transport = Transport(url, RUN)
        transport.open(OpenRequest(attempt=MINE, job="job", host="host"))
        transport.begin(BeginRequest(attempt=MINE, job="job", world=1))
        assert transport.heartbeat(BEAT) == HeartbeatAnswer(generation=1, attempt=MINE)
        transport.open(OpenRequest(attempt=OTHER, job="job", host="host"))
        transport.begin(BeginRequest(attempt=OTHER, job="job", world=1))
        heart = Heart(transport, BEAT, beat_seconds=0.001)
        assert ended(heart)
        with pytest.raises(Fenced):
            heart.check()


def test_a_running_job_learns_early_that_it_was_rolled_back(drive: Drive) -> None:
    """From the service, at its next call, before it writes anything; its restart resumes from there."""
    with serving(drive) as url:
        with Job(drive, url=url).client() as client:
            client.restore(Trained().app)
            for step in (1, 2):
                client.save(Trained().app, step=step)
                client.wait()
            ledger = Ledger(drive.seen_by(0))
            Keeper(ledger).rollback(RUN, ledger.checkpoint_at(RUN, 1).save, who="ann", reason="")
            assert client._heart is not None
            client._heart._beat_seconds = 0.001
            assert ended(client._heart)
            before = drive.seen_by(0).calls["put"]
            with pytest.raises(Fenced, match="was rolled back") as caught:
                client.save(Trained().app, step=3)
            assert drive.seen_by(0).calls["put"] == before
            assert "its restart resumes from the checkpoint that was chosen" in caught.value.do
        with Job(drive, url=url).client() as client:
            assert client.restore(Trained().app) == 1


def test_a_save_of_a_fenced_job_fails_before_anything_is_written(drive: Drive, monkeypatch: Any) -> None:
    with serving(drive) as url, Job(drive, url=url).client() as client:
        client.restore(Trained().app)
        assert client._heart is not None
        client._heart._fenced = Fenced("told by the service")
        before = drive.seen_by(0).calls["put"]
        with pytest.raises(Fenced, match="told by the service"):
            client.save(Trained().app, step=1)
        assert drive.seen_by(0).calls["put"] == before
