"""Who is blamed when the daemon grows: largest senders of what never reached us, as far as it is known."""

import socket
import sys
from typing import Any

import pytest

from swarmnode.network.daemon.control_client import PeerAddresses
from swarmnode.network.daemon.daemon_memory import MAX_GROWTH_BYTES, RELIEF_AT_BYTES, DaemonMemory
from swarmnode.network.daemon.peer_gate import PeerGate
from swarmnode.network.daemon.received_bytes import Connection, received_bytes
from swarmnode.network.daemon.stream_server import StreamServer
from swarmnode.network.daemon.traffic import (
    FIRST_BAR_S,
    FLOOD_BYTES,
    GOSSIP_ENVELOPE_BYTES,
    LEAST_BLAME_BYTES,
    LONGEST_BAR_S,
    STREAMED_BYTES,
    Traffic,
    largest_senders,
)
from swarmnode.network.rpc import Service
from swarmnode.network.skip_counters import SkipCounters

OURS = ("/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/udp/4001/quic-v1")
MALLORY = PeerAddresses("mallory", ("/ip4/192.0.2.1/tcp/1000",))
HONEST = PeerAddresses("honest", ("/ip4/192.0.2.2/tcp/2000",))
RELAY = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
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

    def relay(self) -> Traffic:
        return Traffic(count=self.count, clock=lambda: self.now_s, relays=True)

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


def test_a_relay_is_not_blamed_for_what_it_passes_on_also_after_the_peer_left_it():
    kernel = Kernel()
    traffic = kernel.traffic()
    seed = PeerAddresses(f"{RELAY}", ("/ip4/192.0.2.9/tcp/4001",))
    home = PeerAddresses("home", (f"/ip4/192.0.2.9/tcp/4001/p2p/{RELAY}/p2p-circuit",))
    for connections in ([seed, home], [seed, home], [seed, home], [seed, HONEST]):
        kernel.now_s += 1
        kernel.sent(seed, 9 * MIB)
        traffic.note_handed("home", 9 * MIB)
        kept = traffic.kept_bytes(OURS, connections)
    assert not traffic.flooders(kept)
    kernel.sent(seed, 3 * MIB)
    assert traffic.flooders(traffic.kept_bytes(OURS, [seed])) == (RELAY,)


def test_who_sends_much_through_a_relay_is_not_sent_away_by_it():
    kernel = Kernel()
    for traffic, blamed in ((kernel.traffic(), ("honest",)), (kernel.relay(), ())):
        traffic.kept_bytes(OURS, [HONEST])
        kernel.now_s += 1
        kernel.sent(HONEST, 100 * MIB)
        assert traffic.flooders(traffic.kept_bytes(OURS, [HONEST])) == blamed


def test_what_reached_us_on_streams_is_no_part_of_the_blame():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.kept_bytes(OURS, [MALLORY, HONEST])
    kernel.now_s += 1
    kernel.sent(HONEST, 500 * MIB)
    traffic.note_handed("honest", 500 * MIB)
    kernel.sent(MALLORY, MIB)
    assert traffic.kept_bytes(OURS, [MALLORY, HONEST]) == {"mallory": MIB}


def test_a_peer_that_has_just_come_is_blamed_for_all_it_sent():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.kept_bytes(OURS, [HONEST])
    kernel.sent(MALLORY, MIB)
    assert traffic.kept_bytes(OURS, [HONEST, MALLORY]) == {"mallory": MIB}


def test_who_sends_more_than_gossip_explains_floods():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.kept_bytes(OURS, [MALLORY, HONEST])
    kernel.now_s += 1
    kernel.sent(MALLORY, FLOOD_BYTES + 1)
    kernel.sent(HONEST, FLOOD_BYTES)
    assert traffic.flooders(traffic.kept_bytes(OURS, [MALLORY, HONEST])) == ("mallory",)


def test_a_member_of_our_pipeline_may_have_more_on_its_way_to_us():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.kept_bytes(OURS, [MALLORY, HONEST])
    traffic.allow("honest", STREAMED_BYTES)
    kernel.sent(MALLORY, FLOOD_BYTES + 1)
    kernel.sent(HONEST, STREAMED_BYTES + FLOOD_BYTES)
    assert traffic.flooders(traffic.kept_bytes(OURS, [MALLORY, HONEST])) == ("mallory",)
    kernel.sent(HONEST, 1)
    assert traffic.flooders(traffic.kept_bytes(OURS, [MALLORY, HONEST])) == ("mallory", "honest")


