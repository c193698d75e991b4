"""Messages and answers as bytes on the wire.

services.py -> [frames] -> member_streams.py, incoming_streams.py

    frame     version | service | milliseconds for which it is of use | length | msgpack array
    payload   the bytes as they are: the streams of the network are authenticated

The prefix is the same in all versions of the wire, so that members of different versions can recognise each
other. Decoding either returns a record within every bound of its service or refuses, before anything is
allocated for the sizes in the record.
"""

import math
import struct
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.refusals import Refusal, Refused
from swarmnode.identity.envelope import decoded
from swarmnode.network.streams import ByteStream

VERSION = 6
"""Version of the wire: of everything that members send to each other, including their presences."""

CHUNK_BYTES = 256 * 1024
"""Size of the pieces in which a payload is sent. Smaller ones cost more CPU per byte; with larger ones,
delays are noticed later."""

_PREFIX = struct.Struct(">BBII")

_T = TypeVar("_T")


class Prefix(NamedTuple):
    """The first bytes of a frame."""

    service: int
    timeout_s: float
    length: int


class AnswerFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """An answer as it is sent, and what happens to the stream afterwards."""

    refused: Refused | None = None
    keep: bool
    """True if the stream may carry the next message. False if bytes of this message are unread, so that the
    stream ends here."""
    body_bytes: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Number of bytes that follow. The asker compares it with the expected number."""
    content: msgspec.Raw = msgspec.Raw(b"\xc0")
    """The answer of the service."""


encode = msgspec.msgpack.Encoder(order="deterministic").encode
"""Encodes a record. Equal records give equal bytes."""


def decode(kind: type[_T], data: Any) -> _T:
    """Decode a record of this type or union. Raises Rejected: malformed."""
    return decoded(_decoder(kind), data, Refusal.MALFORMED)


def framed(service: int, body: bytes, timeout_s: float = 0.0) -> bytes:
    """Return the frame of an encoded message or answer."""
    return _PREFIX.pack(VERSION, service, math.ceil(timeout_s * 1000), len(body)) + body


async def receive_prefix(stream: ByteStream) -> Prefix:
    """Return the prefix of the next frame. Raises PeerUnreachable, Rejected: other_version."""
    version, service, milliseconds, length = _PREFIX.unpack(await stream.receive(_PREFIX.size))
    check_version(version)
    return Prefix(service, milliseconds / 1000, length)


def check_version(version: int) -> None:
    """Raises Rejected: other_version, with advice for people."""
    if version != VERSION:
        raise Rejected(
            Refusal.OTHER_VERSION,
            f"version {version} of the pipeline's wire meets version {VERSION}: install the same swarmnode "
            "on all members",
        )


def check_length(length: int, max_bytes: int) -> None:
    """Raises Rejected: too_large."""
    if length > max_bytes:
        raise Rejected(Refusal.TOO_LARGE, f"a frame of {length} bytes, at most {max_bytes}")


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
