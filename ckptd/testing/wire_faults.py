"""The faults a `Proxy` can carry out on a request and its answer, one class each.

A request is addressed by method, path and which matching request it is, counted from when the fault was planned, as
in `ckptd.testing.faults`. Of several faults that meet a request the one planned first acts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol
from xml.sax.saxutils import escape

from ckptd.testing.faults import Fault, Where
from ckptd.testing.http_wire import Head, answer_head


class Answer(Protocol):
    """What the server answered: read `pieces` once."""

    head: Head
    pieces: Iterator[bytes]


class Exchange(Protocol):
    """One request on a connection of a client, as the proxy hands it to a fault."""

    request: Head

    def ask(self) -> Answer:
        """Pass the request on; the server's answer."""

    def read_request(self) -> bytes:
        """Take the whole payload of the request, instead of passing it on."""

    def tell(self, head: Head, pieces: Iterable[bytes]) -> None:
        """Answer the client."""

    def cut(self) -> None:
        """Close the client's connection now."""

    def hang(self) -> None:
        """Say nothing until the client gives up, or the proxy is closed."""


class WireFault(Fault):
    """`operation` is the method, `""` any; a `where` that is text is the end of the path, one that is a function is
    given path and query. `happened` is set as soon as it fired."""

    def __init__(self, method: str, where: Where, *, nth: int = 1, times: int | None = 1) -> None:
        super().__init__(method, where, nth=nth, times=times)
        self.happened = threading.Event()

    def fire(self) -> None:
        super().fire()
        self.happened.set()

    def meets_request(self, request: Head) -> bool:
        key = request.target if callable(self.where) else request.path
        return self.meets(self.operation and request.method, key)

    def carry_out(self, exchange: Exchange) -> None:
        raise NotImplementedError


class LostAnswer(WireFault):
    """The server does it, and the connection is closed without a word. `status` is what it had answered."""

    status: int | None = None

    def carry_out(self, exchange: Exchange) -> None:
        answer = exchange.ask()
        for _ in answer.pieces:
            pass
        self.status = answer.head.status
        self.fire()
        exchange.cut()


class HeldRequest(WireFault):
    """The client's connection is cut at once; the request arrives when `release` is called."""

    def __init__(self, method: str, where: Where, *, nth: int, deliver: Callable[[Head, bytes], int]) -> None:
        super().__init__(method, where, nth=nth)
        self.held: tuple[Head, bytes] | None = None
        self._deliver = deliver

    def carry_out(self, exchange: Exchange) -> None:
        self.held = exchange.request, exchange.read_request()
        self.fire()
        exchange.cut()

    def release(self) -> int:
        """Let it arrive; the status of the answer that nobody hears. Once only."""
        held, self.held = self.held, None
        if held is None:
            raise AssertionError(f"{self!r} holds no request")
        return self._deliver(*held)


class Injected(WireFault):
    """An answer that the server never gave; it does not see the request."""

    def __init__(
        self, method: str, where: Where, status: int, code: str, body: bytes | None, content_type: str, *,
        nth: int, times: int | None,
    ) -> None:  # fmt: skip
        super().__init__(method, where, nth=nth, times=times)
        self.status, self.code, self.body, self.content_type = status, code, body, content_type

    def carry_out(self, exchange: Exchange) -> None:
        exchange.read_request()
        request = exchange.request
        body = s3_error(self.code, request.path) if self.body is None else self.body
        self.fire()
        head = answer_head(self.status, len(body), f"Content-Type: {self.content_type}")
        exchange.tell(head, [] if request.method == "HEAD" else [body])


class Stalled(WireFault):
    """No answer, and the connection stays open. With `forwarded` the server did it all the same."""

    def __init__(self, method: str, where: Where, forwarded: bool, *, nth: int = 1, times: int | None = 1) -> None:
        super().__init__(method, where, nth=nth, times=times)
        self.forwarded = forwarded

    def carry_out(self, exchange: Exchange) -> None:
        if self.forwarded:
            for _ in exchange.ask().pieces:
                pass
        else:
            exchange.read_request()
        self.fire()
        exchange.hang()


class CutAnswer(WireFault):
    """The first `size` bytes of the answer's payload arrive under the full Content-Length; then the connection is
    closed. An answer that is not longer does not count as fired."""

    def __init__(self, method: str, where: Where, size: int, *, nth: int, times: int | None) -> None:
        super().__init__(method, where, nth=nth, times=times)
        self.size = size

    def carry_out(self, exchange: Exchange) -> None:
        answer = exchange.ask()
        payload = b"".join(answer.pieces)
        if len(payload) <= self.size:
            exchange.tell(answer.head, [payload])
            return
        self.fire()
        head = answer.head.without("Transfer-Encoding").with_header("Content-Length", str(len(payload)))
        exchange.tell(head, [payload[: self.size]])
        exchange.cut()


class WrongBytes(WireFault):
    """One byte of the answer's payload arrives XORed with `mask`, or all of it is replaced by `instead`."""

    def __init__(
        self, method: str, where: Where, at: int, mask: int, instead: bytes | None, *, nth: int, times: int | None
    ) -> None:
        super().__init__(method, where, nth=nth, times=times)
        self.at, self.mask, self.instead = at, mask, instead

    def carry_out(self, exchange: Exchange) -> None:
        answer = exchange.ask()
        if self.instead is None:
            exchange.tell(answer.head, self._flipped(answer.pieces))
            return
        for _ in answer.pieces:
            pass
        self.fire()
        head = answer.head.without("Transfer-Encoding").with_header("Content-Length", str(len(self.instead)))
        exchange.tell(head, [self.instead])

    def _flipped(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        start = 0
        for piece in pieces:
            wrong = bytearray(piece)
            if start <= self.at < start + len(piece):
                self.fire()
                wrong[self.at - start] ^= self.mask
            start += len(piece)
            yield bytes(wrong)


class Refused(WireFault):
    """Nobody listens until `heal`. It counts as fired once a connection of our own was refused."""

    def __init__(self, back: Callable[[], None]) -> None:
        super().__init__("connect", "", times=None)
        self._back = back

    def meets_request(self, request: Head) -> bool:
        return False

    def heal(self) -> None:
        if not self._healed:
            super().heal()
            self._back()


def s3_error(code: str, path: str) -> bytes:
    """The document that S3 servers send with an error."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{escape(code)}</Code><Message>planned: {escape(code)}</Message>"
        f"<Resource>{escape(path)}</Resource><RequestId>0</RequestId></Error>"
    ).encode()
