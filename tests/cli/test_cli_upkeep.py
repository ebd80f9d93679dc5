"""The commands that decide, keep order and explain: on a storage and through a service, with the same outcome."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ckptd import layout
from ckptd.cli.options import whoever
from ckptd.fsck import FsckAnswer
from ckptd.ledger import Ledger
from ckptd.manifest import Borrowed
from ckptd.retaining import RetainAnswer
from ckptd.storage import open_storage
from ckptd.storage.reserve import SLOTS
from ckptd.testing.auditor import Auditor
from ckptd.testing.processes import ServiceProcess
from ckptd.why import Why
from ckptd.wire import BeginRequest, CheckpointInfo, CommitRequest, OpenRequest, VerifyAnswer
from tests.cli.commands import Output, call, new_storage, rows
from tests.homes import Stored, spoil
from tests.service.calling import ledger_on
from tests.service.writing import start, train, write_save

NUMBERS = itertools.count(1)
# What goes on in the background by itself would show in what the commands print.
QUIET = {"CKPTD_TOKEN": "a-token", "CKPTD_HOUSEKEEPING_SECONDS": "3600", "CKPTD_VERIFY_MIB_PER_SECOND": "0"}


@dataclass(frozen=True)
class Place:
    """A storage, and the service on it."""

    storage_url: str
    service_url: str


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPTD_URL", "CKPTD_STORAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CKPTD_TOKEN", "a-token")


@pytest.fixture(scope="module", params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    log = tmp_path_factory.mktemp("service") / "log"
    with new_storage(request, tmp_path_factory) as url, ServiceProcess(url, log=log, env=QUIET) as service:
        yield Place(url, service.url)


@pytest.fixture
def ledger(place: Place) -> Ledger:
    return ledger_on(open_storage(place.storage_url))


@pytest.fixture(params=["storage", "service"])
def source(request: pytest.FixtureRequest, place: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to do it, given as people do."""
    url = place.storage_url if request.param == "storage" else place.service_url
    monkeypatch.setenv("CKPTD_URL", url)
    return url


@pytest.fixture
def run(source: str) -> str:
    """A run of the test's own."""
    return f"run-{next(NUMBERS)}"


def payload(ledger: Ledger, commit: CommitRequest) -> Stored:
    return Stored(ledger.storage, ledger.manifest(commit.manifest).objects()[0].key)


# Deciding.


def test_quarantine_and_reinstate(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3, 6)
    assert call("quarantine", run, "6", "--reason", "diverged", "--who", "ann") == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("step 6 (g00000001-000000000006-a1) is in quarantine\n", "")
    assert call("ls", run) == 0
    assert [row[5] for row in rows(capsys.readouterr().out)[1:]] == ["valid, resume point", "quarantined, tip"]
    assert call("reinstate", run, "6", "--reason", "it was the plot", "--json") == 0
    info = CheckpointInfo.model_validate_json(capsys.readouterr().out)
    assert (info.status, info.is_resume_point) == ("valid", True)
    assert ledger.state(run).turns["quarantine:g00000001-000000000006-a1"] == 2


def test_rollback(run: str, ledger: Ledger, capsys: Output) -> None:
    """Not at a terminal: it is not asked."""
    train(ledger, run, 3, 6)
    assert call("rollback", run, "3", "--reason", "the loss explodes") == 0
    out = capsys.readouterr().out
    assert "step 3 (g00000001-000000000003-a1) is what the run goes on from; a job that was running is fenced" in out
    assert "restart resumes there" in out
    assert call("runs") == 0
    assert next(row for row in rows(capsys.readouterr().out) if row[0] == run)[-1] == "rolled back"
    assert ledger.current(run).ended == "rolled back"
    assert call("why", run) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "A start would resume from step 3 (g00000001-000000000003-a1).\nGeneration 1 is rolled back"
    )
    assert f"rolled back to step 3 by {whoever(None)}: the loss explodes" in out


