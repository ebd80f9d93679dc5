"""A process that has imported what is slow to import, and forks from itself whatever it is asked for.

    with Zygote(folder / "zygote.sock", ["torch.distributed.run"], log=folder / "zygote.log") as zygote:
        agent = zygote.fork(["-m", "torch.distributed.run", ...], env, log)

The new process does what `python ARGV` would do with that environment. It is killed as soon as whoever asked for it
is gone, because a process that is killed takes no leave: that is how a stub's rank dies with it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ckptd.errors import Unavailable
from ckptd.testing.chaos import stub
from ckptd.testing.owned import OwnedProcess

START_SECONDS = 240.0
NAMESPACE = "CHAOS_NETNS"
_CLONE_NEWNET = 0x40000000


class Zygote(OwnedProcess):
    """One such process, for agents and their ranks. `env` is its own: a preloaded library is inherited by all."""

    def __init__(
        self, path: Path, modules: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.path, self.log = path, log
        self._modules = list(modules)
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}

    def launch(self) -> None:
        """Start, and do not wait: several can be made at once. `start` waits."""
        if not self.alive:
            self._process = self._launch()

    def start(self) -> Zygote:
        self.launch()
        assert self._process is not None
        self._wait_until_ready(self._process)
        return self

    def fork(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """A new process of `python ARGV`, both outputs to `log`."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        with log.open("ab") as output:
            request: dict[str, object] = {"argv": list(argv), "env": dict(env), "cwd": os.getcwd()}
            stub.send(connection, request, [output.fileno(), output.fileno()])
        return Forked(connection)

    def _launch(self) -> subprocess.Popen[bytes]:
        self.path.unlink(missing_ok=True)
        command = [sys.executable, "-m", __name__, str(self.path), *self._modules]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._env)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(START_SECONDS) or not os.read(process.stdout.fileno(), 64):
                raise Unavailable(f"a zygote did not come within {START_SECONDS:.0f} s", do=f"Look into {self.log}.")


class Forked:
    """A forked process, as its owner sees it. `close` or the owner's end kills it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("r")
        self.pid: int = json.loads(self._stream.readline())["pid"]
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> int | None:
        """The exit code, None if it does not end in time."""
        if self.code is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if selector.select(seconds):
                    line = self._stream.readline()
                    self.code = json.loads(line)["exit"] if line else -signal.SIGKILL
        return self.code

    def kill(self) -> None:
        """SIGKILL, and return when it is gone."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(30.0)

    def close(self) -> None:
        self.kill()
        self._stream.close()
        self._connection.close()


# The process itself.


def serve(path: str, modules: Sequence[str]) -> NoReturn:
    """Fork whenever asked, tell how each process ended; until the owner's end of the standard input is closed."""
    for module in modules:
        importlib.import_module(module)
    children: dict[int, socket.socket] = {}
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno())
        for source in (listener, woken, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(4096)
                _bury(children)
            if listener in ready:
                _fork(listener, children)
            if sys.stdin in ready:
                os._exit(0)


def _bury(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as connection:
            try:
                connection.sendall(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
            except OSError:
                continue  # who asked for it is gone


def _fork(listener: socket.socket, children: dict[int, socket.socket]) -> None:
    connection, _ = listener.accept()
    try:
        length, outputs, _, _ = socket.recv_fds(connection, 4, 2)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(length, "big")))
    except (OSError, ValueError):
        connection.close()  # killed while it asked
        return
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in children.values():
            other.close()
        listener.close()
        _become(connection, outputs, request)
    for output in outputs:
        os.close(output)
    children[pid] = connection
    try:
        connection.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    except OSError:
        return  # the child finds out by itself


def _become(
    connection: socket.socket, outputs: list[int], request: dict[str, list[str] | dict[str, str] | str]
) -> NoReturn:
    """In the new process: what `python ARGV` would do."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, outputs[0]), (2, outputs[1])):
        os.dup2(source, target)
    env, argv = request["env"], request["argv"]
    assert isinstance(env, dict)
    assert isinstance(argv, list)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(request["cwd"]))
    _enter_namespace(env.get(NAMESPACE))
    threading.Thread(target=_die_with, args=(connection,), daemon=True).start()
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.modules.pop(argv[1], None)  # imported before, to be fast; now it is the program
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    sys.exit(0)


def _die_with(connection: socket.socket) -> None:
    """Whoever asked for this process says nothing until it is gone."""
    while connection.recv(64):
        pass
    stub.tell("ended", pid=os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


def _enter_namespace(path: str | None) -> None:
    if path:
        with open(path) as handle:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {path}")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
