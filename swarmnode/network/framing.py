"""Frames on a stream: an unsigned varint length, then that many bytes, as libp2p frames its own protocols.

rpc.py, control_client.py -> [encode_frame, read_frame] -> bytes of a stream

Any libp2p implementation can speak to us. The length is checked against a bound before a byte of the body is
read.
"""

import asyncio

from swarmnode.errors import MessageTooLarge, NetworkError

MAX_UVARINT_BYTES = 5
"""Longest length prefix. It allows lengths up to 2^35 - 1, far above any bound of ours, and a peer cannot
make us read more."""


def encode_uvarint(value: int) -> bytes:
    """Returns a number in little-endian base 128, as protobuf and multiformats write it.

    >>> encode_uvarint(300).hex()
    'ac02'
    """
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_uvarint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """Returns the value at `offset` and the offset behind it. Raises NetworkError when it is cut off or
    overlong.

    >>> decode_uvarint(bytes.fromhex("ac02"))
    (300, 2)
    """
    value = 0
    for position, byte in enumerate(data[offset : offset + MAX_UVARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, offset + position + 1
    raise NetworkError("a varint is cut off or overlong")


def protobuf_fields(message: bytes) -> dict[int, int | bytes]:
    """Returns the fields of a protobuf message made of numbers and bytes; a repeated field has its last
    value. Raises NetworkError."""
    fields: dict[int, int | bytes] = {}
    at = 0
    while at < len(message):
        tag, at = decode_uvarint(message, at)
        value, at = decode_uvarint(message, at)
        if tag & 7 == 0:
            fields[tag >> 3] = value
            continue
        if tag & 7 != 2 or at + value > len(message):
            raise NetworkError("a protobuf message is malformed")
        fields[tag >> 3] = message[at : at + value]
        at += value
    return fields


def encode_frame(body: bytes) -> bytes:
    """Returns a body with its length in front."""
    return encode_uvarint(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Returns the next body. Raises MessageTooLarge before reading a body over `max_bytes`, and
    asyncio.IncompleteReadError if the stream ends inside a frame."""
    prefix = bytearray()
    while not prefix or prefix[-1] >= 0x80:
        if len(prefix) == MAX_UVARINT_BYTES:
            raise MessageTooLarge(f"a frame claims more than 2^{7 * MAX_UVARINT_BYTES} bytes")
        prefix += await reader.readexactly(1)
    size_bytes, _ = decode_uvarint(bytes(prefix))
    if size_bytes > max_bytes:
        raise MessageTooLarge(f"a frame of {size_bytes} bytes exceeds the bound of {max_bytes} bytes")
    return await reader.readexactly(size_bytes)
