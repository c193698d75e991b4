"""Messages and payloads as the bytes that are sent.

hop_messages.py, codec.py -> [wire] -> transport.py, inbound.py

The first byte is the version, so that newer members may say more; a msgpack array follows. Decoding makes a
record within every bound of hop_messages.py or refuses, before anything is allocated for what it announces.
"""

import zlib
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.hop_messages import (
    CHUNK_BYTES,
    MAX_ANSWER_BYTES,
    MAX_MESSAGE_BYTES,
    VERSION,
    Hop,
    Message,
    Refusal,
    ReplyFrame,
)


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes behind a message, and the CRC-32 of everything up to the end of each chunk.

    Computed once where the bytes are made: every attempt at sending them reuses the sums.
    """

    data: memoryview
    checksums: tuple[int, ...]

    @property
    def checksum(self) -> int:
        """CRC-32 of the whole payload, for the header."""
        return self.checksums[-1] if self.checksums else 0


def as_payload(data: bytes | bytearray | memoryview) -> Payload:
    """Return bytes ready to be sent. Nothing is copied: they must not change until the message is
    answered."""
    content = memoryview(data).cast("B")
    sums: list[int] = []
    running = 0
    for start in range(0, len(content), CHUNK_BYTES):
        running = zlib.crc32(content[start : start + CHUNK_BYTES], running)
        sums.append(running)
    return Payload(content, tuple(sums))


NO_PAYLOAD = as_payload(b"")

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_message_decoder = msgspec.msgpack.Decoder(Message)
_answer_decoder = msgspec.msgpack.Decoder(ReplyFrame)


def encode_message(message: Message | ReplyFrame) -> bytes:
    """Encode a message or an answer, version first."""
    return bytes([VERSION]) + _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Decode a message within every bound. Raises Rejected: too_large, other_version, malformed."""
    return _decode(_message_decoder, data, MAX_MESSAGE_BYTES)


def decode_answer(data: bytes) -> ReplyFrame:
    """Decode an answer. Raises Rejected: too_large, other_version, malformed."""
    return _decode(_answer_decoder, data, MAX_ANSWER_BYTES)


def payload_bytes(message: Message) -> int:
    """Return the number of bytes that follow a message."""
    return message.tensor.payload_bytes if isinstance(message, Hop) else 0


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes, max_bytes: int) -> _T:
    if len(data) > max_bytes:
        raise Rejected(Refusal.TOO_LARGE, f"{len(data)} bytes, at most {max_bytes}")
    if data[:1] != bytes([VERSION]):
        raise Rejected(Refusal.OTHER_VERSION if data else Refusal.MALFORMED)
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(Refusal.MALFORMED, str(error)) from error
