"""Slow and many clients, on real sockets: they are dropped or turned away, and the page answers others."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest
from starlette.types import Receive, Scope, Send

from swarmnode.extensions.page.bounded_protocol import BoundedProtocol
from swarmnode.extensions.page.bounded_server import MOST_CONNECTIONS, bounded_server, listen_on
from tests.shown_page import STATUS, shown_page

PATIENCE_S = 60.0


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(BoundedProtocol, "patience_s", 0.3)
    with shown_page(lambda: STATUS) as page:
        yield page.port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def asked(port: int, path: str = "/healthz") -> int:
    """The status of an answer; 0: turned away."""
    with connected(port) as connection:
        try:
            connection.sendall(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
            )
            line = connection.makefile("rb").readline()
        except OSError:
            return 0
    return int(line.split()[1]) if line else 0


def until_answered(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while asked(port) != 200:
        assert time.monotonic() < deadline


def ended(connection: socket.socket) -> bool:
    """Reads to the end, which must come."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_who_sends_nothing_or_half_a_request_is_dropped(port: int) -> None:
    half = b"POST /control HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"
    for begun in (b"", half[:30], half):
        with connected(port) as connection:
            connection.sendall(begun)
            assert ended(connection)
    assert asked(port) == 200


def test_half_a_second_request_is_dropped_as_half_a_first_one_is(port: int) -> None:
    ask = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with connected(port) as connection:
        for pause_s in (0.0, 0.5):  # Longer than our patience: a connection is kept while it rests.
            time.sleep(pause_s)
            connection.sendall(ask)
            answer = connection.recv(65536)
            while not answer.endswith(b"ok\n"):
                answer += (more := connection.recv(65536))
                assert more
        connection.sendall(ask[:20])
        assert ended(connection)


async def slow_answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for word in (b"one ", b"two ", b"three"):
        await send({"type": "http.response.body", "body": word, "more_body": True})
        await asyncio.sleep(0.5)  # Several looks at a client that has nothing to send.
    await send({"type": "http.response.body"})


def test_an_answer_that_takes_long_is_given_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "patience_s", 0.1)
    server = bounded_server(slow_answer, idle_s=1, core_share=1.0)
    with listen_on("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        with connected(listening.getsockname()[1]) as asker:
            asker.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            answer = asker.makefile("rb").read()
        server.should_exit = True
        thread.join(PATIENCE_S)
    assert [word in answer for word in (b"one ", b"two ", b"three")] == [True] * 3


def test_who_takes_nothing_of_an_answer_is_dropped(port: int) -> None:
    def is_held() -> bool:
        here = psutil.Process().net_connections("tcp")
        return any(one.raddr == connection.getsockname() for one in here)

    with connected(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        ask = b"GET /settings HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        connection.sendall(ask)
        assert asked(port) == 200 and is_held()
        # As long as anything is taken; whether the reset comes through is up to the kernel.
        connection.settimeout(1.0)
        with suppress(OSError):
            while True:
                connection.sendall(100 * ask)
        deadline = time.monotonic() + PATIENCE_S
        while is_held():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert asked(port) == 200


def test_connections_are_bounded_and_their_room_comes_back(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MOST_CONNECTIONS):
            stack.enter_context(connected(port))
        until_answered(port)
    until_answered(port)


def test_headers_without_end_are_refused(port: int) -> None:
    with connected(port) as connection:
        with suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 10**6)
        assert ended(connection)
    assert asked(port) == 200
