"""Clients that flood the page, say nothing or read nothing: the node learns on, and the page answers."""

import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from tests.joined_node import JoinedNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ALONE = ("--task", "rev", "--set", "exchange.enabled=false")
MOST_OPEN = 400
"""Connections of ours at once; three thousand in all."""


def test_a_flood_of_clients_holds_up_neither_rounds_nor_the_page(start: Callable[..., JoinedNode]) -> None:
    node = start(*ALONE)
    node.until_round(2)
    where = ("127.0.0.1", node.running().http_port)
    begun = (
        b"",
        b"GET /state HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50,
        b"POST /control HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 900\r\n\r\n{",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
        b"\x16\x03\x01\x00\xff" * 100,
    )
    before = node.status()["progress"]["round"]
    for _ in range(3000 // MOST_OPEN):
        with ExitStack() as stack:
            for number in range(MOST_OPEN):
                with suppress(OSError):
                    client = stack.enter_context(socket.create_connection(where, timeout=5))
                    client.settimeout(0.2)
                    client.sendall(begun[number % len(begun)])
    # Those that are left are dropped after ten seconds.
    node.until(lambda: _answers(node))
    node.until_round(before + 3)
    assert "Traceback" not in node.story


def _answers(node: JoinedNode) -> bool:
    try:
        return node.status()["pid"] == node.process.pid
    except AssertionError:  # It is told that there is no status now.
        return False
