"""Slow and many clients, on real sockets: they are dropped or turned away, and the page answers others."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest

from swarmnode.extensions.page.bounded_protocol import BoundedProtocol
from swarmnode.extensions.page.bounded_server import MOST_CONNECTIONS
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
