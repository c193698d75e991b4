"""A byte stream between two members of a private swarm, sealed record by record.

Host.open_stream -> [opened] --salt--> [accepted] -> handler
                        <----salt----
                    [SealedStream] <- records: length (4 bytes) | ciphertext and tag -> [SealedStream]

Each side first sends 32 random bytes. From these, the protocol and the peer ids, both sides derive a key for
each direction that no other stream has, so a record's number can serve as its nonce. A record that is
missing, repeated, moved or from another stream cannot be opened, and the stream ends.
"""

import os
from collections.abc import Sequence
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarmnode.errors import PeerUnreachable
from swarmnode.extensions.private_swarms.swarm_key import NONCE_BYTES, TAG_BYTES, SwarmKey
from swarmnode.network.streams import Buffer, ByteStream

RECORD_BYTES = 64 * 1024
"""Most bytes in one record: a reader needs the whole record before it can trust the first byte."""

SALT_BYTES = 32
_LENGTH_BYTES = 4


async def opened(stream: ByteStream, key: SwarmKey, protocol: str, own_peer_id: str) -> "SealedStream":
    """Returns the sealed end of the peer that opened the stream. The caller sets the deadline. Raises
    PeerUnreachable."""
    salts = await _exchanged(stream)
    return _sealed(stream, key, protocol, (own_peer_id, stream.peer_id), salts)


async def accepted(stream: ByteStream, key: SwarmKey, protocol: str, own_peer_id: str) -> "SealedStream":
    """Returns the sealed end of the peer that accepted the stream. The caller sets the deadline. Raises
    PeerUnreachable."""
    ours, theirs = await _exchanged(stream)
    return _sealed(stream, key, protocol, (stream.peer_id, own_peer_id), (theirs, ours), answers=True)


async def _exchanged(stream: ByteStream) -> tuple[bytes, bytes]:
    """Exchanges salts and returns ours and the peer's."""
    ours = os.urandom(SALT_BYTES)
    await stream.send(ours)
    return ours, await stream.receive(SALT_BYTES)


def _sealed(
    stream: ByteStream,
    key: SwarmKey,
    protocol: str,
    peers: Sequence[str],
    salts: Sequence[bytes],
    *,
    answers: bool = False,
) -> "SealedStream":
    """Returns the sealed stream. `peers` and `salts`: the opener's come first."""
    there, back = (
        ChaCha20Poly1305(key.derive("stream", way, protocol, *peers, *salts)) for way in ("there", "back")
    )
    return SealedStream(stream, back, there) if answers else SealedStream(stream, there, back)


class SealedStream:
    """A sealed `ByteStream` on top of another one."""

    def __init__(self, stream: ByteStream, sending: ChaCha20Poly1305, receiving: ChaCha20Poly1305) -> None:
        self._stream = stream
        self._sending = sending
        self._receiving = receiving
        self._sent = 0
        self._received = 0
        self._opened = bytearray()
        self._announced_bytes: int | None = None
        """Length of the record being received, so that a cancelled receive can be resumed."""

    @property
    def peer_id(self) -> str:
        return self._stream.peer_id

    async def send(self, data: Buffer) -> None:
        content = memoryview(data).cast("B")
        for start in range(0, len(content), RECORD_BYTES):
            nonce = self._sent.to_bytes(NONCE_BYTES, "big")
            self._sent += 1
            record = self._sending.encrypt(nonce, content[start : start + RECORD_BYTES], None)
            await self._stream.send(len(record).to_bytes(_LENGTH_BYTES, "big") + record)

    async def receive(self, size_bytes: int) -> bytes:
        while len(self._opened) < size_bytes:
            await self._receive_record()
        taken = bytes(self._opened[:size_bytes])
        del self._opened[:size_bytes]
        return taken

    async def discard(self) -> None:
        await self._stream.discard()

    def close(self) -> None:
        self._stream.close()

    async def _receive_record(self) -> None:
        if self._announced_bytes is None:
            self._announced_bytes = int.from_bytes(await self._stream.receive(_LENGTH_BYTES), "big")
        if not TAG_BYTES < self._announced_bytes <= RECORD_BYTES + TAG_BYTES:
            self._break("a record has an invalid length")
        record = await self._stream.receive(self._announced_bytes)
        nonce = self._received.to_bytes(NONCE_BYTES, "big")
        try:
            self._opened += self._receiving.decrypt(nonce, record, None)
        except InvalidTag:
            self._break("a record cannot be decrypted")
        self._received += 1
        self._announced_bytes = None

    def _break(self, why: str) -> NoReturn:
        self._stream.close()
        raise PeerUnreachable(f"the stream with {self.peer_id} is not sealed correctly: {why}")
