"""Peer ids of libp2p, which encode an Ed25519 public key."""

from functools import lru_cache

import base58

from swarmnode.errors import Rejected

PUBLIC_KEY_BYTES = 32

_MULTIHASH_PREFIX = bytes.fromhex("002408011220")
"""Prefix of a peer id: identity hash of 36 bytes; protobuf field 1 (key type) = Ed25519; field 2 (data) of 32
bytes."""

MAX_PEER_ID_CHARS = 52
"""Longest Ed25519 peer id. Decoding base58 is quadratic, so the length is checked first."""

IDS_KEPT = 4096
"""Peer ids whose decoding is cached: an author signs again and again."""


def peer_id_from_public_key(public_key: bytes) -> str:
    """Encodes a raw Ed25519 public key as a libp2p peer id.

    >>> peer_id_from_public_key(bytes(32))
    '12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw'
    """
    return base58.b58encode(_MULTIHASH_PREFIX + public_key).decode("ascii")


@lru_cache(IDS_KEPT)
def public_key_from_peer_id(peer_id: str) -> bytes:
    """Decodes the raw Ed25519 public key in a peer id. Raises Rejected for anything else.

    >>> public_key_from_peer_id("12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw") == bytes(32)
    True
    """
    if len(peer_id) > MAX_PEER_ID_CHARS:
        raise Rejected("bad_peer_id", "not an Ed25519 peer id")
    try:
        multihash = base58.b58decode(peer_id)
    except ValueError as error:
        raise Rejected("bad_peer_id", "not base58") from error
    prefix, public_key = multihash[:-PUBLIC_KEY_BYTES], multihash[-PUBLIC_KEY_BYTES:]
    if prefix != _MULTIHASH_PREFIX:
        raise Rejected("bad_peer_id", f"{peer_id} is not an Ed25519 peer id")
    return public_key
