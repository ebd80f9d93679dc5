"""A proxy with a plan of faults, in front of an S3 server or of the service.

    with Proxy("http://127.0.0.1:8333") as proxy:          # clients are pointed at proxy.url
        lost = proxy.lose_answer("PUT", "/0000000000000003.json")
        ...
        proxy.assert_all_fired()

See `ckptd.testing.wire_faults` for what each fault does and how it counts. Requests go on as they came, Host
included: a client that signs for the proxy's address is believed by a server that verifies what it receives. Each
connection has a thread of its own, each request a connection of its own to the server.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self, TypeVar
from urllib.parse import urlsplit

from ckptd.errors import Invalid
from ckptd.testing.faults import Where
from ckptd.testing.http_wire import BrokenMessage, Head, payload, read_head, send
from ckptd.testing.wire_faults import (
    CutAnswer,
    HeldRequest,
    Injected,
    LostAnswer,
    Refused,
    Stalled,
    WireFault,
    WrongBytes,
)

F = TypeVar("F", bound=WireFault)
BACKLOG = 128


class Proxy:
    """Listens on a free loopback port from the start. `requests` lists (method, path and query) in order."""

    def __init__(self, upstream: str) -> None:
        where = urlsplit(upstream)
        if where.scheme != "http" or not where.hostname:
            raise Invalid(f"upstream {upstream!r}: expected http://host:port", field="upstream")
        self._upstream = (where.hostname, where.port or 80)
        self.requests: list[tuple[str, str]] = []
        self.faults: list[WireFault] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._listener = _bound(0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._listen(self._listener)

    # The plan

    def lose_answer(self, method: str, where: Where = "", *, nth: int = 1, times: int | None = 1) -> LostAnswer:
        """The server does it, and its answer is lost."""
        return self._plan(LostAnswer(method, where, nth=nth, times=times))

    def hold(self, method: str, where: Where = "", *, nth: int = 1) -> HeldRequest:
        """The client's connection is cut at once, and the request arrives at its `release()`."""
        return self._plan(HeldRequest(method, where, nth=nth, deliver=self._deliver))

    def answer(
        self, method: str, where: Where, status: int, code: str = "", *, body: bytes | None = None,
        content_type: str = "application/xml", nth: int = 1, times: int | None = 1,
    ) -> Injected:  # fmt: skip
        """The client is told `status`, and the server nothing. Without `body` it is S3's document for `code`."""
        return self._plan(Injected(method, where, status, code, body, content_type, nth=nth, times=times))

    def stall(
        self, method: str, where: Where = "", *, forwarded: bool = False, nth: int = 1, times: int | None = 1
    ) -> Stalled:
        """No answer comes, and the connection stays open; with `forwarded` the server has done it."""
        return self._plan(Stalled(method, where, forwarded, nth=nth, times=times))

    def black_hole(self, *, one_way: bool = False) -> Stalled:
        """Nothing comes back until healed; with `one_way` all requests still reach the server."""
        return self._plan(Stalled("", "", one_way, times=None))

    def cut_answer(
        self, method: str, where: Where = "", *, size: int, nth: int = 1, times: int | None = 1
    ) -> CutAnswer:
        """Only `size` bytes of the answer's payload arrive."""
        return self._plan(CutAnswer(method, where, size, nth=nth, times=times))

    def flip(
        self, method: str, where: Where = "", *, at: int, mask: int = 1, nth: int = 1, times: int | None = 1
    ) -> WrongBytes:
        """The byte at offset `at` of the answer's payload arrives wrong."""
        return self._plan(WrongBytes(method, where, at, mask, None, nth=nth, times=times))

    def replace_answer(
        self, method: str, where: Where, instead: bytes, *, nth: int = 1, times: int | None = 1
    ) -> WrongBytes:
        """The answer arrives with another payload."""
        return self._plan(WrongBytes(method, where, 0, 0, instead, nth=nth, times=times))

    def refuse(self) -> Refused:
        """Connections are refused, and those that are open are cut, until it is healed."""
        placeholder = _bound(self.port)  # keeps the port ours
        _end(self._listener)
        self._listener = placeholder
        self._cut_all()
        fault = self._plan(Refused(lambda: self._listen(placeholder)))
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.port)) != 0:
                fault.fire()
        return fault

    def heal(self) -> None:
        """End every fault, those that have not fired too. Held requests stay held, stalled clients stay stalled."""
        for fault in self.faults:
            fault.heal()

    def reset(self) -> None:
        """As if it was new: no plan, no requests."""
        self.heal()
        with self._lock:
            self.faults.clear()
            self.requests.clear()

    def assert_all_fired(self) -> None:
        idle = [fault for fault in self.faults if not fault.fired]
        assert not idle, f"planned faults never fired: {idle}; requests were {self.requests[-50:]}"

    def _plan(self, fault: F) -> F:
        with self._lock:
            self.faults.append(fault)
        return fault

    # The proxy

    def close(self) -> None:
        """Stop listening, and cut whoever is connected."""
        self._closed = True
        _end(self._listener)
        self._cut_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, listener: socket.socket) -> None:
        listener.listen(BACKLOG)
        threading.Thread(target=self._accept, args=(listener,), name="proxy-accept", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed, or refusing from now on
            threading.Thread(target=self._serve, args=(client,), name="proxy-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """All requests of one connection, in order. Whatever breaks on either side ends it without an answer, as a
        cable would."""
        with contextlib.suppress(OSError, BrokenMessage), self._tracked(client), client.makefile("rb") as stream:
            over = False
            while not over and (request := read_head(stream)) is not None:
                with contextlib.closing(OneExchange(self, client, stream, request)) as exchange:
                    fault = self._met(request)
                    if fault is None:
                        answer = exchange.ask()
                        exchange.tell(answer.head, answer.pieces)
                    else:
                        fault.carry_out(exchange)
                    over = exchange.over

    def _met(self, request: Head) -> WireFault | None:
        """The fault for this request. All that could meet it count it."""
        with self._lock:
            self.requests.append((request.method, request.target))
            faults = list(self.faults)
        met = [fault for fault in faults if fault.meets_request(request)]
        return met[0] if met else None

    def _deliver(self, request: Head, body: bytes) -> int:
        """Send a request whose client is long gone; the status of its answer."""
        head = request.without("Transfer-Encoding", "Expect").with_header("Content-Length", str(len(body)))
        with self._connected() as upstream, upstream.makefile("rb") as stream:
            send(upstream, head, [body])
            answer = read_head(stream)
            if answer is None:
                raise BrokenMessage("the server closed the connection without an answer")
            return answer.status

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        upstream = socket.create_connection(self._upstream)
        with self._tracked(upstream):
            yield upstream

    @contextlib.contextmanager
    def _tracked(self, connection: socket.socket) -> Iterator[None]:
        """Known to `close` while it is open."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(connection)
        try:
            if self._closed:
                raise ConnectionAbortedError("the proxy is closed")
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
            _end(connection)

    def _cut_all(self) -> None:
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@dataclass
class ServerAnswer:
    head: Head
    pieces: Iterator[bytes]


class OneExchange:
    """One request of a connection: see `ckptd.testing.wire_faults.Exchange`."""

    def __init__(self, proxy: Proxy, client: socket.socket, stream: BinaryIO, request: Head) -> None:
        self._proxy, self._client, self._stream = proxy, client, stream
        self.request = request
        self.over = (request.header("Connection") or "").lower() == "close"
        self._left = contextlib.ExitStack()
        self._body = payload(stream, request)

    def ask(self) -> ServerAnswer:
        self._go_ahead()
        upstream = self._left.enter_context(self._proxy._connected())
        try:
            send(upstream, self.request.without("Expect"), self._body)
        except (BrokenPipeError, ConnectionResetError):
            self.over = True  # a server may refuse before it has read everything: its answer is there
            for _ in self._body:
                pass
        stream = self._left.enter_context(upstream.makefile("rb"))
        head = read_head(stream)
        while head is not None and head.status == 100:
            head = read_head(stream)
        if head is None:
            raise BrokenMessage("the server closed the connection without an answer")
        bare = self.request.method == "HEAD" or head.status in (204, 304)
        if not bare and not head.chunked and head.length is None:
            self.over = True  # its end is the end of the connection
        return ServerAnswer(head, iter(()) if bare else payload(stream, head, to_the_end=True))

    def read_request(self) -> bytes:
        self._go_ahead()
        return b"".join(self._body)

    def tell(self, head: Head, pieces: Iterable[bytes]) -> None:
        self.over = self.over or (head.header("Connection") or "").lower() == "close"
        if self.request.method == "HEAD":
            self._client.sendall(head.raw())
        else:
            send(self._client, head, pieces)

    def cut(self) -> None:
        self.over = True
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        self.over = True
        while self._stream.read(1):
            pass

    def close(self) -> None:
        """Close what was opened for this request."""
        self._left.close()

    def _go_ahead(self) -> None:
        """To a client that asks before it sends its payload."""
        if (self.request.header("Expect") or "").lower() == "100-continue":
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def _bound(port: int) -> socket.socket:
    """Bound and not listening. Several may share a port as long as one at most listens."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _end(connection: socket.socket) -> None:
    """Close at once, and wake whoever is blocked on it in another thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
