"""What an attacker writes on a raw stream: GossipSub RPCs and Kademlia messages, byte by byte.

attacks -> [wire] -> streams /meshsub/1.1.0 and /ipfs/kad/1.0.0 -> the victim's daemon

go-libp2p's own clients refuse to send most of this; a protobuf written by hand refuses nothing. Every message
of gossip is signed as StrictSign asks for, so that the victim's daemon passes it on.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarmnode.identity.node_key import NodeKey
from swarmnode.network.framing import decode_uvarint, encode_frame, encode_uvarint
from swarmnode.network.multiaddr import peer_id_to_bytes

GOSSIP = "/meshsub/1.1.0"
KADEMLIA = "/ipfs/kad/1.0.0"
SIGNED_PREFIX = b"libp2p-pubsub:"

ADD_PROVIDER, GET_PROVIDERS = 2, 3


def field(number: int, value: bytes | int) -> bytes:
    """One protobuf field: bytes with their length, or a varint.

    >>> field(2, b"hi").hex(), field(1, 300).hex()
    ('12026869', '08ac02')
    """
    if isinstance(value, int):
        return encode_uvarint(number << 3) + encode_uvarint(value)
    return encode_uvarint(number << 3 | 2) + encode_frame(value)


def fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The protobuf fields that a daemon wrote: varints, and bytes with their length.

    >>> list(fields(bytes.fromhex("0801120268 69".replace(" ", ""))))
    [(1, 1), (2, b'hi')]
    """
    at = 0
    while at < len(data):
        tag, at = decode_uvarint(data, at)
        value, at = decode_uvarint(data, at)
        if tag & 7 == 0:
            yield tag >> 3, value
        else:
            yield tag >> 3, data[at : at + value]
            at += value


@dataclass(frozen=True, slots=True)
class Author:
    """Who signs a message of gossip, as `from` on the wire."""

    identity: bytes
    key: NodeKey | ec.EllipticCurvePrivateKey

    @classmethod
    def of(cls, key: NodeKey) -> "Author":
        return cls(peer_id_to_bytes(key.peer_id), key)

    @classmethod
    def with_ecdsa(cls) -> "Author":
        """An author whose identity multihash holds a whole ECDSA key, 95 bytes where ids have at most 42."""
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        marshalled = field(1, 3) + field(2, public)
        return cls(b"\0" + encode_frame(marshalled), key)

    def sign(self, data: bytes) -> bytes:
        if isinstance(self.key, NodeKey):
            return self.key.sign(data)
        return self.key.sign(data, ec.ECDSA(hashes.SHA256()))


def gossip(author: Author, topic: str, data: bytes) -> bytes:
    """A signed message with a sequence number of its own, so that it counts as new wherever it comes."""
    unsigned = field(1, author.identity) + field(2, data) + field(3, os.urandom(8)) + field(4, topic.encode())
    return unsigned + field(5, author.sign(SIGNED_PREFIX + unsigned))


def publishing(*messages: bytes) -> bytes:
    """The framed RPC that carries messages of gossip."""
    return encode_frame(b"".join(field(2, message) for message in messages))


def subscribing(*topics: str) -> bytes:
    """The framed RPC that subscribes to topics."""
    return encode_frame(b"".join(field(1, field(1, 1) + field(2, topic.encode())) for topic in topics))


def subscribing_to_many(numbers: Iterable[int]) -> bytes:
    """The framed RPC that subscribes to topics of nine letters, one for each number below 16 ** 9."""
    head = bytes([1 << 3 | 2, 13]) + field(1, 1) + bytes([2 << 3 | 2, 9])
    return encode_frame(b"".join(head + b"%09x" % number for number in numbers))


def provider(identity: bytes, address: bytes) -> bytes:
    """A peer in a Kademlia message; `identity` may be any bytes at all."""
    return field(1, identity) + field(2, address) + field(3, 1)


def kademlia(kind: int, key: bytes, *providers: bytes) -> bytes:
    """A framed Kademlia message about a key, with the peers that are said to provide it."""
    return encode_frame(
        field(1, kind) + field(2, key) + b"".join(field(9, one) for one in providers) + field(10, 1)
    )
