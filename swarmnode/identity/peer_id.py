"""Peer ids: the public key itself, spelled as libp2p spells it.

public key -> [peer id] -> public key

An Ed25519 peer id is the base58 of an identity multihash, so the key can be read back out of the name and
no lookup is ever needed to verify a signature. RSA ids (`Qm...`) only hash their key and are not accepted.
"""

import base58

from swarmnode.errors import Rejected

PUBLIC_KEY_BYTES = 32

_MULTIHASH_PREFIX = bytes.fromhex("002408011220")
"""identity hash of 36 bytes; protobuf field 1 (key type) = Ed25519; field 2 (data) of 32 bytes."""

MAX_PEER_ID_CHARS = 52
"""An Ed25519 peer id never has more. Decoding base58 is quadratic, so length is checked first."""


def peer_id_from_public_key(public_key: bytes) -> str:
    """Spell a raw Ed25519 public key as a libp2p peer id.

    >>> peer_id_from_public_key(bytes(32))
    '12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw'
    """
    return base58.b58encode(_MULTIHASH_PREFIX + public_key).decode("ascii")


def public_key_from_peer_id(peer_id: str) -> bytes:
    """Read the raw Ed25519 public key back out of a peer id. Raises Rejected for anything else.

    >>> public_key_from_peer_id("12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw") == bytes(32)
    True
    """
    if len(peer_id) > MAX_PEER_ID_CHARS or not peer_id.isascii():
        raise Rejected("bad_peer_id", "not an Ed25519 peer id")
    try:
        multihash = base58.b58decode(peer_id)
    except ValueError as error:
        raise Rejected("bad_peer_id", "not base58") from error
    prefix, public_key = multihash[:-PUBLIC_KEY_BYTES], multihash[-PUBLIC_KEY_BYTES:]
    if prefix != _MULTIHASH_PREFIX:
        raise Rejected("bad_peer_id", f"{peer_id} is not an Ed25519 peer id")
    return public_key
