"""The key of a private swarm: names that outsiders cannot guess, and seals that only members can open.

invitation, home -> [SwarmKey] -> private_host.py (topics, protocols, messages), sealed_stream.py (streams)

Everything is derived from one secret of 32 random bytes by HMAC-SHA256 over length-prefixed parts, which is
HKDF-Expand (RFC 5869) of a key that is already uniform. Each context (kind of message, topic or protocol,
sender and receiver) has its own key for ChaCha20-Poly1305. So data sealed in one context cannot be opened in
another, and random nonces do not collide: that would take about 2^32 messages in one context.

The seal hides messages from everybody without the key. It does not identify the sender, since all members
hold the same key; libp2p does that.
"""

import hmac
import os
from dataclasses import dataclass, field
from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarmnode.errors import NetworkError, Rejected

SECRET_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""Bytes that a seal adds to a message."""

MARK_BYTES = 16
_NAME_BYTES = 16


@dataclass(frozen=True)
class SwarmKey:
    """A secret that all members share and nobody else has.

    >>> key = SwarmKey(bytes(32))
    >>> key.open(key.seal(b"hello", "topic", "rollouts"), "topic", "rollouts")
    b'hello'
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise NetworkError(
                f"a swarm key has {SECRET_BYTES} bytes, not {len(self.secret)}",
                hint="ask for a new invitation, and paste all of it",
            )

    @classmethod
    def generate(cls) -> "SwarmKey":
        return cls(os.urandom(SECRET_BYTES))

    @cached_property
    def mark(self) -> bytes:
        """Returns the public mark of the key, which reveals nothing about the key. Lists are signed for a
        mark."""
        return self.derive("mark")[:MARK_BYTES]

    def name(self, kind: str, text: str) -> str:
        """Returns the name on the wire for a topic, a protocol or a namespace.

        >>> SwarmKey(bytes(32)).name("topic", "/swarmnode/4/friends/rollouts/0")
        '/d617d0ceeab97539ab0fbd3c86764e87'
        """
        return "/" + self.derive("name", kind, text)[:_NAME_BYTES].hex()

    def seal(self, data: bytes, *context: str | bytes) -> bytes:
        """Returns nonce, ciphertext and tag."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher(context).encrypt(nonce, data, None)

    def open(self, sealed: bytes, *context: str | bytes) -> bytes:
        """Returns the message that was sealed in this context. Raises Rejected for anything else. The caller
        must limit the size."""
        if len(sealed) < SEAL_BYTES:
            raise Rejected("not_sealed", f"{len(sealed)} bytes")
        try:
            return self._cipher(context).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
        except InvalidTag as error:
            raise Rejected("not_sealed", "not with this key, or not for this place") from error

    def derive(self, *parts: str | bytes) -> bytes:
        """Returns 32 bytes derived from the secret and these parts, which reveal neither."""
        message = bytearray()
        for part in parts:
            encoded = part.encode() if isinstance(part, str) else part
            message += len(encoded).to_bytes(4, "big") + encoded
        # 0x01: the counter of the first and only block.
        return hmac.digest(self.secret, bytes(message) + b"\x01", "sha256")

    def _cipher(self, context: tuple[str | bytes, ...]) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self.derive("seal", *context))
