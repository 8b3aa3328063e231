"""Tests what reaches the server at all: its names, its key, framing, slow and many clients. No model is needed."""

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_serve import wait_until
from test_serve_requests import MODEL

from jaxstack.config import ConfigError
from jaxstack.serve.access import Access, host_names, read_access, read_key
from jaxstack.serve.app import Limits, Server

pytest.importorskip("uvicorn")
LIMITS = Limits(texts=8, body_bytes=2**20, seconds=60)
WORKER: Any = SimpleNamespace(error=None, cancel=lambda names: None)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = MODELS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Door:
    """A server without a model, in a thread of this process."""

    def __init__(self, limits: Limits, access: Access | None, log: Callable[[str], None]) -> None:
        from jaxstack.serve.http import Http

        model = replace(MODEL, context=2**20, max_tokens=2**20)
        self.server = Server(WORKER, model, limits, (0,), log, access)
        self.http = Http(self.server, grace=1)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that little is on its way
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=lambda: asyncio.run(self.http.serve([listener])), daemon=True)
        self.thread.start()
        wait_until(lambda: self.http.started)

    @property
    def connections(self) -> int:
        return len(self.http.server_state.connections)

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        client.sendall(data)
        return client

    def exchange(self, data: bytes) -> list[int]:
        """Sends requests, the last of which ends the connection, and returns the status codes of all answers."""
        with self.connect(data) as client:
            return statuses(client)

    def health(self, *headers: str, path: str = "/health") -> int:
        """Returns the status code of a request with some headers."""
        (status,) = self.exchange(
            "\r\n".join([f"GET {path} HTTP/1.1", *headers, "Connection: close", "", ""]).encode("latin-1")
        )
        return status


def statuses(client: socket.socket) -> list[int]:
    """Reads until the connection is closed, and returns the status codes of all answers."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while part := client.recv(2**16):
            data += part
    return [int(answer[:3]) for answer in data.split(b"HTTP/1.1 ")[1:]]


def answer(client: socket.socket) -> tuple[bytes, bytes]:
    """Reads one answer, and returns its headers and its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(2**16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(2**16)
    return head, body


@contextlib.contextmanager
def serving(
    limits: Limits = LIMITS, access: Access | None = None, log: Callable[[str], None] = lambda line: None
) -> Iterator[Door]:
    door = Door(limits, access, log)
    try:
        yield door
    finally:
        door.http.should_exit = True
        door.thread.join(30)


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with serving() as door:
        yield door


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1", "127.0.0.1:8000", "[::1]:1", "localhost."])
def test_names_of_the_loopback_address_are_served(door, host):
    assert door.health(f"Host: {host}") == 200
    assert door.health(f"Host: {host}", path="/v1/models") == 200


OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "xlocalhost", "192.168.0.9", "[::2]", "", "*"]
OTHERS += ["127.0.0.1.evil.example", "127.0.0.1@evil.example", "localhost:x", "localhost/", "2130706433", "0x7f.1"]


