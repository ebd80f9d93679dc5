"""The spool with real parts: a process killed with saves in it, a server that stops in the middle of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from ckptd.ledger import Ledger
from ckptd.storage import init_root, open_storage
from ckptd.testing.auditor import Auditor
from ckptd.testing.seaweed import SeaweedProcess
from tests.client.ranks import RUN, Trained
from tests.e2e.processes import until
from tests.homes import unmounted

DEADLINE_SECONDS = 120.0
ROOT = Path(__file__).parents[2]


class SpoolingRank:
    """A `spooling_rank.py`. `ask` waits for its answer."""

    def __init__(self, url: str, spool: Path, *, patience_seconds: float, log: Path) -> None:
        command = [sys.executable, "-m", "tests.client.spooling_rank", url, RUN, str(spool), str(patience_seconds)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, cwd=ROOT
            )
        self._log = log
        self.started = self._answer()

    def ask(self, order: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n".encode())
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_SECONDS)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the rank ended with {self._process.wait(DEADLINE_SECONDS)}: {self._log.read_text()[-3000:]}"
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def digest(step: int) -> list[str]:
    return [part.hex() for part in Trained(updates=step).digest()]


def test_a_process_killed_with_a_spool_resumes_from_what_is_durable_and_the_spool_is_cleaned(tmp_path: Path) -> None:
    url, folder, log = f"file://{tmp_path}/root", tmp_path / "spool", tmp_path / "rank.log"
    (tmp_path / "root").mkdir()
    init_root(url)
    auditor = Auditor(open_storage(url), RUN)
    with SpoolingRank(url, folder, patience_seconds=30.0, log=log) as rank:
        rank.ask("save")
        assert rank.ask("wait") == {"durable_step": 1}
        with unmounted(url):
            for _ in range(3):
                rank.ask("save")
            until("the third spool file", lambda: rank.ask("look")["counts"]["spooled"] == 3)
            assert rank.ask("look")["durable_step"] == 1
            left = {path.name for path in folder.iterdir()}
            assert len(left) in (2, 3)  # two wait, and one may be on its way
            rank.kill()
    notes = folder / "notes.spool"
    notes.write_text("of somebody else")
    with SpoolingRank(url, folder, patience_seconds=30.0, log=log) as again:
        assert again.started == {"step": 1, "epoch": 1, "digest": digest(1)}
        assert [path.name for path in folder.iterdir()] == ["notes.spool"]
        again.ask("save")
        assert again.ask("close") == {"closed": True}
    auditor.assert_clean(acknowledged=[1, 2])
    assert [c.step for c in Ledger(open_storage(url)).checkpoints(RUN)] == [1, 2]


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_server_that_goes_away_in_training_stops_nothing_and_gets_the_newest_saves_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    patience, bound = 2.0, 2.0 + 20.0  # the local disk of a busy machine may take its time
    with SeaweedProcess(tmp_path) as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        url = f"{server.url('spool')}?deadline_seconds=2"
        init_root(url)
        with SpoolingRank(url, tmp_path / "spool", patience_seconds=patience, log=tmp_path / "rank.log") as rank:
            rank.ask("save")
            assert rank.ask("wait") == {"durable_step": 1}
            if how == "stopped":
                os.kill(server.pid, signal.SIGSTOP)
            else:
                server.kill()
            try:
                seconds = [rank.ask("save")["seconds"] for _ in range(6)]
                until("the sixth spool file", lambda: rank.ask("look")["counts"]["spooled"] == 6)
                during = rank.ask("look")
            finally:
                if how == "stopped":
                    os.kill(server.pid, signal.SIGCONT)
                else:
                    server.restart()
            print(f"server {how}: seconds of the saves in the outage: {[round(s, 3) for s in seconds]}")
            assert max(seconds) < bound
            assert during["durable_step"] == 1
            assert rank.ask("wait") == {"durable_step": 7}
            after = rank.ask("look")
            assert after["statuses"]["6"] == after["statuses"]["7"] == "durable"
            assert after["counts"]["queued"] == after["counts"]["failed"] == 0
            assert rank.ask("close") == {"closed": True}
        storage = open_storage(url)
        durable = [int(step) for step, status in after["statuses"].items() if status == "durable"]
        Auditor(storage, RUN).assert_clean(acknowledged=durable)
        assert [c.step for c in Ledger(storage).checkpoints(RUN)] == durable
        with SpoolingRank(url, tmp_path / "spool", patience_seconds=patience, log=tmp_path / "rank.log") as later:
            assert later.started == {"step": 7, "epoch": 7, "digest": digest(7)}
