"""The TXT records of libp2p's mDNS, and a real exchange over loopback multicast."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import NetworkError
from swarmnode.extensions.mdns import mdns
from swarmnode.extensions.mdns.mdns import encode_txt, local_peers, parse_txt
from swarmnode.network.memory_network import MemoryNetwork
from swarmnode.network.multiaddr import MAX_ADDRESSES_PER_PEER, split_peer
from tests.unit.network.finding.test_discovery import discovering, until_connected

PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"


def test_addresses_read_back_from_a_record():
    addresses = (ADDRESS, f"/ip6/2001:db8::7/udp/4001/quic-v1/p2p/{PEER}")
    assert parse_txt(encode_txt(addresses)) == addresses


def test_an_address_too_long_for_a_dns_string_is_left_out():
    long = f"/dns4/{'a.' * 110}example/tcp/1/p2p/{PEER}"
    assert parse_txt(encode_txt([long, ADDRESS])) == (ADDRESS,)


def test_what_is_no_address_is_skipped():
    junk = [b"dnsaddr=nonsense", b"version=2", b"dnsaddr=" + ADDRESS.encode(), b"dnsaddr=\xff\xff"]
    record = b"".join(bytes([len(string)]) + string for string in junk)
    assert parse_txt(record) == (ADDRESS,)


def test_a_record_cannot_name_more_than_a_few_addresses():
    many = [f"/ip4/192.0.2.7/tcp/{port}/p2p/{PEER}" for port in range(1, 100)]
    assert len(parse_txt(encode_txt(many))) == MAX_ADDRESSES_PER_PEER


@given(st.binary(max_size=600))
def test_any_record_gives_dialable_addresses_or_none(record: bytes):
    for address in parse_txt(record):
        split_peer(address)


async def test_an_announced_peer_is_found_on_the_local_network():
    loopback = ["127.0.0.1"]
    async with (
        asyncio.timeout(20),
        local_peers([ADDRESS], interfaces=loopback),
        local_peers([], interfaces=loopback) as looking,
    ):
        async for addresses in looking:
            if addresses == (ADDRESS,):
                return


async def test_a_machine_without_multicast_is_told(monkeypatch: pytest.MonkeyPatch):
    def no_network(**_: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(mdns, "AsyncZeroconf", no_network)
    with pytest.raises(NetworkError, match="multicast"):
        async with local_peers([ADDRESS], interfaces=["127.0.0.1"]):
            pass


async def test_two_nodes_of_one_local_network_meet_by_mdns():
    network = MemoryNetwork()
    async with (
        network.host() as alice,
        network.host() as bob,
        discovering(alice, local_peers=local_peers),
        discovering(bob, local_peers=local_peers),
    ):
        await until_connected(alice, bob)