@pytest.mark.parametrize("host", OTHERS)
def test_any_other_host_is_refused_on_every_route(door, host):
    """A page whose name an attacker lets resolve to 127.0.0.1 gets nothing, not even a list of models."""
    for path in ("/health", "/v1/models", "/v1/completions", "/nothing"):
        assert door.health(f"Host: {host}", path=path) in (400, 421)
    if host != "":
        body = b'{"prompt": "x", "max_tokens": 0, "echo": true}'
        head = (
            POST.replace(b"localhost", host.encode())
            + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        assert door.exchange(head + body) == [421]


def test_more_names():
    assert host_names("127.0.0.1", []) == {"localhost", "127.0.0.1", "::1"}
    assert "box.lan" in host_names("Box.LAN", [])
    assert host_names("0.0.0.0", ["A.example", "[::5]", "0:0::6", "10.0.0.1"]) >= {
        "a.example",
        "::5",
        "::6",
        "10.0.0.1",
    }
    for wrong in ("http://a", "a:80", "a/b", "", "a b", "[a]", "user@a", "*.a"):
        with pytest.raises(ConfigError, match="is neither a name nor an address"):
            host_names("127.0.0.1", [wrong])
    with serving(access=read_access("127.0.0.1", ["a.example"], None)) as door:
        assert door.health("Host: a.example:5") == 200
        assert door.health("Host: b.example") == 421
    with serving(access=Access(frozenset(["*"]))) as door:
        assert door.health("Host: b.example") == 200
    with serving(access=Access(frozenset())) as door:
        assert door.health("Host: 127.0.0.1") == 200  # the address of the connection itself


KEY = "s3cret-key"


def test_a_key_is_asked_for_by_all_routes_but_health():
    host = "Host: localhost"
    with serving(access=replace(Access(), key=KEY)) as door:
        assert door.health(host) == 200
        for path in ("/v1/models", "/v1/models/x", "/v1/completions", "/nothing", "/health/", "//health"):
            assert door.health(host, path=path) == 401
        for header in (
            KEY,
            "Bearer",
            "Bearer ",
            f"Bearer {KEY[:-1]}",
            f"Bearer {KEY}x",
            f"Basic {KEY}",
            f"Bearer é{KEY}",
        ):
            assert door.health(host, f"Authorization: {header}", path="/v1/models") == 401
        for header in (f"Bearer {KEY}", f"bearer  {KEY} "):
            assert door.health(host, f"Authorization: {header}", path="/v1/models") == 200
        assert door.health("Host: evil.example", f"Authorization: Bearer {KEY}", path="/v1/models") == 421
        with door.connect(MODELS) as client:
            head, body = answer(client)
        assert b"\r\nwww-authenticate: Bearer" in head
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert KEY not in repr(door.server.model) + repr(Access(key=KEY))


def test_the_key_comes_from_the_environment_or_a_file(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXSTACK_API_KEY", raising=False)
    assert read_key(None) is None
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_key(str(file)) == KEY
    monkeypatch.setenv("JAXSTACK_API_KEY", KEY)
    assert read_key(None) == KEY
    with pytest.raises(ConfigError, match="both set a key"):
        read_key(str(file))
    for wrong in ("", " ", "two words", "é", "a\nb"):
        monkeypatch.setenv("JAXSTACK_API_KEY", wrong)
        with pytest.raises(ConfigError, match="JAXSTACK_API_KEY is not a key") as caught:
            read_key(None)
        assert not wrong.strip() or wrong not in str(caught.value)
    monkeypatch.delenv("JAXSTACK_API_KEY")
    for content in (b"", b"\n", b"\xff\xfe", b"a\0b", b"x" * 5000):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a key"):
            read_key(str(file))
    for path in (tmp_path / "none", tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a file"):
            read_key(str(path))


CHUNK = b"2\r\n{}\r\n0\r\n\r\n"
LENGTH, CHUNKED = b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        POST + LENGTH + CHUNKED + b"\r\n" + CHUNK,
        POST + CHUNKED + LENGTH + b"\r\n" + CHUNK,
        POST + b"Content-Length: 0\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        POST + b"Content-Length: 99\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
        POST + LENGTH + b"Content-Length: 3\r\n\r\n{}",
        POST + b"Content-Length: +2\r\n\r\n{}",
        POST + b"Content-Length : 2\r\n\r\n{}",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNK,
        POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n" + CHUNK,
        POST + CHUNKED + b"\r\n0x2\r\n{}\r\n0\r\n\r\n",
        POST.replace(b"1.1", b"1.0") + CHUNKED + b"Connection: keep-alive\r\n\r\n" + CHUNK,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_no_bytes_behind_a_request_that_is_framed_badly_are_another_one(door, request_):
    assert door.exchange(request_ + LAST) == [400]


def test_a_request_that_is_framed_well_leaves_the_connection_open(door):
    assert door.exchange(POST + LENGTH + b"\r\n{}" + LAST) == [400, 200]
    assert door.exchange(POST + CHUNKED + b"\r\n" + CHUNK + HEALTH + LAST) == [400, 200, 200]


def test_nonsense_after_an_answer_is_no_error_of_the_server(door, caplog):
    """The body of a request becomes invalid after the request was answered."""
    with caplog.at_level(logging.ERROR):
        with door.connect(HEALTH[:-2] + CHUNKED + b"\r\n") as client:
            assert answer(client)[0].startswith(b"HTTP/1.1 200")
            client.sendall(b"zz\r\n")
            assert statuses(client) == []
        assert door.health("Host: localhost") == 200
    assert not caplog.records


def test_requests_are_answered_when_nobody_reads_their_lines(caplog):
    """As after `jaxstack serve RUN | head`, or on a full disk."""

    def fail(line: str) -> None:
        raise BrokenPipeError

    with serving(log=fail) as door, caplog.at_level(logging.ERROR):
        assert door.exchange(HEALTH + LAST) == [200, 200]
    assert not caplog.records


def test_requests_that_never_arrive_are_closed(caplog):
    """Connections without a byte, half of the headers, half of a body, and the rest of a body that was refused."""
    body = POST + b"Content-Length: 9\r\n\r\n{"
    refused = POST.replace(b"application/json", b"text/plain") + b"Content-Length: 9\r\n\r\n{"
    starts = {b"": [], b"GET": [408], HEALTH[:-2]: [408], body: [408], POST + CHUNKED + b"\r\n2\r\n{": [408]}
    starts |= {refused: [415], HEALTH + b"GET /hea": [200, 408], b"GET / HTTP/1.1\r\nX: " + b"x" * 9000: [408]}
    with serving(replace(LIMITS, receive_s=0.3)) as door, caplog.at_level(logging.ERROR):
        clients = [(door.connect(start), expected) for start in starts for expected in [starts[start]] * 5]
        for client, expected in clients:
            with client:
                assert statuses(client) == expected
        wait_until(lambda: not door.connections)
        assert door.health("Host: localhost") == 200
    assert not caplog.records


def test_more_connections_wait_until_one_is_closed():
    with serving(replace(LIMITS, connections=3)) as door:
        first, *others = [door.connect(HEALTH) for _ in range(3)]
        for client in (first, *others):
            assert answer(client)[0].startswith(b"HTTP/1.1 200")
        waiting = [door.connect(HEALTH) for _ in range(2)]
        others[0].sendall(MODELS)
        assert answer(others[0])[0].startswith(b"HTTP/1.1 200")
        assert door.connections == 3
        for client in (first, *others):
            client.close()
        for client in waiting:
            with client:
                assert answer(client)[0].startswith(b"HTTP/1.1 200")
        wait_until(lambda: not door.connections)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_loses_its_connection(stream, caplog):
    """The answer has 1.6 MB, of which the buffers of the two sockets hold little."""
    body = {"prompt": "x" * 200_000, "n": 8, "echo": True, "max_tokens": 0, "stream": stream}
    data = json.dumps(body).encode()
    with serving(replace(LIMITS, receive_s=0.3)) as door, caplog.at_level(logging.ERROR):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", door.port))
            client.sendall(POST + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            wait_until(lambda: door.connections)
            wait_until(lambda: not door.connections)
            assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: not door.server.open)  # its task ends after the connection
    assert not caplog.records


SCARCE = """
import resource, sys
sys.path[:0] = {paths!r}
from test_connections import LIMITS, Door
door = Door(LIMITS, None, lambda line: None)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(door.port, flush=True)
sys.stdin.read()
"""


def test_without_descriptors_connections_wait_and_one_line_says_so():
    """A process with 40 descriptors gets 60 connections, and serves again when some of them are closed."""
    code = SCARCE.format(paths=[str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        port = int(process.stdout.readline())
        clients = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(60)]
        line = process.stderr.readline()
        assert line == "new connections wait: Too many open files. Raise `ulimit -n`, or lower --connections.\n"
        time.sleep(2.5)  # more attempts to accept one, which say nothing
        for client in clients[:40]:
            client.close()
        clients[-1].sendall(HEALTH)
        assert answer(clients[-1])[0].startswith(b"HTTP/1.1 200")
        for client in clients[40:]:
            client.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 0
