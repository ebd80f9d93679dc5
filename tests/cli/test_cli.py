"""The command line, on a storage and on a service: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ckptd import __version__, layout
from ckptd.cli import main as cli
from ckptd.cli import options, tables
from ckptd.errors import (
    AlreadyExists,
    CkptdError,
    Conflict,
    Corrupt,
    Fenced,
    InUse,
    Invalid,
    NotFound,
    NotInitialised,
    OutcomeUnknown,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from ckptd.ledger import Ledger
from ckptd.manifest import Manifest
from ckptd.records import Damage, Observer
from ckptd.storage import open_storage
from ckptd.testing.processes import ServiceProcess
from ckptd.wire import CheckpointInfo, DamageReport, Latest, RunInfo
from tests.cli.commands import Output, call, new_storage, rows
from tests.homes import everything
from tests.service.calling import ledger_on
from tests.service.writing import train


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPTD_URL", "CKPTD_STORAGE", "CKPTD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="module", params=["folder", "s3"])
def drive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a storage with two runs: `en-it` with steps 3 and 6, and `torn`, damaged after step 2."""
    with new_storage(request, tmp_path_factory) as url:
        ledger = Ledger(open_storage(url))
        train(ledger, "en-it", 3, 6, loss=float("nan"))
        train(ledger, "torn", 2)
        records = ledger.run_info("torn").records
        ledger.storage.put(layout.log_key("torn", records + 1), [b"{"], 1)
        yield url


