"""Addresses: strict with what people and peers write, and the same in both spellings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import NetworkError
from swarmnode.network.multiaddr import (
    MAX_ADDRESS_BYTES,
    address_from_bytes,
    address_to_bytes,
    by_reach,
    parse_address,
    peer_id_from_bytes,
    peer_id_to_bytes,
    readable_addresses,
    scope_of,
    split_listen,
    split_peer,
)

PEER = "12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp"
RELAY = "12D3KooWHNHgxbfuQVkzTb6C41EWJtGKXGHwM1Hv3Un8BHUfuhN7"
RSA_PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

ADDRESSES = [
    "/ip4/127.0.0.1/tcp/4001",
    "/ip4/192.0.2.7/udp/4001/quic-v1",
    "/ip6/2001:db8::7/tcp/65535",
    f"/dns4/seed.example.org/tcp/4001/p2p/{PEER}",
    f"/dns6/seed-2.example.org/udp/1/quic-v1/p2p/{RSA_PEER}",
    f"/ip4/192.0.2.7/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
]

MALFORMED = [
    "",
    "/",
    "//",
    "ip4/127.0.0.1/tcp/4001",
    "192.0.2.7:4001",
    "/ip4/192.0.2/tcp/4001",
    "/ip4/192.0.2.7/tcp",
    "/ip4/192.0.2.7/tcp/",
    "/ip4/192.0.2.7/tcp/65536",
    "/ip4/192.0.2.7/tcp/-1",
    "/ip4/192.0.2.7/tcp/\u0664",
    "/ip4/192.0.2.7/tcp/4001/",
    "/ip4/192.0.2.7/sctp/4001",
    "/ip6/192.0.2.7/tcp/4001",
    "/ip6/fe80::1%eth0/tcp/4001",
    "/dns4/-bad-/tcp/4001",
    "/dns4/two words/tcp/4001",
    "/dns4/" + "a" * 64 + "/tcp/4001",
    "/ip4/192.0.2.7/tcp/4001/p2p/" + "0OIl" * 13,
    "/ip4/192.0.2.7/tcp/4001/p2p/" + PEER[:-1],
    "/ip4/192.0.2.7/tcp/4001/p2p/" + "1" * 60_000,
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_text_and_bytes_are_two_spellings_of_one_address(address: str):
    assert address_from_bytes(address_to_bytes(address)) == address


def test_addresses_that_reach_further_come_first():
    near, lan, far = "/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.7/tcp/1", "/ip4/8.8.8.8/tcp/1"
    link, relayed = "/ip6/fe80::1/tcp/1", f"/ip4/8.8.8.8/tcp/1/p2p/{RELAY}/p2p-circuit"
    assert by_reach([near, link, lan, relayed, far]) == (far, relayed, lan, link, near)


@pytest.mark.parametrize(
    ("ip", "scope"),
    [
        *((f"/ip4/{ip}", "machine") for ip in ("127.0.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1")),
        *((f"/ip6/{ip}", "machine") for ip in ("::1", "::", "ff02::1", "::ffff:127.0.0.1")),
        *(("/ip6/::ffff:10.0.0.7", "lan"), ("/ip6/::ffff:8.8.8.8", "public"), ("/dns6/a.org", "public")),
    ],
)
def test_an_address_that_nobody_can_dial_reaches_this_machine_alone(ip: str, scope: str):
    assert scope_of(f"{ip}/tcp/1") == scope


@pytest.mark.parametrize(
    ("address", "spelling"),
    [
        # Taken from the daemon: IDENTIFY of a host that listens there.
        ("/ip4/127.0.0.1/udp/4001/quic-v1", "047f00000191020fa1cd03"),
        # From libp2p's table of protocols.
        ("/ip6/::1/tcp/1/p2p-circuit", f"29{1:032x}060001a202"),
        (f"/dns4/a.org/tcp/1/p2p/{PEER}", f"3605612e6f7267060001a50326{peer_id_to_bytes(PEER).hex()}"),
        ("/dns6/a.org/tcp/1", "3705612e6f7267060001"),
    ],
)
def test_the_binary_spelling_is_the_one_of_libp2p(address: str, spelling: str):
    assert address_to_bytes(address).hex() == spelling


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param("047f0000", id="cut off"),
        pytest.param("0500", id="an unknown protocol"),
        pytest.param("3603612f62", id="a DNS name with a slash"),
        pytest.param("3601ff", id="a DNS name beyond ASCII"),
        pytest.param("a50300", id="an empty peer id"),
        pytest.param(f"a5032d002b{0:086x}", id="a key too large to be its own hash"),
        pytest.param(f"a503221320{0:064x}", id="another hash"),
        pytest.param("a503031201ff", id="a short hash"),
    ],
)
def test_a_malformed_binary_address_is_refused(spelling: str):
    with pytest.raises(NetworkError):
        address_from_bytes(bytes.fromhex(spelling))


@pytest.mark.parametrize("address", MALFORMED)
def test_a_malformed_address_is_refused_with_a_hint(address: str):
    for read in (parse_address, split_peer):
        with pytest.raises(NetworkError) as caught:
            read(address)
        assert caught.value.hint


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/192.0.2.7/tcp/4001",
        f"/p2p/{PEER}",
        f"/tcp/4001/p2p/{PEER}",
        f"/ip4/192.0.2.7/udp/4001/p2p/{PEER}",
        f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}/tcp/1",
        f"/ip4/192.0.2.7/tcp/4001/p2p-circuit/p2p/{PEER}",
    ],
)
def test_an_address_that_cannot_be_dialled_is_refused(address: str):
    with pytest.raises(NetworkError):
        split_peer(address)


def test_a_relayed_address_is_dialled_through_the_relay():
    transport, peer_id = split_peer(ADDRESSES[-1])
    assert transport == f"/ip4/192.0.2.7/tcp/4001/p2p/{RELAY}/p2p-circuit"
    assert peer_id == PEER


def test_only_an_ip_address_and_port_can_be_listened_on():
    assert split_listen("/ip6/::/udp/0/quic-v1") == ("::", "udp", 0)
    for address in ("/dns4/example.org/tcp/4001", "/ip4/0.0.0.0", f"/ip4/0.0.0.0/tcp/1/p2p/{PEER}"):
        with pytest.raises(NetworkError):
            split_listen(address)


@given(st.binary(max_size=80))
def test_any_bytes_are_an_address_or_a_network_error(data: bytes):
    try:
        text = address_from_bytes(data)
    except NetworkError:
        return
    assert not text or parse_address(text)


@given(st.text(alphabet="/ip4dnstcpudquic-v1.:0123456789", max_size=MAX_ADDRESS_BYTES + 8))
def test_any_text_is_an_address_or_a_network_error(text: str):
    try:
        encoded = address_to_bytes(text)
    except NetworkError:
        return
    assert address_to_bytes(address_from_bytes(encoded)) == encoded


def test_addresses_we_cannot_read_are_left_out():
    webtransport = address_to_bytes("/ip4/127.0.0.1/udp/4001/quic-v1") + bytes.fromhex("d103")
    tcp = address_to_bytes("/ip4/127.0.0.1/tcp/4001")
    assert readable_addresses([webtransport, tcp]) == ("/ip4/127.0.0.1/tcp/4001",)


@pytest.mark.parametrize("peer_id", [PEER, RSA_PEER])
def test_a_peer_id_reads_back(peer_id: str):
    assert peer_id_from_bytes(peer_id_to_bytes(peer_id)) == peer_id
