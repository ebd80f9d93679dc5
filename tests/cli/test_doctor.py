"""`ckptd doctor`: what it prints, its exit codes; and that the service and rank 0 refuse an unfit storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli import doctor as command
from ckptd.cli import main as cli
from ckptd.errors import AlreadyExists, Unavailable, Unfit
from ckptd.service import app as service
from ckptd.service.settings import ServiceSettings
from ckptd.storage import init_root
from ckptd.storage.base import Buffer
from ckptd.storage.local import LocalStorage
from ckptd.storage.probe import probe
from ckptd.testing.faulty import FaultyStorage
from ckptd_client import CheckpointClient, transport

Output = pytest.CaptureFixture[str]
QUICK = ("--racers", "2", "--rounds", "2")


class Overwriting(LocalStorage):
    """A folder whose put replaces what is there."""

    def put(self, key: str, chunks: Iterable[Buffer], size: int) -> None:
        try:
            super().put(key, chunks := list(chunks), size)
        except AlreadyExists:
            self.delete(key)
            super().put(key, chunks, size)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    init_root(f"file://{tmp_path}/root")
    return tmp_path / "root"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ckptd", *arguments])
        try:
            cli.run()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


def probing(monkeypatch: pytest.MonkeyPatch, storage: Any) -> None:
    """Make the command probe `storage` whatever its URL says."""

    def through(url: str, **options: Any) -> Any:
        return probe(url, **options, large_bytes=2_000_000, open_one=lambda: storage)

    monkeypatch.setattr(command, "probe", through)


def test_a_fit_storage(root: Path, call: Callable[..., int], capsys: Output) -> None:
    assert call("doctor", f"file://{root}", *QUICK) == 0
    out, err = capsys.readouterr()
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == ["verdict", "probe", "found", "what to do"]
    assert {"second create", "race of threads", "race of processes"} <= {line[1] for line in lines}
    assert err == f"file://{root} is fit; objects are created by hard link\n"


def test_as_json(root: Path, call: Callable[..., int], capsys: Output) -> None:
    assert call("doctor", f"file://{root}?publish=lock", "--json", "--keep", *QUICK) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["fit"], found["tier"], err) == (True, "rename under a lock", "")
    assert {finding["verdict"] for finding in found["findings"]} <= {"ok", "warn"}
    assert found["facts"]["kind"] == "folder"
    assert any(path.name == "race-0001" for path in (root / "probe").rglob("*"))


def test_an_unfit_storage_ends_with_8(
    root: Path, call: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing(monkeypatch, Overwriting(root))
    assert call("doctor", f"file://{root}", "--json", *QUICK) == 8
    out, err = capsys.readouterr()
    assert json.loads(out)["fit"] is False
    assert err.startswith(f"error: storage file://{root} is unfit: second create, race of threads")


def test_a_storage_that_stops_answering_ends_with_4_and_shows_what_was_found(
    root: Path, call: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = FaultyStorage(LocalStorage(root))
    faulty.fail_before("put", "taken", error=Unavailable("the server is away"))
    probing(monkeypatch, faulty)
    assert call("doctor", f"file://{root}", "--json", *QUICK) == 4
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["fit"], found["findings"][0]["name"]) == (None, "marker")
    assert err.startswith("error: the server is away")
    faulty.assert_all_fired()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["file:///nowhere/at/all"], 4), (["relative"], 2), (["ftp://x/y"], 2), (["file:///x", "--racers", "1"], 2)],
)
def test_what_cannot_be_probed(arguments: list[str], code: int, call: Callable[..., int]) -> None:
    assert call("doctor", *arguments) == code


def test_as_a_process(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptd", "doctor", f"file://{root}", *QUICK],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert (done.returncode, done.stderr) == (0, f"file://{root} is fit; objects are created by hard link\n")


def test_a_person_who_waits_is_told_what_is_done(
    root: Path, call: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert call("doctor", f"file://{root}", "--json", *QUICK) == 0
    assert "probing: race of threads" in capsys.readouterr().err


# Where a run starts.


def test_the_service_refuses_an_unfit_storage(
    root: Path, call: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "open_storage", lambda url: Overwriting(root))
    with pytest.raises(Unfit, match="second create"):
        service.create_app(ServiceSettings(storage=f"file://{root}"))
    assert call("serve", "--storage", f"file://{root}", "--port", "0") == 8
    assert "unfit: second create" in capsys.readouterr().err


def test_rank_0_refuses_an_unfit_storage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "open_storage", lambda url: Overwriting(root))
    with pytest.raises(Unfit, match="second create"):
        CheckpointClient(f"file://{root}", "en-it", rank=0, world_size=1)
    assert not (root / "runs").exists()


def test_one_rank_probes_for_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storages = [FaultyStorage(LocalStorage(root)) for _ in range(2)]
    for rank, storage in enumerate(storages):
        monkeypatch.setattr(transport, "open_storage", lambda url, storage=storage: storage)
        with CheckpointClient(f"file://{root}", "en-it", rank=rank, world_size=2) as client:
            assert client._transport.storage is storage
    probed = [any(key.startswith("probe/") for _, key in storage.history) for storage in storages]
    assert probed == [True, False]


def test_a_storage_that_is_away_at_the_probe_does_not_stop_the_client(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = FaultyStorage(LocalStorage(root))
    faulty.fail_before("put", lambda key: key.startswith("probe/"))
    monkeypatch.setattr(transport, "open_storage", lambda url: faulty)
    with CheckpointClient(f"file://{root}", "en-it", rank=0, world_size=1) as client:
        assert client.latest() is None
    faulty.assert_all_fired()
