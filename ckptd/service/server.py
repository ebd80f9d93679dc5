"""Running the application: a socket, uvicorn, and an end that lets nobody wait."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from ckptd.errors import Unavailable
from ckptd.service.app import create_app
from ckptd.service.settings import ServiceSettings

GRACE_SECONDS = 10
BACKLOG = 65535  # cut down by the kernel to net.core.somaxconn
OWN_FILES = 128  # descriptors beside those of requests
_log = logging.getLogger("ckptd.service")


class Server(uvicorn.Server):
    """uvicorn that tells when it listens, and at SIGTERM first answers the requests that only wait."""

    def __init__(self, config: uvicorn.Config, *, listening: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening
        self._ending = ending

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends it in order, with exit code 0; the second one at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        _log.info("%s: ending", signal.Signals(sig).name)
        self._ending()


def serve(settings: ServiceSettings, listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `listening` is called once, with the URL, when requests are answered."""
    allow_files(settings.max_requests)
    app = create_app(settings)
    listener = _listen(settings.host, settings.port)
    url = _url(settings.host, listener.getsockname()[1])
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = Server(config, listening=lambda: listening(url), ending=app.state.service.lookout.close)
    server.run(sockets=[listener])
    _leave_hung_threads()


def log_to_stderr() -> None:
    """Logging as a service wants it: one line each on standard error, where standard output stays for the URL."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            do="Choose another --host or --port (0 takes a free one), or end what listens there.",
            field="port",
        ) from error
    # Connections inherit it. Without it, each answer on a line that is kept open comes 40 ms late.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def allow_files(requests: int) -> int:
    """Raise the soft limit of open files as far as so many requests need; how many requests fit now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = requests + OWN_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _log.warning(
            "at most %d files may be open, %d requests at one time need %d: ranks beyond that wait for a connection;"
            " raise the hard limit (ulimit -Hn, LimitNOFILE=), or lower CKPTD_MAX_REQUESTS",
            soft, requests, wanted,
        )  # fmt: skip
        return max(0, soft - OWN_FILES)
    return requests


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _leave_hung_threads(patience_seconds: float = 1.0) -> None:
    """A thread in a dead mount never returns, and the interpreter would wait for it. Nothing of it is needed: what
    counts is in the storage, and a write under way is one whose outcome the next reader finds out."""
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in threads:
        thread.join(patience_seconds)
    hung = [thread.name for thread in threads if thread.is_alive()]
    if hung:
        _log.warning("ending with calls under way in %s", ", ".join(hung))
        logging.shutdown()
        os._exit(0)
