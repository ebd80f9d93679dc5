"""Orders to die, stop or fail are carried out where and when they ask for it, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ckptd.errors import Invalid, Unavailable
from ckptd.failpoints import VARIABLE, failpoint, hooked


def test_without_orders_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    failpoint("before-commit", rank=0)


def test_an_order_meets_its_name_and_all_its_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "other:kill;before-commit?step=6&rank=1:fail")
    failpoint("before-commit", step=6, rank=0)
    failpoint("before-commit", step=5, rank=1)
    failpoint("before-commit")
    failpoint("after-commit", step=6, rank=1)
    with pytest.raises(Unavailable, match="before-commit failed as ordered"):
        failpoint("before-commit", step=6, rank=1, generation=3)


def test_an_order_without_conditions_meets_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "before-commit:fail")
    with pytest.raises(Unavailable):
        failpoint("before-commit", step=1)


def test_an_order_nobody_understands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "before-commit:explode")
    with pytest.raises(Invalid, match="orders 'explode'"):
        failpoint("before-commit")


def test_a_hook_is_called_while_it_hangs_there() -> None:
    calls: list[str] = []
    with hooked("here", lambda: calls.append("called")):
        failpoint("here")
        failpoint("elsewhere")
    failpoint("here")
    assert calls == ["called"]


def test_a_hook_is_taken_down_after_an_error() -> None:
    def fail() -> None:
        raise Unavailable("hook")

    with pytest.raises(Unavailable, match="hook"), hooked("here", fail):
        failpoint("here")
    failpoint("here")


def test_kill_is_death_without_a_word() -> None:
    program = "from ckptd.failpoints import failpoint\ntry:\n failpoint('x')\nfinally:\n print('cleaned up')"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {VARIABLE: "x:kill"}, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_stop_is_a_process_that_can_go_on() -> None:
    program = "from ckptd.failpoints import failpoint\nfailpoint('x')\nprint('went on')"
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {VARIABLE: "x:stop"}, stdout=subprocess.PIPE
    )
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        child.send_signal(signal.SIGCONT)
        output, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait(60)
    assert output == b"went on\n"


MANY_THREADS = """
import os, sys, threading, time
from ckptd.failpoints import failpoint
for _ in range(8):
    threading.Thread(target=lambda: [time.monotonic() for _ in iter(int, 1)], daemon=True).start()
for number in range(20):
    failpoint("here")
    os.write(1, b"past\\n")
os._exit(0)
"""


def test_a_stop_holds_the_very_thread_that_asked_for_it() -> None:
    """With other threads running, too: nothing after the place happens before the process goes on."""
    command = [sys.executable, "-c", MANY_THREADS]
    with subprocess.Popen(command, env={**os.environ, VARIABLE: "here:stop"}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        for number in range(20):
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert (process.stdout.read() or b"") == (b"past\n" if number else b"")
            process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0
