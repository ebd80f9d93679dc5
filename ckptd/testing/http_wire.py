"""HTTP/1.1 messages as they go over a connection: just enough to pass them on, one piece at a time.

The head is kept to the byte, so that a signed request stays signed. The payload comes in pieces, without its framing,
and is framed again when it is sent, so that a message of any length goes through in bounded memory.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO
from urllib.parse import unquote

PIECE_BYTES = 64 * 1024
MAX_LINE_BYTES = 64 * 1024
MAX_HEADERS = 200
REASONS = {200: "OK", 400: "Bad Request", 409: "Conflict", 412: "Precondition Failed", 500: "Internal Server Error",
           502: "Bad Gateway", 503: "Service Unavailable"}  # fmt: skip


class BrokenMessage(Exception):
    """The other side ended in the middle of a message, or does not speak HTTP/1.1."""


@dataclass(frozen=True)
class Head:
    """The first line of a message, and its headers as lines, without line ends."""

    first: str
    lines: tuple[str, ...]

    def header(self, name: str) -> str | None:
        """The first header of this name, in any case."""
        for line in self.lines:
            found, _, value = line.partition(":")
            if found.strip().lower() == name.lower():
                return value.strip()
        return None

    def without(self, *names: str) -> Head:
        """A copy that lacks these headers."""
        unwanted = {name.lower() for name in names}
        kept = tuple(line for line in self.lines if line.partition(":")[0].strip().lower() not in unwanted)
        return replace(self, lines=kept)

    def with_header(self, name: str, value: str) -> Head:
        """A copy with this header in place of any of its name."""
        return replace(self, lines=(*self.without(name).lines, f"{name}: {value}"))

    @property
    def chunked(self) -> bool:
        return "chunked" in (self.header("Transfer-Encoding") or "").lower()

    @property
    def length(self) -> int | None:
        """Bytes of the payload, where the head tells."""
        value = self.header("Content-Length")
        return _number(value) if value is not None and not self.chunked else None

    # Requests

    @property
    def method(self) -> str:
        return self.first.split(" ")[0]

    @property
    def target(self) -> str:
        """Path and query, with escapes undone in the path."""
        path, mark, query = self.first.split(" ")[1].partition("?")
        return f"{unquote(path)}{mark}{query}"

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    # Answers

    @property
    def status(self) -> int:
        return _number(self.first.split(" ")[1])

    def raw(self) -> bytes:
        return "\r\n".join((self.first, *self.lines, "", "")).encode("latin-1")


def read_head(stream: BinaryIO) -> Head | None:
    """The next head; None when the other side ended between two messages."""
    first = _line(stream)
    if first is None:
        return None
    lines = list[str]()
    while line := _line(stream):
        lines.append(line)
        if len(lines) > MAX_HEADERS:
            raise BrokenMessage(f"more than {MAX_HEADERS} headers")
    if line is None or len(first.split(" ")) < 2:
        raise BrokenMessage(f"no head of a message: {first[:80]!r}")
    return Head(first, tuple(lines))


def payload(stream: BinaryIO, head: Head, *, to_the_end: bool = False) -> Iterator[bytes]:
    """The pieces of the payload that follows `head`. `to_the_end` is for answers: without a length they end with the
    connection."""
    if head.chunked:
        return _chunks(stream)
    if head.length is not None:
        return _pieces(stream, head.length)
    return iter(lambda: stream.read(PIECE_BYTES), b"") if to_the_end else iter(())


def send(connection: socket.socket, head: Head, pieces: Iterable[bytes]) -> None:
    """Send a message whose head says how its payload is framed."""
    connection.sendall(head.raw())
    for piece in filter(None, pieces):
        connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if head.chunked else piece)
    if head.chunked:
        connection.sendall(b"0\r\n\r\n")


def answer_head(status: int, length: int, *headers: str) -> Head:
    """The head of an answer of our own."""
    lines = (f"Content-Length: {length}", *headers)
    return Head(f"HTTP/1.1 {status} {REASONS.get(status, 'Planned')}", lines)


def _line(stream: BinaryIO) -> str | None:
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        return None
    if not line.endswith(b"\n"):
        raise BrokenMessage("the connection ended in the middle of a line, or the line is too long")
    return line.rstrip(b"\r\n").decode("latin-1")


def _number(text: str, base: int = 10) -> int:
    try:
        return int(text, base)
    except ValueError as error:
        raise BrokenMessage(f"expected a number, found {text[:80]!r}") from error


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while size := _number((_line(stream) or "").partition(";")[0], 16):
        yield from _pieces(stream, size)
        _line(stream)
    while _line(stream):
        pass  # trailers: neither S3 nor the service sends any that matter


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
    left = size
    while left:
        piece = stream.read(min(left, PIECE_BYTES))
        if not piece:
            raise BrokenMessage(f"the connection ended {left} bytes before the end of a message of {size}")
        left -= len(piece)
        yield piece
