"""Structs to bytes and back: msgpack, and zstd around bodies. Nothing is decoded before its size is bounded.

messages -> [codec] -> gossip, bodies

A body must be one zstd frame that states its size, with nothing behind it: the size is checked before a byte
is decompressed, so a bomb costs its author a ban and us a header parse.
"""

import hashlib

import msgspec
import zstandard

from swarmnode.errors import Rejected
from swarmnode.exchange.limits import MAX_BODY_BYTES, MAX_RAW_BODY_BYTES
from swarmnode.exchange.messages import Body, Header
from swarmnode.exchange.reasons import Reason

_COMPRESSION_LEVEL = 3
"""zstd's default: 0.1 ms for a group of 8 x 1000 characters; level 9 takes four times that for 3 % less."""

_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder = msgspec.msgpack.Decoder(Body)


def encode_header(header: Header) -> bytes:
    return _encoder.encode(header)


def decode_header(data: bytes) -> Header:
    """The header in an unsealed payload. Raises Rejected: malformed."""
    try:
        return _header_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(Reason.MALFORMED, str(error)) from error


def encode_body(body: Body) -> bytes:
    """Pack and compress an own body. Raises Rejected: too_large, malformed_body."""
    try:
        raw = _encoder.encode(body)
    except UnicodeEncodeError as error:
        raise Rejected(Reason.MALFORMED_BODY, "a completion is not valid Unicode") from error
    data = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(raw)
    if len(raw) > MAX_RAW_BODY_BYTES or len(data) > MAX_BODY_BYTES:
        raise Rejected(Reason.TOO_LARGE, f"{len(raw)} bytes, {len(data)} compressed")
    return data


def decode_body(data: bytes) -> Body:
    """Decompress and unpack a body. Raises Rejected: too_large, bad_compression, malformed_body."""
    if len(data) > MAX_BODY_BYTES:
        raise Rejected(Reason.TOO_LARGE, f"{len(data)} bytes, at most {MAX_BODY_BYTES}")
    try:
        return _body_decoder.decode(_decompress(data))
    except zstandard.ZstdError as error:
        raise Rejected(Reason.BAD_COMPRESSION, str(error)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(Reason.MALFORMED_BODY, str(error)) from error


def hash_body(data: bytes) -> bytes:
    """The name of a body: SHA-256 of its compressed bytes."""
    return hashlib.sha256(data).digest()


def fingerprint(body: Body) -> bytes:
    """The same for two bodies that hold the same texts for the same example, whoever signs them and however
    the answers are said to have ended: that is not believed, so it makes no new group of a copy."""
    texts = [answer.text for answer in body.answers]
    return hashlib.blake2b(_encoder.encode((body.key, texts)), digest_size=16).digest()


def _decompress(data: bytes) -> bytes:
    size = zstandard.get_frame_parameters(data).content_size
    if size == zstandard.CONTENTSIZE_UNKNOWN or size > MAX_RAW_BODY_BYTES:
        raise Rejected(Reason.BAD_COMPRESSION, f"the frame holds {size} bytes, at most {MAX_RAW_BODY_BYTES}")
    return zstandard.ZstdDecompressor().decompress(data, read_across_frames=False, allow_extra_data=False)
