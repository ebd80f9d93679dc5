"""The service as a real process: killed, restarted, doubled, ended in order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from ckptd import layout
from ckptd.errors import Unavailable
from ckptd.ledger import Ledger
from ckptd.records import Damage, Observer
from ckptd.service.server import _listen
from ckptd.storage import open_storage
from ckptd.testing.processes import ServiceProcess
from ckptd.wire import BeginRequest, DamageReport, OpenRequest
from tests.core.by_hand import overwrite
from tests.homes import unmounted
from tests.service.writing import start, write_save

pytestmark = pytest.mark.e2e
T = TypeVar("T")
RUN = "/v1/runs/en-it"


def open_and_begin(base: str, job: str = "j") -> httpx.Response:
    attempt = layout.new_attempt()
    opened = OpenRequest(attempt=attempt, job=job, host="h").model_dump()
    assert httpx.post(f"{base}{RUN}/attempts", json=opened, timeout=60).status_code == 204
    begin = BeginRequest(attempt=attempt, job=job, world=4).model_dump()
    return httpx.post(f"{base}{RUN}/generations", json=begin, timeout=60)


def at_once(*calls: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_kill_9_and_restart_lose_nothing(home: str, tmp_path: Path) -> None:
    ledger = Ledger(open_storage(home))
    with ServiceProcess(home, log=tmp_path / "log") as service:
        begun = open_and_begin(service.url)
        answer = begun.json()
        ready = f"{service.url}{RUN}/generations/1/ready"
        assert httpx.post(ready, json={"attempt": answer["attempt"]}, timeout=60).status_code == 204
        commit = write_save(ledger.storage, "en-it", 1, 5)

        before, pid = service.url, service.pid
        service.kill()
        assert not service.alive
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{before}/health/live")
        service.restart()
        assert service.url == before
        assert service.pid != pid

        joined = httpx.get(f"{service.url}{RUN}/attempts/{answer['attempt']}/answer", timeout=60)
        assert joined.content == begun.content
        for _ in range(2):  # the retry of a commit whose answer was lost
            done = httpx.post(f"{service.url}{RUN}/saves/{commit.save}/commit", json=commit.model_dump(), timeout=60)
            assert done.json()["status"] == "durable"
        service.restart()
        assert [c["step"] for c in httpx.get(f"{service.url}{RUN}/checkpoints", timeout=60).json()] == [5]


def test_two_services_over_one_storage_and_a_direct_client(home: str, tmp_path: Path) -> None:
    ledger = Ledger(open_storage(home))
    with ServiceProcess(home, log=tmp_path / "a") as one, ServiceProcess(home, log=tmp_path / "b") as two:
        answers = at_once(*(lambda base=base: open_and_begin(base) for base in [one.url, two.url] * 4))
        begun = {answer.json()["generation"]: answer for answer in answers if answer.status_code == 200}
        fenced = [answer.json()["code"] for answer in answers if answer.status_code != 200]
        assert sorted(begun) == list(range(1, len(begun) + 1))
        assert len(begun) + len(fenced) == 8
        assert set(fenced) <= {"fenced"}
        assert ledger.current("en-it").generation == len(begun)

        for answer in begun.values():
            attempt = answer.json()["attempt"]
            urls = [f"{base}{RUN}/attempts/{attempt}/answer" for base in [one.url, two.url] * 2]
            joins = at_once(*(lambda url=url: httpx.get(url, timeout=60) for url in urls))
            direct = ledger.join("en-it", attempt)
            assert direct is not None
            assert {join.content for join in joins} == {answer.content}
            assert type(direct).model_validate_json(answer.content) == direct


def test_one_commit_through_two_services_is_one_checkpoint(home: str, tmp_path: Path) -> None:
    ledger = Ledger(open_storage(home))
    start(ledger, "en-it")
    commit = write_save(ledger.storage, "en-it", 1, 5)
    path = f"{RUN}/saves/{commit.save}/commit"
    with ServiceProcess(home, log=tmp_path / "a") as one, ServiceProcess(home, log=tmp_path / "b") as two:
        body = commit.model_dump()
        done = at_once(
            *(lambda base=base: httpx.post(base + path, json=body, timeout=60) for base in [one.url, two.url] * 3)
        )
        assert [answer.json()["status"] for answer in done] == ["durable"] * 6
        assert [httpx.get(f"{base}{RUN}", timeout=60).json()["checkpoints"] for base in (one.url, two.url)] == [1, 1]


def test_damage_is_read_again_by_another_process(home: str, tmp_path: Path) -> None:
    ledger = Ledger(open_storage(home))
    start(ledger, "en-it")
    commit = write_save(ledger.storage, "en-it", 1, 5)
    ledger.commit("en-it", commit)
    key = ledger.manifest(commit.manifest).objects()[0].key
    report = DamageReport(
        save=commit.save,
        damage=Damage(object=key, expected="x", observed="y"),
        reader=Observer(host="node-1", process="rank 0"),
    )
    with ServiceProcess(home, log=tmp_path / "log") as service:
        damage = f"{service.url}{RUN}/damage"
        assert httpx.post(damage, json=report.model_dump(), timeout=120).json()["confirmed"] is False
        overwrite(ledger.storage, key, b"\0" * ledger.storage.size(key))
        assert httpx.post(damage, json=report.model_dump(), timeout=120).json()["confirmed"] is True
        latest = httpx.get(f"{service.url}{RUN}/latest", timeout=60).json()
        assert (latest["answer"], latest["candidates"][0]["valid"]) == ("corrupt", False)


def test_sigterm_answers_those_who_wait_and_ends_with_0(home: str, tmp_path: Path) -> None:
    ledger = Ledger(open_storage(home))
    ledger.open("en-it", OpenRequest(attempt="1" * 32, job="j", host="h"))
    with ServiceProcess(home, log=tmp_path / "log", env={"CKPTD_MAX_WAIT_SECONDS": "3000"}) as service:
        address = (service.url.removeprefix("http://").split(":")[0], service.port)
        with socket.create_connection(address) as line:
            line.settimeout(60)
            path = f"{RUN}/attempts/{'1' * 32}/answer?wait_seconds=3000"
            # Two requests at one time: the second one is answered at once, so the first one was read before.
            line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert httpx.get(f"{service.url}/health/ready", timeout=60).status_code == 200
            assert service.stop() == 0
            assert line.recv(100).startswith(b"HTTP/1.1 204")


def test_a_root_that_loses_its_marker_turns_readiness_red(home: str, tmp_path: Path) -> None:
    with ServiceProcess(home, log=tmp_path / "log") as service:
        assert httpx.get(f"{service.url}/health/ready", timeout=60).status_code == 200
        with unmounted(home):
            answer = httpx.get(f"{service.url}/health/ready", timeout=60)
            assert (answer.status_code, answer.json()["code"]) == (503, "not-initialised")
            assert open_attempt_code(service.url) == "not-initialised"
        assert httpx.get(f"{service.url}/health/ready", timeout=60).status_code == 200


def open_attempt_code(base: str) -> str:
    body = OpenRequest(attempt="1" * 32, job="j", host="h").model_dump()
    return str(httpx.post(f"{base}{RUN}/attempts", json=body, timeout=60).json()["code"])


def test_init_and_a_token_from_a_file(bare_home: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token\n")
    options = ["--token-file", str(tmp_path / "token")]
    with ServiceProcess(bare_home, log=tmp_path / "log", options=options) as service:
        assert httpx.get(f"{service.url}/health/ready", timeout=60).status_code == 200
        assert httpx.get(f"{service.url}/v1/runs", timeout=60).json()["code"] == "unauthorized"
        headers = {"Authorization": "Bearer a-token"}
        assert httpx.get(f"{service.url}/v1/runs", headers=headers, timeout=60).json() == []
    assert "a-token" not in (tmp_path / "log").read_text()


def test_a_service_that_cannot_start_says_why(bare_home: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"exit code 4.*drive that is not mounted"):
        ServiceProcess(bare_home, log=tmp_path / "log", init=False).start()


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"exit code 4.*cannot listen on 127\.0\.0\.1 port {port}"):
            ServiceProcess(f"file://{tmp_path}/root", log=tmp_path / "log", port=port).start()


def test_the_process_ends_with_the_block_even_when_it_is_stopped(tmp_path: Path) -> None:
    with ServiceProcess(f"file://{tmp_path}/root", log=tmp_path / "log") as service:
        pid = service.pid
        os.kill(pid, signal.SIGSTOP)
    assert not service.alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_answers_are_not_held_back_on_an_open_line() -> None:
    with (
        _listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as line,
    ):
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_thread_that_hangs_does_not_hold_up_the_end() -> None:
    code = (
        "import threading; from ckptd.service.server import _leave_hung_threads;"
        "threading.Thread(target=threading.Event().wait, name='dead-mount').start(); _leave_hung_threads(0.01)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "dead-mount" in done.stderr) == (0, True)


def test_nothing_of_the_web_is_imported_without_need() -> None:
    """The client and the command line work without the service extra."""
    code = (
        "import sys; import ckptd.cli.main, ckptd.cli.source, ckptd.ledger, ckptd.testing.processes;"
        "print([m for m in ('fastapi', 'uvicorn', 'pydantic_settings', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