@pytest.mark.parametrize(("typed", "code"), [("n\n", 1), ("\n", 1), ("y\n", 0)])
def test_rollback_asks_at_a_terminal(
    run: str, ledger: Ledger, capsys: Output, monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    train(ledger, run, 3, 6)
    monkeypatch.setattr(sys, "stdin", Keyboard(typed))
    assert call("rollback", run, "3", "--reason", "r") == code
    _, err = capsys.readouterr()
    assert "A job that is running is fenced" in err
    assert "its restart resumes from step 3" in err
    assert bool(ledger.current(run).ended) == (code == 0)
    if code:
        monkeypatch.setattr(sys, "stdin", Keyboard(""))
        assert call("rollback", run, "3", "--reason", "r", "--yes") == 0
        assert ledger.current(run).ended == "rolled back"


def test_close_and_reopen(run: str, ledger: Ledger, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    train(ledger, run, 3, 6)
    assert call("close", run, "--reason", "trained", "--who", "ann") == 0
    assert capsys.readouterr().out == f"run {run} is closed\n"
    assert call("runs") == 0
    assert next(row for row in rows(capsys.readouterr().out) if row[0] == run)[-1] == "closed"
    assert call("why", run) == 0
    assert f"But the run is closed by ann: trained. `ckptd reopen {run}` lets it go on.\n" in capsys.readouterr().out
    for command in (("pin", run, "3"), ("verify", run), ("retain", run, "--keep-last", "2"), ("gc", run)):
        assert call(*command) == 0
    assert call("reopen", run, "--reason", "more data", "--json") == 0
    capsys.readouterr()
    assert call("runs") == 0
    assert next(row for row in rows(capsys.readouterr().out) if row[0] == run)[-1] == "reopened"
    assert start(ledger, run).generation == 2
    assert call("close", "nobody", "--reason", "r") == 3

    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Keyboard("n\n"))
    assert call("close", run, "--reason", "r") == 1
    assert not ledger.current(run).ended


def test_show_tells_the_checkpoint_that_is_named(run: str, ledger: Ledger, capsys: Output) -> None:
    """Two checkpoints of one step: the one on the line, and one that a roll-back left behind."""
    train(ledger, run, 3, 6)
    assert call("rollback", run, "3", "--reason", "r") == 0
    train(ledger, run, 6)
    old, new = (layout.save_id(generation, 6, all_ranks=True, count=1) for generation in (1, 2))
    for arguments, save in (((), new), (("--save", new), new), (("--save", old), old)):
        capsys.readouterr()
        assert call("show", run, "6", *arguments, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["checkpoint"]["save"], shown["manifest"]["save"]) == (save, save)
        assert [c["step"] for c in shown["lineage"]] == [6, 3]
    assert call("show", run, "3", "--save", old) == 3
    assert call("show", run, "6", "--save", "../x") == 2


def test_borrowing_is_shown(run: str, ledger: Ledger, capsys: Output) -> None:
    """What was written and what is shared; each object counted once in the size of a run; what is kept for whom."""
    train(ledger, run, 1, 2)
    lender = ledger.manifest(ledger.checkpoint_at(run, 1).manifest)
    borrowed = tuple(Borrowed(save=lender.save, object=ref, names=("shared.w",)) for ref in lender.written())
    for step in (3, 4):
        ledger.commit(run, write_save(ledger.storage, run, 1, step, borrowed=borrowed))
    assert call("show", run, "4") == 0
    shown = capsys.readouterr().out
    assert ["shared", f"2048 in objects of {lender.save}"] in rows(shown)
    assert [lender.save, "2048", "1", lender.written()[0].key] in rows(shown)
    assert call("runs") == 0
    row = next(row for row in rows(capsys.readouterr().out) if row[0] == run)
    assert row[3:5] == ["4", "8192"]
    assert call("retain", run, "--keep-last", "2") == 0
    out, err = capsys.readouterr()
    assert "its bytes stay for the sake of 2 that borrow from it, the newest of step 4" in out
    assert f"{lender.save} is kept for the sake of g00000001-000000000003-a1, g00000001-000000000004-a1" in err
    assert call("gc", run) == 0
    assert "is kept for the sake of" in capsys.readouterr().err
    assert call("ls", run) == 0
    first = rows(capsys.readouterr().out)[1]
    assert first[6].startswith("the sake of ")
    assert call("verify", run, "4") == 0
    assert rows(capsys.readouterr().out)[1][1:3] == ["whole", "4096"]
    assert call("show", run, "2") == 0  # its bytes are gone, manifest included
    Auditor(ledger.storage, run).assert_clean()


def test_pin_and_unpin(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3)
    assert call("pin", run, "3") == 0
    assert call("pin", run, "3", "--who", "bob") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1].endswith(f"is pinned by bob; pinned by {', '.join(sorted(['bob', whoever(None)]))}")
    assert call("unpin", run, "3") == 0
    assert "is not pinned by" in capsys.readouterr().out
    assert call("ls", run) == 0
    assert rows(capsys.readouterr().out)[1][6] == "pinned by bob"


