"""Whoever owns a node hears from its page, also while others flood it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from swarmnode.node.building.node_process import RunningNode
from swarmnode.node.building.page_client import fetch, fetch_from_node, page_of


@contextmanager
def a_node(*, refused: int) -> Iterator[RunningNode]:
    """Closes so many connections unread, then answers one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                for _ in range(refused):
                    listener.accept()[0].close()
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

        thread = threading.Thread(target=serve)
        thread.start()
        yield RunningNode(1, "peer", "127.0.0.1", listener.getsockname()[1], (), "token")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_node_that_closes_connections_unread_is_asked_again() -> None:
    with a_node(refused=3) as note:
        assert fetch_from_node(note, "/status", within_s=60) == (200, b"{}")


def test_one_that_never_reads_is_given_up_in_time() -> None:
    with a_node(refused=1000) as note, pytest.raises(OSError):
        fetch_from_node(note, "/status", within_s=0.3)


def test_others_are_asked_once() -> None:
    """A webhook that took a notice and ended would have it twice."""
    with a_node(refused=1) as note, pytest.raises(ConnectionResetError):
        fetch(page_of(note), "/status")
