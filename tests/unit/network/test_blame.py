"""Who is blamed when the daemon grows: largest senders of what never reached us, as far as it is known."""

import socket
import sys

import pytest

from swarmnode.network.p2pd_control import PeerAddresses
from swarmnode.network.p2pd_incoming import (
    FIRST_BAR_S,
    LEAST_BLAME_BYTES,
    LONGEST_BAR_S,
    Connection,
    Traffic,
    largest_senders,
    received_bytes,
)
from swarmnode.network.p2pd_process import MAX_GROWTH_BYTES, RELIEF_AT_BYTES, DaemonMemory

OURS = ("/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/udp/4001/quic-v1")
MALLORY = PeerAddresses("mallory", ("/ip4/192.0.2.1/tcp/1000",))
HONEST = PeerAddresses("honest", ("/ip4/192.0.2.2/tcp/2000",))
MIB = 2**20


class Kernel:
    """Counts what we say it counts."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.received: dict[Connection, int] | None = {}

    def count(self, ports: frozenset[int]) -> dict[Connection, int] | None:
        assert ports == {4001}
        return None if self.received is None else dict(self.received)

    def traffic(self) -> Traffic:
        return Traffic(count=self.count, clock=lambda: self.now_s)

    def sent(self, peer: PeerAddresses, size_bytes: int) -> None:
        assert self.received is not None
        _, _, ip, _, port = peer.addresses[0].split("/")
        connection = (4001, ip, int(port))
        self.received[connection] = self.received.get(connection, 0) + size_bytes


def test_what_came_lately_counts_and_what_came_long_ago_does_not():
    kernel = Kernel()
    traffic = kernel.traffic()
    kernel.sent(HONEST, 100 * MIB)
    for _ in range(10):
        traffic.kept_bytes(OURS, [MALLORY, HONEST])
        kernel.now_s += 1
    kernel.sent(MALLORY, 3 * MIB)
    kernel.sent(HONEST, 1000)
    assert traffic.kept_bytes(OURS, [MALLORY, HONEST]) == {"mallory": 3 * MIB, "honest": 1000}


def test_what_reached_us_on_streams_is_no_part_of_the_blame():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.kept_bytes(OURS, [MALLORY, HONEST])
    kernel.now_s += 1
    kernel.sent(HONEST, 500 * MIB)
    traffic.handed("honest", 500 * MIB)
    kernel.sent(MALLORY, MIB)
    assert traffic.kept_bytes(OURS, [MALLORY, HONEST]) == {"mallory": MIB}


def test_a_peer_that_has_just_come_is_blamed_for_all_it_sent():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.kept_bytes(OURS, [HONEST])
    kernel.sent(MALLORY, MIB)
    assert traffic.kept_bytes(OURS, [HONEST, MALLORY]) == {"mallory": MIB}


def test_where_the_kernel_tells_nothing_nobody_is_blamed():
    kernel = Kernel()
    kernel.received = None
    assert kernel.traffic().kept_bytes(OURS, [MALLORY]) == {}


def test_those_who_sent_about_as_much_are_sent_away_together():
    assert largest_senders({}) == ()
    assert largest_senders({"a": LEAST_BLAME_BYTES - 1}) == ()
    assert largest_senders({"a": 4 * MIB, "b": 2 * MIB, "c": MIB, "d": MIB - 1}) == ("a", "b", "c")


def test_who_does_it_again_waits_longer():
    traffic = Kernel().traffic()
    assert [traffic.bar_for_s("a") for _ in range(3)] == [FIRST_BAR_S, 4 * FIRST_BAR_S, 16 * FIRST_BAR_S]
    assert traffic.bar_for_s("b") == FIRST_BAR_S
    for _ in range(10):
        longest = traffic.bar_for_s("a")
    assert longest == LONGEST_BAR_S


def test_a_life_is_judged_by_what_it_grew_over_its_least():
    memory = DaemonMemory()
    assert memory.look(80 * MIB) == memory.look(50 * MIB) == "calm"
    assert memory.look(50 * MIB + RELIEF_AT_BYTES + 1) == "swollen"
    assert memory.look(50 * MIB + RELIEF_AT_BYTES + 2) == "calm"
    assert memory.look(50 * MIB + MAX_GROWTH_BYTES + 1) == "over"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_kernel_counts_what_came_in():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, (address, remote_port) = server.accept()
            with accepted:
                client.sendall(bytes(12_345))
                while len(accepted.recv(12_345, socket.MSG_PEEK)) < 12_345:
                    pass
                received = received_bytes(frozenset({port}))
    if received is None:
        pytest.skip("the kernel does not tell here")
    assert received == {(port, address, remote_port): 12_345}
