"""What torchrun starts as a rank: it asks the zygote to fork the real one, and ends as that one ends.

torch takes seconds to import, so a real rank is forked from a process that has imported it. The stub stands for it in
front of its agent: killed by the agent, the rank is killed; when the rank ends or is killed, so does the stub. Only
the standard library, and run with `-S -E`: it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

SOCKET, EVENTS = "CHAOS_ZYGOTE", "CHAOS_EVENTS"


def main() -> int:
    """The exit code of the forked process; by its signal if one killed it."""
    request: dict[str, object] = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        send(connection, request, [1, 2])
        with connection.makefile("r") as stream:
            pid, code = json.loads(stream.readline())["pid"], None
            for line in stream:
                code = json.loads(line)["exit"]
    tell("gone", pid=pid, code=code)
    if code is None or code < 0:
        signal.pthread_kill(_this_thread(), signal.SIGKILL if code is None else -code)
    return code or 0


def send(connection: socket.socket, request: dict[str, object], descriptors: list[int]) -> None:
    """One request: its length, with the two outputs for the new process, and its JSON."""
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(4, "big")], descriptors)
    connection.sendall(data)


def tell(event: str, **what: object) -> None:
    """Append a line to the events of the job, if this process is a rank of one."""
    path = os.environ.get(EVENTS)
    if path is None or "RANK" not in os.environ:
        return
    line = {"event": event, "rank": int(os.environ["RANK"]), "clock": time.monotonic(), **what}
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def _this_thread() -> int:
    import threading

    return threading.get_ident()


if __name__ == "__main__":
    sys.exit(main())