@pytest.fixture(scope="module")
def service(drive: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    log = tmp_path_factory.mktemp("service") / "log"
    # Without scrubbing, which would show in what is printed.
    env = {"CKPTD_TOKEN": "a-token", "CKPTD_VERIFY_MIB_PER_SECOND": "0"}
    with ServiceProcess(drive, log=log, env=env) as process:
        yield process


@pytest.fixture(params=["storage", "service"])
def source(request: pytest.FixtureRequest, drive: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to read: the answers are the same."""
    if request.param == "storage":
        return drive
    service: ServiceProcess = request.getfixturevalue("service")
    monkeypatch.setenv("CKPTD_TOKEN", "a-token")
    return service.url


def test_runs(source: str, capsys: Output) -> None:
    assert call("runs", "--url", source) == 6
    out, err = capsys.readouterr()
    header, first, second = rows(out)
    assert header[:2] == ["run", "resume step"]
    assert (first[:2], first[-1]) == (["en-it", "6"], "ready")
    assert (second[:2], second[-1]) == (["torn", "2"], "damaged")
    assert "warning: run torn: log slot runs/torn/log/" in err
    assert call("runs", "--url", source, "--json") == 6
    infos = [RunInfo.model_validate_json(json.dumps(info)) for info in json.loads(capsys.readouterr().out)]
    assert [(info.run, info.checkpoints) for info in infos] == [("en-it", 2), ("torn", 1)]


def test_ls(source: str, capsys: Output) -> None:
    assert call("ls", "en-it", "--url", source) == 0
    _, *found = rows(capsys.readouterr().out)
    assert [row[0] for row in found] == ["3", "6"]
    assert "valid, tip, resume point" in found[1]
    assert "loss=nan" in found[1]
    assert call("ls", "en-it", "--url", source, "--json") == 0
    infos = [CheckpointInfo.model_validate_json(json.dumps(info)) for info in json.loads(capsys.readouterr().out)]
    assert [info.step for info in infos] == [3, 6]


def test_show(source: str, capsys: Output) -> None:
    assert call("show", "en-it", "6", "--url", source) == 0
    out = capsys.readouterr().out
    fields = dict(row for row in rows(out) if len(row) == 2)
    assert (fields["step"], fields["lineage"], fields["producer"]) == ("6", "6 <- 3", "tests")
    assert "xxh3-128:" in out
    assert ".safetensors" in out
    assert call("show", "en-it", "6", "--url", source, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    manifest = Manifest.model_validate_json(json.dumps(shown["manifest"]))
    assert manifest.step == shown["checkpoint"]["step"] == 6
    assert [info["step"] for info in shown["lineage"]] == [6, 3]


def test_latest(source: str, capsys: Output) -> None:
    assert call("latest", "en-it", "--url", source) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("found\ten-it\t1\tstep 6, save g00000001-000000000006-a1")
    assert "6\tyes\tg00000001-000000000006-a1\tnewest valid checkpoint" in out
    assert call("latest", "en-it", "--url", source, "--json") == 0
    assert Latest.model_validate_json(capsys.readouterr().out).generation == 1
    assert call("latest", "nothing-yet", "--url", source) == 0
    assert capsys.readouterr().out.splitlines()[1] == "none\tnothing-yet\t0\t-"


@pytest.mark.parametrize("command", [["ls", "torn"], ["show", "torn", "2"]])
def test_a_damaged_log_shows_what_can_be_read(source: str, capsys: Output, command: list[str]) -> None:
    assert call(*command, "--url", source) == 6
    out, err = capsys.readouterr()
    assert "g00000001-000000000002-a1" in out
    assert "warning: this is what can be read: log slot runs/torn/log/" in err
    assert call(*command, "--url", source, "--json") == 6
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", [["latest", "torn"], ["show", "torn", "7"]])
def test_a_damaged_log_answers_nothing_it_cannot_know(source: str, capsys: Output, command: list[str]) -> None:
    assert call(*command, "--url", source) == 6
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: log slot runs/torn/log/" in err
    assert "do not delete or edit other slots" in err


def test_a_run_without_a_valid_checkpoint(home: str, capsys: Output) -> None:
    ledger = ledger_on(open_storage(home))
    (commit,) = train(ledger, "en-it", 3)
    key = ledger.manifest(commit.manifest).objects()[0].key
    ledger.storage.delete(key)
    finding = Damage(object=key, expected="x", observed="y")
    reader = Observer(host="h", process="p")
    assert ledger.report_damage("en-it", DamageReport(save=commit.save, damage=finding, reader=reader)).confirmed
    assert call("latest", "en-it", "--url", home) == 6
    out, err = capsys.readouterr()
    assert "corrupt\ten-it" in out
    assert f"quarantined (damage): {key}" in out
    assert "will not start from zero" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ls", "absent"], 3, "no run absent"),
        (["show", "en-it", "4"], 3, "no checkpoint of step 4; it has [3, 6]"),
        (["show", "absent", "4"], 3, "no run absent"),
        (["ls", "BAD"], 2, "run name 'BAD' is not allowed"),
        (["ls", "../etc"], 2, "run name '../etc' is not allowed"),
        (["show", "en-it", "--", "-4"], 2, "step -4 is not allowed"),
        (["latest", "a b"], 2, "run name 'a b' is not allowed"),
    ],
)
def test_what_is_not_there_or_not_allowed(
    source: str, capsys: Output, arguments: list[str], code: int, said: str
) -> None:
    assert call(arguments[0], "--url", source, *arguments[1:]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "what to do: " in err


@pytest.mark.parametrize("arguments", [[], ["--nonsense"], ["nonsense"], ["show", "en-it"], ["show", "en-it", "x"]])
def test_a_wrong_call(arguments: list[str]) -> None:
    assert call(*arguments) == 2


def test_a_token_that_is_missing(service: ServiceProcess, capsys: Output) -> None:
    assert call("runs", "--url", service.url) == 7
    assert "CKPTD_TOKEN" in capsys.readouterr().err


def test_a_service_that_is_down(capsys: Output) -> None:
    assert call("runs", "--url", "http://127.0.0.1:1") == 4
    assert "the service does not answer at http://127.0.0.1:1/v1/runs" in capsys.readouterr().err


def test_no_source_named(capsys: Output) -> None:
    assert call("runs") == 2
    assert "CKPTD_URL or CKPTD_STORAGE" in capsys.readouterr().err


def test_the_url_comes_before_the_storage(drive: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_STORAGE", drive)
    assert call("ls", "en-it") == 0
    monkeypatch.setenv("CKPTD_URL", "http://127.0.0.1:1")
    assert call("ls", "en-it") == 4


def test_a_root_without_its_marker_names_both_reasons(bare_home: str, capsys: Output) -> None:
    for arguments in (["runs", "--url"], ["serve", "--storage"]):
        assert call(*arguments, bare_home) == 4
        err = capsys.readouterr().err
        assert "new storage" in err
        assert "not mounted" in err
        assert f"ckptd init {bare_home}" in err
    assert everything(bare_home) == set()


def test_init_is_done_once(bare_home: str, capsys: Output) -> None:
    assert call("init", bare_home) == 0
    uuid = capsys.readouterr().out.split()[-1]
    assert call("init", bare_home, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"url": bare_home, "uuid": uuid}
    assert call("runs", "--url", bare_home, "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("arguments", [["init", "s4://x"], ["init", "relative"], ["runs", "--url", "ftp://x"]])
def test_a_url_that_is_none(arguments: list[str], capsys: Output) -> None:
    assert call(*arguments) == 2
    assert "storage URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "storage"),
        (["--storage", "memory://x", "--host", "0.0.0.0"], "needs a token"),
        (["--storage", "memory://x", "--port", "99999"], "port"),
        (["--storage", "memory://x", "--token-file", "/nonexistent"], "token file /nonexistent"),
    ],
)
def test_serve_refuses_bad_settings(arguments: list[str], said: str, capsys: Output) -> None:
    assert call("serve", *arguments) == 2
    assert said in capsys.readouterr().err


def test_serve_without_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.delitem(sys.modules, "ckptd.service.server", raising=False)
    monkeypatch.delattr("ckptd.service.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert call("serve", "--storage", "memory://x") == 2
    err = capsys.readouterr().err
    assert "uvicorn" in err
    assert "pip install 'ckptd[service]'" in err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Invalid, 2),
        (NotFound, 3),
        (Unavailable, 4),
        (Unreachable, 4),
        (OutcomeUnknown, 4),
        (NotInitialised, 4),
        (Conflict, 5),
        (AlreadyExists, 5),
        (Fenced, 5),
        (InUse, 5),
        (Corrupt, 6),
        (Unauthorized, 7),
        (CkptdError, 1),
    ],
)
def test_exit_codes(kind: type[CkptdError], code: int) -> None:
    assert options.exit_code(kind("x")) == code


def _run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptd", *arguments], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_as_a_process(drive: str) -> None:
    done = _run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ckptd {__version__}\n", "")
    missing = _run("ls", "absent", "--url", drive)
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr.startswith("error: there is no run absent")
    assert "Traceback" not in missing.stderr


def test_documented_commands_exist() -> None:
    names = {command.name or getattr(command.callback, "__name__", "") for command in cli.app.registered_commands}
    assert {"init", "doctor", "serve", "runs", "ls", "show", "latest"} <= names
    assert cli.__doc__ is not None
    assert all(f"`{name}`" in cli.__doc__ or f"`ckptd {name}`" in cli.__doc__ for name in names)
    for name in names:
        assert call(name, "--help") == 0


class _Terminal:
    """Stands for standard output where a person looks at it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table_and_respects_no_color(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "on_terminal", _Terminal().isatty)
    monkeypatch.setenv("NO_COLOR", "1")
    tables.print_table(("step", "metrics"), [(3, "loss=0.5"), (None, "[red]x\x1b[2J")])
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()] == [
        ["step", "metrics"],
        ["3", "loss=0.5"],
        ["-", "[red]x\\x1b[2J"],
    ]
    assert tables.size(3 * 2**20) == "3.0 MiB"
    assert tables.size(12) == "12 B"


def test_what_others_wrote_cannot_drive_the_terminal(capsys: Output) -> None:
    values: list[Any] = ["a\tb", "c\nd", "\x1b[31m", "\u202e"]
    tables.print_table(("x",), [(value,) for value in values])
    assert capsys.readouterr().out.splitlines() == ["x", "a\\tb", "c\\nd", "\\x1b[31m", "\\u202e"]
