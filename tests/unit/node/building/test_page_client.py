"""Whoever owns a node hears from its page, also while others flood it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from swarmnode.node.building.page_client import PageAddress, fetch


@contextmanager
def a_page(*, refused: int) -> Iterator[PageAddress]:
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
        yield PageAddress("127.0.0.1", listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_page_that_closes_connections_unread_is_asked_again() -> None:
    with a_page(refused=3) as page:
        assert fetch(page, "/status", within_s=60) == (200, b"{}")


def test_a_page_that_never_reads_is_given_up_in_time() -> None:
    with a_page(refused=1000) as page, pytest.raises(OSError):
        fetch(page, "/status", within_s=0.3)
