"""Peer ids and multiaddrs, text <-> bytes: only the protocols that a swarmnode address is made of.

CLI, configuration, mDNS, peers -> [multiaddr] -> control_client.py (binary form)

Everything that comes from a person or a peer is parsed strictly; a malformed address is a NetworkError whose
message can be shown as it is.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import base58

from swarmnode.errors import NetworkError
from swarmnode.network.framing import decode_uvarint, encode_uvarint

MAX_ADDRESS_BYTES = 512
"""Longest address as text. The longest honest one (a DNS name through a relay) stays under 400."""

MAX_ADDRESSES_PER_PEER = 8
"""Most addresses kept of those that a peer claims. An honest host has a handful; a hostile one may claim any
number."""

MAX_ADDRESSES_READ = 256
"""Most addresses examined of those that a peer claims, since many of them may be unreadable."""

MAX_PEER_ID_CHARS = 64
"""Longest peer id. Ed25519 ids have 52 characters, RSA ids 46."""

_CODES = {
    "ip4": 4,
    "tcp": 6,
    "ip6": 41,
    "dns4": 54,
    "dns6": 55,
    "udp": 273,
    "p2p-circuit": 290,
    "p2p": 421,
    "quic-v1": 461,
}
_NAMES = {code: name for name, code in _CODES.items()}
_IP_CLASSES = {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}
_WITHOUT_VALUE = {"p2p-circuit", "quic-v1"}
_FIXED_SIZE_BYTES = {"ip4": 4, "ip6": 16, "tcp": 2, "udp": 2}

_DNS_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}$){_DNS_LABEL}(\.{_DNS_LABEL})*\.?")

_TRANSPORT = re.compile(r"(/(ip4|ip6|dns4|dns6)/[^/]+)(/tcp/[0-9]+|/udp/[0-9]+/quic-v1)")
_DIALABLE = re.compile(rf"{_TRANSPORT.pattern}(/p2p/[^/]+/p2p-circuit)?")

ADDRESS_HINT = "an address looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..."

Component = tuple[str, str]
"""A protocol name and its value, "" for protocols that have none."""


def address_to_bytes(address: str) -> bytes:
    """Returns the binary multiaddr. Raises NetworkError for a malformed address.

    >>> address_to_bytes("/ip4/127.0.0.1/tcp/4001").hex()
    '047f000001060fa1'
    """
    return b"".join(
        encode_uvarint(_CODES[name]) + _value_to_bytes(name, value, address)
        for name, value in parse_address(address)
    )


def address_from_bytes(data: bytes) -> str:
    """Returns the text of a binary multiaddr. Raises NetworkError for one that we cannot read.

    >>> address_from_bytes(bytes.fromhex("047f000001060fa1"))
    '/ip4/127.0.0.1/tcp/4001'
    """
    return format_address(_components_of(data))


def format_address(components: Iterable[Component]) -> str:
    """Returns the text of an address.

    >>> format_address([("ip4", "127.0.0.1"), ("udp", "4001"), ("quic-v1", "")])
    '/ip4/127.0.0.1/udp/4001/quic-v1'
    """
    return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in components)


def readable_addresses(addresses: Sequence[bytes]) -> tuple[str, ...]:
    """Returns the texts of the binary multiaddrs that we can read, and leaves out all others: peers may
    listen on transports that we lack. Every returned text can be parsed again."""
    texts: list[str] = []
    for data in addresses[:MAX_ADDRESSES_READ]:
        try:
            text = address_from_bytes(data)
            parse_address(text)
        except NetworkError:
            continue
        texts.append(text)
    return tuple(texts)


def by_reach(addresses: Iterable[str]) -> tuple[str, ...]:
    """Returns addresses by reach: public ones first, loopback last.

    >>> by_reach(["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.20/tcp/1", "/dns4/a.org/tcp/1"])
    ('/dns4/a.org/tcp/1', '/ip4/192.168.1.20/tcp/1', '/ip4/127.0.0.1/tcp/1')
    """
    return tuple(sorted(addresses, key=_distance))


def _distance(address: str) -> tuple[int, bool]:
    name, value = parse_address(address)[0]
    link_local = name in _IP_CLASSES and ipaddress.ip_address(value).is_link_local
    return ("public", "lan", "machine").index(scope_of(address)), link_local or is_relayed(address)


Scope = Literal["public", "lan", "machine"]
"""Reach of an address: everybody, the local network, or this machine only."""

_LOCAL_NETWORKS = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"),
        *("fc00::/7", "fe80::/10"),
    )
)


def scope_of(address: str) -> Scope:
    """Returns the reach of an address. A name counts as public, and an address that nobody can dial as local
    to this machine.

    >>> scope_of("/ip4/192.168.1.20/tcp/1"), scope_of("/ip4/100.64.0.2/tcp/1"), scope_of("/ip4/8.8.8.8/tcp/1")
    ('lan', 'lan', 'public')
    """
    name, value = parse_address("/".join(address.split("/")[:3]))[0]
    if name not in _IP_CLASSES:
        return "public"
    ip = ipaddress.ip_address(value)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if any(ip in network for network in _LOCAL_NETWORKS):
        return "lan"
    return "machine" if ip.is_loopback or ip.is_unspecified or ip.is_multicast or ip.is_reserved else "public"


def parse_address(address: str) -> tuple[Component, ...]:
    """Returns the components of an address, values checked. Raises NetworkError.

    >>> parse_address("/ip4/127.0.0.1/udp/4001/quic-v1")
    (('ip4', '127.0.0.1'), ('udp', '4001'), ('quic-v1', ''))
    """
    if len(address) > MAX_ADDRESS_BYTES:
        raise NetworkError(f"an address of {len(address)} characters is too long", hint=ADDRESS_HINT)
    if not address.startswith("/") or len(address) == 1:
        raise _malformed(address, "it must start with /ip4, /ip6, /dns4 or /dns6")
    components = tuple(_split(address))
    for name, value in components:
        _value_to_bytes(name, value, address)
    return components


def split_peer(address: str) -> tuple[str, str]:
    """Returns the address to dial, without the last /p2p/..., and the peer id to expect there.

    >>> split_peer("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp")
    ('/ip4/127.0.0.1/tcp/4001', '12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp')
    """
    parse_address(address)
    transport, _, peer_id = address.rpartition("/p2p/")
    if "/" in peer_id:
        raise _malformed(address, "it does not end in /p2p/<peer id>")
    if not _DIALABLE.fullmatch(transport):
        raise _malformed(address, "it needs a host, then /tcp/<port> or /udp/<port>/quic-v1")
    return transport, peer_id


def is_for_outsiders(address: str) -> bool:
    """Returns True for an address that everybody can dial without a relay.

    >>> is_for_outsiders("/dns4/a.org/tcp/1"), is_for_outsiders("/ip4/10.0.0.7/tcp/1")
    (True, False)
    """
    return scope_of(address) == "public" and not is_relayed(address)


def is_relayed(address: str) -> bool:
    """Returns True for an address that goes through a relay.

    >>> is_relayed("/ip4/192.0.2.7/tcp/1"), is_relayed("/ip4/192.0.2.7/tcp/1/p2p-circuit")
    (False, True)
    """
    return "p2p-circuit" in address.split("/")


def is_address(text: str) -> bool:
    """Returns True if a text is meant as an address, right or wrong.

    >>> is_address("/ip4/nonsense"), is_address("/home/me/seeds.txt")
    (True, False)
    """
    return text.startswith("/") and text.split("/")[1] in _CODES


def is_dns_name(text: str) -> bool:
    return _DNS_NAME.fullmatch(text) is not None


def split_listen(address: str) -> tuple[str, str, int]:
    """Returns (IP address, "tcp" or "udp", port) of an address to listen on. Raises NetworkError.

    >>> split_listen("/ip4/0.0.0.0/tcp/4001")
    ('0.0.0.0', 'tcp', 4001)
    """
    components = parse_address(address)
    if components[0][0] not in _IP_CLASSES or not _TRANSPORT.fullmatch(address):
        raise NetworkError(
            f"cannot listen on {address}",
            hint="listen on /ip4/0.0.0.0/tcp/<port> or /ip4/0.0.0.0/udp/<port>/quic-v1",
        )
    (_, host), (transport, port) = components[:2]
    return host, transport, int(port)


def check_peer_id(peer_id: str) -> str:
    """Returns a peer id unchanged. Raises NetworkError if it is not one."""
    peer_id_to_bytes(peer_id)
    return peer_id


def peer_id_to_bytes(peer_id: str) -> bytes:
    """Returns the multihash behind a base58 peer id. Raises NetworkError.

    >>> peer_id_to_bytes("12D3KooWBg3mteN12tDjA4HCvoEkdCkuQqXhSdTLU7DrzthpZ4tp")[:6].hex()
    '002408011220'
    """
    malformed = NetworkError(f"{peer_id[:80]!r} is not a peer id", hint="peer ids look like 12D3KooW...")
    # Decoding base58 is quadratic, so the length is checked first.
    if len(peer_id) > MAX_PEER_ID_CHARS:
        raise malformed
    try:
        multihash = base58.b58decode(peer_id)
    except ValueError as error:
        raise malformed from error
    if not _is_peer_multihash(multihash):
        raise malformed
    return multihash


def peer_id_from_bytes(multihash: bytes) -> str:
    """Returns the base58 text of a peer id. Raises NetworkError for other bytes."""
    if not _is_peer_multihash(multihash):
        raise NetworkError(f"a peer id of {len(multihash)} bytes is malformed")
    return base58.b58encode(multihash).decode()


def _is_peer_multihash(multihash: bytes) -> bool:
    # Identity-hashed public keys (Ed25519: 36 bytes, at most 42 by the spec) or SHA-256 of larger keys (RSA).
    if len(multihash) < 2 or len(multihash) != multihash[1] + 2:
        return False
    return (multihash[0] == 0x00 and multihash[1] <= 42) or (multihash[0] == 0x12 and multihash[1] == 32)


def _split(address: str) -> Iterator[Component]:
    words = iter(address[1:].split("/"))
    for name in words:
        if name not in _CODES:
            raise _malformed(address, f"{name!r} is not a known protocol")
        yield name, "" if name in _WITHOUT_VALUE else next(words, "")


def _value_to_bytes(name: str, value: str, address: str) -> bytes:
    match name:
        case "ip4" | "ip6":
            if "%" in value:  # A zone may be any text, and has no binary spelling.
                raise _malformed(address, "it names a zone")
            try:
                return _IP_CLASSES[name](value).packed
            except ValueError as error:
                raise _malformed(address, str(error)) from error
        case "tcp" | "udp":
            if not (value.isascii() and value.isdecimal() and int(value) <= 65535):
                raise _malformed(address, f"{value!r} is not a port")
            return int(value).to_bytes(2, "big")
        case "dns4" | "dns6":
            if not _DNS_NAME.fullmatch(value):
                raise _malformed(address, f"{value!r} is not a DNS name")
            return encode_uvarint(len(value)) + value.encode("ascii")
        case "p2p":
            multihash = peer_id_to_bytes(value)
            return encode_uvarint(len(multihash)) + multihash
        case _:
            return b""


def _components_of(data: bytes) -> Iterator[Component]:
    offset = 0
    while offset < len(data):
        code, offset = decode_uvarint(data, offset)
        name = _NAMES.get(code)
        if name is None:
            raise NetworkError(f"a binary address contains the unknown protocol {code}")
        size_bytes = 0
        if name not in _WITHOUT_VALUE:
            size_bytes = _FIXED_SIZE_BYTES.get(name, -1)
            if size_bytes < 0:
                size_bytes, offset = decode_uvarint(data, offset)
        value = data[offset : offset + size_bytes]
        if len(value) < size_bytes:
            raise NetworkError("a binary address is cut off")
        offset += size_bytes
        yield name, _value_to_text(name, value)


def _value_to_text(name: str, value: bytes) -> str:
    match name:
        case "ip4" | "ip6":
            return str(ipaddress.ip_address(value))
        case "tcp" | "udp":
            return str(int.from_bytes(value, "big"))
        case "dns4" | "dns6":
            text = value.decode("ascii", errors="replace")
            if not _DNS_NAME.fullmatch(text):
                raise NetworkError("a binary address contains a malformed DNS name")
            return text
        case "p2p":
            return peer_id_from_bytes(value)
        case _:
            return ""


def _malformed(address: str, reason: str) -> NetworkError:
    return NetworkError(f"malformed address {address!r}: {reason}", hint=ADDRESS_HINT)
