"""What a server takes of the machine when it is flooded."""

import socket
from contextlib import ExitStack

import pytest

from swarmnode.extensions.page.bounded_server import (
    AT_ONCE_S,
    LONGEST_REST_S,
    MOST_CONNECTIONS,
    TURNED_AWAY_AT_ONCE,
    CpuAllowance,
    listen_on,
)


def test_a_thread_under_a_flood_keeps_to_its_share() -> None:
    allowance = CpuAllowance(0.05, now_s=0.0, used_s=0.0)
    now_s, used_s = 0.0, 0.0
    while now_s < 1000.0:
        # It uses all that it gets.
        now_s, used_s = now_s + 0.001, used_s + 0.001
        now_s += allowance.rest_s(now_s, used_s)
    assert used_s == pytest.approx(AT_ONCE_S + 0.05 * now_s, rel=0.01)


def test_one_long_answer_is_rested_from_once() -> None:
    allowance = CpuAllowance(0.05, now_s=0.0, used_s=0.0)
    assert allowance.rest_s(10.0, 10.0) == LONGEST_REST_S
    assert allowance.rest_s(12.0, 10.0) == 0.0


def test_whoever_comes_when_all_connections_are_taken_is_turned_away_and_the_others_are_looked_at() -> None:
    with ExitStack() as stack:
        listening = stack.enter_context(listen_on("127.0.0.1", 0))

        def connected() -> socket.socket:
            client = socket.create_connection(listening.getsockname(), timeout=60)
            return stack.enter_context(client)

        clients = [connected() for _ in range(MOST_CONNECTIONS)]
        accepted = [stack.enter_context(listening.accept()[0]) for _ in clients]
        refused = [connected() for _ in range(TURNED_AWAY_AT_ONCE)]
        with pytest.raises(ConnectionAbortedError):
            listening.accept()
        assert [client.recv(1) for client in refused] == [b""] * len(refused)
        accepted[3].close()
        newest = connected()
        served, address = listening.accept()
        stack.enter_context(served)
        assert address == newest.getsockname()
