"""The proxy alone, in front of a small server that keeps what is put."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from ckptd.errors import Invalid
from ckptd.testing.http_wire import PIECE_BYTES
from ckptd.testing.proxy import Proxy

LONG = bytes(range(256)) * 1024  # several pieces
WAIT_SECONDS = 60.0


class Upstream(ThreadingHTTPServer):
    """GET gives what was PUT; `/chunked/..` in chunks, `/close/..` until the connection ends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kept: dict[str, bytes] = {}
        self.heads: list[tuple[str, dict[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_PUT(self) -> None:
        self._note()
        if "/refused/" in self.path:
            self.close_connection = True
            self._say(403, b"no")
            return
        self.server.kept[self.path.rpartition("/")[2]] = self._body()
        self._say(200, b"")

    def do_GET(self) -> None:
        self._note()
        body = self.server.kept.get(self.path.rpartition("/")[2])
        if body is None:
            self._say(404, b"absent")
        elif self.path.startswith("/chunked/"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(body), 1000):
                piece = body[start : start + 1000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        elif self.path.startswith("/close/"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True
        else:
            self._say(200, body)

    def do_HEAD(self) -> None:
        self._note()
        self._say(200, self.server.kept[self.path.rpartition("/")[2]], bare=True)

    def do_DELETE(self) -> None:
        self._note()
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _note(self) -> None:
        self.server.heads.append((f"{self.command} {self.path}", dict(self.headers)))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _say(self, status: int, body: bytes, *, bare: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not bare:
            self.wfile.write(body)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[Proxy]:
    with Proxy(upstream.url) as proxy:
        yield proxy


@pytest.fixture
def http_to(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, timeout=WAIT_SECONDS) as client:
        yield client


# Without faults.


@pytest.mark.parametrize("path", ["/a", "/chunked/a", "/close/a"])
@pytest.mark.parametrize("body", [b"", b"x", LONG])
def test_everything_goes_through(upstream: Upstream, http_to: httpx.Client, path: str, body: bytes) -> None:
    assert http_to.put(path, content=body).status_code == 200
    assert upstream.kept["a"] == body
    assert http_to.get(path).content == body
    head = http_to.head("/a")
    assert (head.headers["Content-Length"], head.content) == (str(len(body)), b"")
    assert http_to.get("/b").status_code == 404
    assert http_to.delete("/a").status_code == 204


def test_a_payload_without_a_length_goes_through(upstream: Upstream, http_to: httpx.Client) -> None:
    pieces = [LONG, b"", b"end"]
    assert http_to.put("/a", content=iter(pieces)).status_code == 200
    assert upstream.kept["a"] == b"".join(pieces)


def test_the_head_is_not_touched(upstream: Upstream, proxy: Proxy, http_to: httpx.Client) -> None:
    """Host too: it is signed, for the address that the client knows."""
    headers = {"Authorization": "AWS4 x", "X-Amz-Date": "today", "If-None-Match": "*"}
    http_to.put("/b/k%20ey+%2B?partNumber=1&x=%2F", content=b"1", headers=headers)
    first, found = upstream.heads[-1]
    assert first == "PUT /b/k%20ey+%2B?partNumber=1&x=%2F"
    assert found["Host"] == f"127.0.0.1:{proxy.port}"
    assert headers.items() <= found.items()
    assert proxy.requests == [("PUT", "/b/k ey++?partNumber=1&x=%2F")]


def test_one_connection_carries_many_requests(proxy: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=WAIT_SECONDS)
    connection.connect()
    mine = connection.sock
    for number in range(5):
        connection.request("PUT", "/a", body=b"%d" % number)
        connection.getresponse().read()
        assert connection.sock is mine
    connection.close()


def test_a_client_that_asks_first_is_told_to_go_ahead(upstream: Upstream, proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), WAIT_SECONDS) as client:
        client.sendall(b"PUT /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        with client.makefile("rb") as stream:
            assert [stream.readline(), stream.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
            client.sendall(b"abc")
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
    assert upstream.kept["a"] == b"abc"


def test_a_server_that_refuses_early_is_heard(proxy: Proxy) -> None:
    answer = httpx.put(f"{proxy.url}/refused/a", content=b"x" * 100, timeout=WAIT_SECONDS)
    assert (answer.status_code, answer.content) == (403, b"no")


def test_a_server_that_is_gone_is_a_cut_connection(upstream: Upstream, proxy: Proxy) -> None:
    upstream.server_close()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{proxy.url}/a", timeout=WAIT_SECONDS)


@pytest.mark.parametrize("said", [b"GET\r\n\r\n", b"PUT /a HTTP/1.1\r\nContent-Length: many\r\n\r\n", b"half a line"])
def test_a_client_that_speaks_no_http_is_cut(proxy: Proxy, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), WAIT_SECONDS) as client:
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""


@pytest.mark.parametrize("url", ["https://host", "host:1", ""])
def test_only_plain_http_can_be_read(url: str) -> None:
    with pytest.raises(Invalid, match="upstream"):
        Proxy(url)


# Faults.


def test_a_lost_answer(upstream: Upstream, proxy: Proxy, http_to: httpx.Client) -> None:
    lost = proxy.lose_answer("PUT", "/a")
    http_to.put("/b", content=b"b")
    with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        http_to.put("/a", content=b"a")
    assert upstream.kept["a"] == b"a"
    assert (lost.fired, lost.status) == (1, 200)
    http_to.put("/a", content=b"again")
    assert upstream.kept["a"] == b"again"


def test_a_held_request_arrives_when_it_is_released(upstream: Upstream, proxy: Proxy, http_to: httpx.Client) -> None:
    held = proxy.hold("PUT", "/a")
    with pytest.raises(httpx.RemoteProtocolError):
        http_to.put("/a", content=iter([LONG]))
    assert upstream.kept == {}
    http_to.put("/a", content=b"in between")
    assert held.release() == 200
    assert upstream.kept["a"] == LONG
    with pytest.raises(AssertionError, match="holds no request"):
        held.release()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"),
        (503, "SlowDown"),
        (409, "ConditionalRequestConflict"),
        (412, "PreconditionFailed"),
        (400, "RequestTimeout"),
    ],
)
def test_a_status_that_the_server_never_gave(
    upstream: Upstream, proxy: Proxy, http_to: httpx.Client, status: int, code: str
) -> None:
    proxy.answer("PUT", "/a", status, code)
    answer = http_to.put("/a", content=b"a")
    assert answer.status_code == status
    assert f"<Code>{code}</Code>" in answer.text
    assert "<Resource>/a</Resource>" in answer.text
    assert upstream.heads == []
    assert http_to.put("/a", content=b"a").status_code == 200
    proxy.assert_all_fired()


def test_a_status_for_a_question_about_the_head_has_no_payload(proxy: Proxy, http_to: httpx.Client) -> None:
    proxy.answer("HEAD", "", 503, "SlowDown")
    answer = http_to.head("/a")
    assert (answer.status_code, answer.content) == (503, b"")


def test_an_answer_of_the_testers_own(proxy: Proxy, http_to: httpx.Client) -> None:
    proxy.answer("GET", "", 200, body=b"{}", content_type="application/json")
    answer = http_to.get("/a")
    assert (answer.json(), answer.headers["Content-Type"]) == ({}, "application/json")


@pytest.mark.parametrize("forwarded", [False, True])
def test_a_stall(upstream: Upstream, proxy: Proxy, http_to: httpx.Client, forwarded: bool) -> None:
    stalled = proxy.stall("PUT", "/a", forwarded=forwarded)
    with pytest.raises(httpx.ReadTimeout):
        http_to.put("/a", content=b"a", timeout=httpx.Timeout(WAIT_SECONDS, read=0.2))
    assert stalled.fired == 1
    assert ("a" in upstream.kept) is forwarded
    assert http_to.put("/a", content=b"a").status_code == 200


def test_a_stalled_client_is_let_go_when_the_proxy_closes(upstream: Upstream) -> None:
    with Proxy(upstream.url) as proxy, socket.create_connection(("127.0.0.1", proxy.port), WAIT_SECONDS) as client:
        stalled = proxy.stall("GET")
        client.sendall(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stalled.happened.wait(WAIT_SECONDS)
        proxy.close()
        assert client.recv(100) == b""


@pytest.mark.parametrize("one_way", [False, True])
def test_a_black_hole_until_it_is_healed(
    upstream: Upstream, proxy: Proxy, http_to: httpx.Client, one_way: bool
) -> None:
    hole = proxy.black_hole(one_way=one_way)
    short = httpx.Timeout(WAIT_SECONDS, read=0.2)
    for method, body in (("PUT", b"a"), ("GET", None)):
        with pytest.raises(httpx.ReadTimeout):
            http_to.request(method, "/a", content=body, timeout=short)
    assert hole.fired == 2
    assert len(upstream.heads) == (2 if one_way else 0)
    hole.heal()
    assert http_to.put("/a", content=b"b").status_code == 200


@pytest.mark.parametrize("path", ["/a", "/chunked/a", "/close/a"])
def test_a_payload_that_is_cut(upstream: Upstream, proxy: Proxy, http_to: httpx.Client, path: str) -> None:
    upstream.kept["a"] = LONG
    proxy.cut_answer("GET", size=1000)
    with (
        http_to.stream("GET", path) as answer,
        pytest.raises(httpx.RemoteProtocolError, match=f"received 1000 bytes, expected {len(LONG)}"),
    ):
        answer.read()
    assert http_to.get(path).content == LONG


def test_a_payload_that_is_too_short_to_be_cut_is_not(
    upstream: Upstream, proxy: Proxy, http_to: httpx.Client
) -> None:
    upstream.kept["a"] = b"abc"
    proxy.cut_answer("GET", size=3)
    assert http_to.get("/a").content == b"abc"
    with pytest.raises(AssertionError, match=r"never fired.*CutAnswer"):
        proxy.assert_all_fired()


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, PIECE_BYTES, len(LONG) - 1])
@pytest.mark.parametrize("path", ["/a", "/chunked/a"])
def test_one_wrong_byte(upstream: Upstream, proxy: Proxy, http_to: httpx.Client, path: str, at: int) -> None:
    upstream.kept["a"] = LONG
    proxy.flip("GET", at=at, mask=0x80)
    found = http_to.get(path).content
    assert [index for index in range(len(LONG)) if found[index] != LONG[index]] == [at]
    assert found[at] == LONG[at] ^ 0x80
    proxy.assert_all_fired()


@pytest.mark.parametrize("path", ["/a", "/chunked/a"])
def test_another_payload(upstream: Upstream, proxy: Proxy, http_to: httpx.Client, path: str) -> None:
    upstream.kept["a"] = LONG
    proxy.replace_answer("GET", "/a", b"something else")
    assert http_to.get(path).content == b"something else"


def test_nobody_listens_until_it_is_healed(proxy: Proxy, http_to: httpx.Client) -> None:
    http_to.put("/a", content=b"a")
    refused = proxy.refuse()
    for _ in range(2):  # the connection that was open is cut, new ones are refused
        with pytest.raises(httpx.ConnectError, match="refused"):
            httpx.get(proxy.url, timeout=WAIT_SECONDS)
    refused.heal()
    refused.heal()
    assert http_to.get("/a").content == b"a"
    proxy.assert_all_fired()


# How requests are counted.


def test_a_fault_meets_the_request_it_was_planned_for(proxy: Proxy, http_to: httpx.Client) -> None:
    proxy.answer("GET", "/a", 500, nth=2, times=2)
    proxy.answer("GET", lambda target: "list-type=2" in target, 503)
    http_to.put("/a", content=b"")
    assert [http_to.get("/x/a").status_code for _ in range(4)] == [200, 500, 500, 200]
    assert http_to.get("/?list-type=2&prefix=a").status_code == 503
    proxy.assert_all_fired()


def test_the_first_of_two_faults_acts(proxy: Proxy, http_to: httpx.Client) -> None:
    first, second = proxy.answer("GET", "", 500), proxy.answer("GET", "", 503, times=2)
    assert [http_to.get("/a").status_code for _ in range(3)] == [500, 503, 404]
    assert (first.fired, second.fired) == (1, 1)


def test_healed_faults_do_nothing(proxy: Proxy, http_to: httpx.Client) -> None:
    proxy.answer("GET", "", 500, times=None)
    assert http_to.get("/a").status_code == 500
    proxy.heal()
    assert http_to.get("/a").status_code == 404


def test_a_proxy_can_be_used_anew(proxy: Proxy, http_to: httpx.Client) -> None:
    proxy.answer("GET", "", 500, times=None)
    proxy.refuse()
    proxy.reset()
    assert http_to.get("/a").status_code == 404
    assert (proxy.faults, proxy.requests) == ([], [("GET", "/a")])
    proxy.assert_all_fired()
