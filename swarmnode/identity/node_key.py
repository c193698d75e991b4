"""The key pair of a node, which determines its peer id and its name."""

import os
from dataclasses import dataclass, field
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.errors import IdentityError
from swarmnode.identity.memorable_name import memorable_name
from swarmnode.identity.peer_id import peer_id_from_public_key

SEED_BYTES = 32

KEY_FILE_BYTES = 68

_KEY_FILE_PREFIX = bytes.fromhex("08011240")

RESTORE_HINT = "restore your backup, or move the file away to start with a new identity"


@dataclass(frozen=True)
class NodeKey:
    """An Ed25519 key pair, which determines the peer id and the name.

    >>> NodeKey(bytes(32)).peer_id
    '12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN'
    """

    seed: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> "NodeKey":
        return cls(os.urandom(SEED_BYTES))

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)

    @cached_property
    def public_bytes(self) -> bytes:
        return self._private.public_key().public_bytes_raw()

    @cached_property
    def peer_id(self) -> str:
        return peer_id_from_public_key(self.public_bytes)

    @property
    def name(self) -> str:
        return memorable_name(self.peer_id)

    def sign(self, data: bytes) -> bytes:
        """Returns the raw signature of `data`, 64 bytes. Messages go through `seal`, which adds the
        context."""
        return self._private.sign(data)

    def to_protobuf(self) -> bytes:
        """Returns the key in libp2p's format, which is also the file's."""
        return _KEY_FILE_PREFIX + self.seed + self.public_bytes

    @classmethod
    def from_protobuf(cls, data: bytes) -> "NodeKey":
        """Reads `to_protobuf` back. Raises IdentityError for anything but a consistent Ed25519 key."""
        if len(data) != KEY_FILE_BYTES or not data.startswith(_KEY_FILE_PREFIX):
            raise IdentityError(
                f"not a libp2p Ed25519 private key ({len(data)} bytes, expected {KEY_FILE_BYTES})",
                hint=RESTORE_HINT,
            )
        key = cls(data[4 : 4 + SEED_BYTES])
        if data[4 + SEED_BYTES :] != key.public_bytes:
            raise IdentityError(
                "the key is damaged: its public half does not match its seed", hint=RESTORE_HINT
            )
        return key