def test_a_step_with_several_checkpoints_is_told(run: str, ledger: Ledger, capsys: Output) -> None:
    (first,) = train(ledger, run, 6)
    (second,) = train(ledger, run, 6)
    assert call("pin", run, "6", "--who", "ann") == 0
    err = capsys.readouterr().err
    assert f"step 6 has several checkpoints; this was about {second.save}. Others: {first.save}" in err
    assert call("quarantine", run, "6", "--reason", "r", "--save", first.save) == 0
    out, err = capsys.readouterr()
    assert (first.save in out, err) == (True, "")
    assert call("verify", run, "--save", first.save, "--json") == 0
    assert [answer["save"] for answer in json.loads(capsys.readouterr().out)] == [first.save]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["pin", "RUN", "4"], 3, "no checkpoint of step 4; it has [3]"),
        (["pin", "absent", "3"], 3, "no run absent"),
        (["pin", "RUN", "3", "--save", "x"], 2, "save id 'x' is not allowed"),
        (["pin", "RUN", "3", "--who", "x" * 201], 2, "--who: "),
        (["quarantine", "RUN", "3", "--reason", "x" * 1001], 2, "--reason: "),
        (["verify", "RUN", "4"], 3, "no such checkpoint"),
        (["verify", "RUN", "3", "--all"], 2, "exclude each other"),
        (["why", "absent"], 3, "no run absent"),
        (["fsck", "absent"], 3, "no run absent"),
        (["gc", "absent"], 3, "no run absent"),
        (["retain", "absent", "--keep-last", "2"], 3, "no run absent"),
    ],
)
def test_what_is_not_there_or_not_allowed(
    run: str, ledger: Ledger, capsys: Output, arguments: list[str], code: int, said: str
) -> None:
    train(ledger, run, 3)
    assert call(*(run if word == "RUN" else word for word in arguments)) == code
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err


@pytest.mark.parametrize(
    "arguments", [["quarantine", "r", "3"], ["retain", "r"], ["retain", "r", "--keep-last", "1"], ["verify"]]
)
def test_a_wrong_call(arguments: list[str]) -> None:
    assert call(*arguments) == 2


def test_a_roll_back_to_what_is_given_up_is_a_conflict(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3, 6)
    assert call("quarantine", run, "3", "--reason", "r") == 0
    assert call("rollback", run, "3", "--reason", "r") == 5
    assert "no valid checkpoint" in capsys.readouterr().err


# Keeping order.


def test_verify(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3, 6, 9)
    assert call("verify", run) == 0  # what a start would load
    assert rows(capsys.readouterr().out)[1][:2] == ["9", "whole"]
    assert call("verify", run, "3") == 0
    assert [info.verified for info in ledger.checkpoints(run)] == [True, False, True]
    capsys.readouterr()
    assert call("verify", run, "--all", "--json") == 0
    answers = [VerifyAnswer.model_validate(item) for item in json.loads(capsys.readouterr().out)]
    assert [(answer.step, answer.result) for answer in answers] == [(3, "whole"), (6, "whole"), (9, "whole")]


def test_verify_finds_damage(run: str, ledger: Ledger, capsys: Output) -> None:
    commits = train(ledger, run, 3, 6)
    spoil(payload(ledger, commits[1]))
    assert call("verify", run, "--all") == 6
    found = rows(capsys.readouterr().out)[1:]
    assert [row[:2] for row in found] == [["3", "whole"], ["6", "damaged"]]
    assert [info.status for info in ledger.checkpoints(run)] == ["valid", "quarantined"]


def test_retain_tells_before_it_does(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3, 6, 9)
    assert call("retain", run, "--keep-last", "2", "--dry-run") == 0
    table = rows(capsys.readouterr().out)
    assert table[0] == ["step", "decision", "rule", "save"]
    assert [row[:3] for row in table[1:]] == [
        ["3", "retire", "no rule keeps it"],
        ["6", "keep", "one of the last 2 of the line"],
        ["9", "keep", "the resume point"],
    ]
    assert [info.status for info in ledger.checkpoints(run)] == ["valid"] * 3
    assert call("retain", run, "--keep-last", "2") == 0
    err = capsys.readouterr().err
    assert "2 verified, 1 retired, 3 objects deleted" in err
    assert [info.status for info in ledger.checkpoints(run)] == ["purged", "valid", "valid"]
    assert call("retain", run, "--keep-last", "2", "--keep-every", "5", "--json") == 0
    answer = RetainAnswer.model_validate_json(capsys.readouterr().out)
    assert (answer.retired, [d.keep for d in answer.decisions]) == ((), [True, True])
    Auditor(ledger.storage, run).assert_clean()


def test_retain_during_a_start_is_a_conflict(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3, 6, 9)
    attempt = layout.new_attempt()
    ledger.open(run, OpenRequest(attempt=attempt, job="j", host="h"))
    ledger.begin(run, BeginRequest(attempt=attempt, job="j", world=1))
    assert call("retain", run, "--keep-last", "2") == 5
    assert "no generation is ready" in capsys.readouterr().err