def test_who_was_a_member_and_left_has_no_such_right_when_it_comes_back():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.allow("honest", STREAMED_BYTES)
    traffic.kept_bytes(OURS, [MALLORY, HONEST])
    traffic.kept_bytes(OURS, [MALLORY])
    kernel.sent(HONEST, FLOOD_BYTES + 1)
    assert traffic.flooders(traffic.kept_bytes(OURS, [HONEST])) == ("honest",)


def test_a_member_that_came_while_the_daemon_was_asked_who_is_connected_keeps_its_right():
    kernel = Kernel()
    traffic = kernel.traffic()
    traffic.allow("honest", STREAMED_BYTES)
    traffic.kept_bytes(OURS, [MALLORY])
    kernel.sent(HONEST, FLOOD_BYTES + 1)
    assert traffic.flooders(traffic.kept_bytes(OURS, [HONEST])) == ()


def test_who_passes_on_what_a_large_swarm_says_does_not_flood():
    kernel = Kernel()
    traffic = kernel.traffic()
    for _ in range(10):
        for _ in range(3000):
            traffic.note_gossip(300)
        for neighbour in (MALLORY, HONEST):
            kernel.sent(neighbour, 3000 * (300 + GOSSIP_ENVELOPE_BYTES))
        assert traffic.flooders(traffic.kept_bytes(OURS, [MALLORY, HONEST])) == ()
        kernel.now_s += 1
    # What was said long ago explains nothing that comes now.
    for _ in range(10):
        traffic.kept_bytes(OURS, [MALLORY, HONEST])
        kernel.now_s += 1
    kernel.sent(MALLORY, 2 * FLOOD_BYTES)
    assert traffic.flooders(traffic.kept_bytes(OURS, [MALLORY, HONEST])) == ("mallory",)


class Daemon:
    """Knows who is connected, and hangs up when it is told to."""

    def __init__(self, *connected: PeerAddresses) -> None:
        self.connected = list(connected)

    async def connected_peers(self) -> tuple[PeerAddresses, ...]:
        return tuple(self.connected)

    async def disconnect(self, peer_id: str) -> None:
        self.connected = [peer for peer in self.connected if peer.peer_id != peer_id]


async def test_who_floods_is_sent_away_before_the_daemon_grows_and_again_when_it_comes_back():
    kernel, daemon = Kernel(), Daemon(MALLORY, HONEST)
    gate = PeerGate(lambda: OURS)
    gate.traffic = kernel.traffic()
    control: Any = daemon
    assert await gate.look(control) == {"mallory", "honest"}
    kernel.now_s += 1
    kernel.sent(MALLORY, 3 * MIB)
    await gate.look(control)
    assert daemon.connected == [HONEST]
    daemon.connected.append(MALLORY)
    await gate.guard(control)
    assert daemon.connected == [HONEST]


async def test_what_a_peer_asked_of_us_is_no_part_of_the_blame():
    kernel, daemon = Kernel(), Daemon(HONEST)
    gate = PeerGate(lambda: OURS)
    gate.traffic = kernel.traffic()
    control: Any = daemon

    async def echo(peer: str, request: bytes) -> bytes:
        return request

    probes = StreamServer(gate, SkipCounters())._counted(Service("/probe", echo, 4 * MIB))
    await gate.look(control)
    kernel.now_s += 1
    for _ in range(3):
        await probes.handler("honest", bytes(MIB))
    kernel.sent(HONEST, 3 * MIB)
    assert await gate.look(control) == {"honest"}


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
    assert memory.judge(80 * MIB) == memory.judge(50 * MIB) == "calm"
    assert memory.judge(50 * MIB + RELIEF_AT_BYTES + 1) == "swollen"
    assert memory.judge(50 * MIB + RELIEF_AT_BYTES + 2) == "calm"
    assert memory.judge(50 * MIB + MAX_GROWTH_BYTES + 1) == "over"


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
