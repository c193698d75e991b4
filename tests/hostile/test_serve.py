"""Clients that flood the endpoints, say nothing, read nothing or ask for too much: the node learns on."""

import json
import socket
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from tests.joined_node import JoinedNode, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ALONE = ("--task", "rev", "--set", "exchange.enabled=false")
MOST_OPEN = 400
CONNECTIONS = 10_000


def request(body: str, *headers: str, host: str = "127.0.0.1") -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    )
    return ("\r\n".join(lines) + body).encode()


def status_of(port: int, content: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(content)
        return int(client.makefile("rb").readline().split()[1])


def answers(port: int) -> bool:
    body = json.dumps({"model": "policy", "prompt": "reverse abc", "max_tokens": 4}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return json.load(answer)["model"].startswith("policy@")
    except OSError:
        return False


def test_a_flood_of_clients_holds_up_neither_rounds_nor_the_next_client(
    start: Callable[..., JoinedNode],
) -> None:
    node = start(*ALONE)
    node.until_round(2)
    stream = json.dumps({"model": "policy", "prompt": "reverse abc", "stream": True})
    control = json.dumps({"model": "\x1b[2J", "prompt": "\x00\x1b]0;gone\x07\u202e"})
    first = (
        *(request(stream) for _ in range(20)),
        request('{"model": "policy", "prompt": "' + "a" * 900_000 + '"}'),
        request("[" * 50_000),
        b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000,
    )
    small = (
        b"",
        request(control),
        request("{", "Content-Type: application/json")[:-1],
        b"\x16\x03\x01\x00\xff" * 100,
    )
    before = node.status()["progress"]["round"]
    with serving(node.home) as port:
        assert status_of(port, request(stream, host="evil.example")) == 421
        assert status_of(port, request(stream, "Origin: http://evil.example")) == 403
        for _ in range(CONNECTIONS // MOST_OPEN):
            with ExitStack() as stack:
                for number in range(MOST_OPEN):
                    with suppress(OSError):
                        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
                        client.settimeout(0.2)
                        client.sendall(first[number] if number < len(first) else small[number % len(small)])
        node.until(lambda: answers(port))
    node.until_round(before + 3)
    assert "Traceback" not in node.story and "\x1b" not in node.story