def test_retain_on_damage(run: str, ledger: Ledger, capsys: Output) -> None:
    commits = train(ledger, run, 3, 6, 9)
    spoil(payload(ledger, commits[2]))
    assert call("retain", run, "--keep-last", "2") == 6
    assert "warning: step 9 is damaged" in capsys.readouterr().err
    assert [info.status for info in ledger.checkpoints(run)] == ["valid", "valid", "quarantined"]


def test_gc(run: str, ledger: Ledger, capsys: Output) -> None:
    start(ledger, run)
    write_save(ledger.storage, run, 1, 3)
    assert call("gc", run) == 0
    assert capsys.readouterr().out == "0 objects deleted; of 0 retired checkpoints all is gone\n"
    start(ledger, run)
    assert call("gc", run, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"objects": 3, "purged": [], "lent": []}


# Explaining and checking.


def test_why(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3, 6, 9)
    assert call("quarantine", run, "9", "--reason", "diverged", "--who", "ann") == 0
    capsys.readouterr()
    assert call("why", run) == 0
    out = capsys.readouterr().out
    assert out.startswith("A start would resume from step 6 (g00000001-000000000006-a1).\n")
    assert "Generation 1 is training: job job on node-1, 1 ranks, started " in out
    assert "9\tno\ttip\t-\tin quarantine (operator by ann): diverged\t" in out
    assert "6\tresume\tresume point\t-\tthe newest valid checkpoint of the line\t" in out
    assert "3\tolder\t-\t-\tvalid, and older\t" in out
    assert call("why", run, "--json") == 0
    assert Why.model_validate_json(capsys.readouterr().out).latest.checkpoint.step == 6  # type: ignore[union-attr]


def test_why_of_a_run_that_cannot_start(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3)
    assert call("quarantine", run, "3", "--reason", "r") == 0
    assert call("why", run) == 6
    out, err = capsys.readouterr()
    assert "A start would fail" in out
    assert "will not start from zero" in err


def test_fsck(run: str, ledger: Ledger, capsys: Output) -> None:
    commits = train(ledger, run, 3, 6)
    lost = write_save(ledger.storage, run, 1, 9)
    assert call("fsck", run, "--deep") == 0
    out, err = capsys.readouterr()
    assert {row[0] for row in rows(out)[1:]} == {"leftover"}
    assert lost.save in out
    assert "6 records, 2 checkpoints, 4 objects looked at, 4096 of payload read: no damage" in err
    stored = payload(ledger, commits[1])
    spoil(stored)
    assert call("fsck", run) == 0  # the size is right
    assert call("fsck", run, "--deep") == 6
    assert ("damage", stored.key) in [(row[0], row[1]) for row in rows(capsys.readouterr().out)]
    stored.unlink()
    assert call("fsck", run, "--json") == 6
    answer = FsckAnswer.model_validate_json(capsys.readouterr().out)
    assert [f.object for f in answer.findings if f.severity == "damage"] == [stored.key]
    assert ledger.state(run).quarantined == {}  # it only tells


def test_fsck_and_why_of_a_damaged_log(run: str, ledger: Ledger, capsys: Output) -> None:
    train(ledger, run, 3)
    slot = Stored(ledger.storage, layout.log_key(run, 2))
    spoil(slot)
    assert call("fsck", run, "--deep") == 6
    assert slot.key in capsys.readouterr().out
    assert call("why", run) == 6
    assert f"log slot {slot.key} is damaged" in capsys.readouterr().err


# Around it.


def test_init_makes_the_reserve(bare_home: str) -> None:
    assert call("init", bare_home) == 0
    storage = open_storage(bare_home)
    assert len(storage.list(layout.RESERVE)) == (SLOTS if bare_home.startswith("file://") else 0)


def test_a_bar_at_a_terminal_without_colours_where_they_are_not_wanted(run: str, ledger: Ledger) -> None:
    train(ledger, run, 3)
    leader, follower = pty.openpty()
    try:
        env = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}
        command = [sys.executable, "-m", "ckptd", "verify", run]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=env, text=True, timeout=120)
        os.close(follower)
        follower = -1
        said = b""
        while chunk := _read(leader):
            said += chunk
    finally:
        os.close(leader)
        if follower >= 0:
            os.close(follower)
    assert done.returncode == 0
    assert rows(done.stdout)[1][:2] == ["3", "whole"]
    assert f"reading {run}".encode() in said
    assert not re.search(rb"\x1b\[(?:[0-9]+;)*(?:3[0-9]|9[0-7])", said), said


def _read(leader: int) -> bytes:
    """What the other side of a terminal wrote; nothing after its end."""
    try:
        return os.read(leader, 65536)
    except OSError:
        return b""


def test_whoever_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert whoever(None).startswith(f"uid {os.getuid()} on ")
    assert whoever("ann") == "ann"
