"""The messages of an exchange: a header that names a group, a body with its answers, and both as bytes.

RolloutGroup -> [Header, Body] -> [encode] -> wire -> [decode] -> [Header, Body] -> validation -> RolloutGroup

A header is gossiped to everybody inside a signed envelope (identity/envelope.py), whose author is the group's
author. A body is fetched by the hash that its header names. Both are msgpack arrays on the wire: the topic
and the stream protocol carry the version, and any other shape is malformed. A field's type states its bounds.

If a task is an environment, an answer travels as the policy's text, turn by turn; the receiver plays the
episode again (episode_reader.py).

Nothing is decoded before its size is bounded. A body must be one zstd frame that states its size, with
nothing behind it: the size is checked before a byte is decompressed, so a bomb costs its author a ban and us
a header parse.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import zstandard
from msgspec import Meta

from swarmnode.errors import Rejected
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.limits import (
    MAX_BODY_BYTES,
    MAX_COMPLETION_CHARS,
    MAX_EPISODE_TURNS,
    MAX_GROUP_SIZE,
    MAX_NAME_CHARS,
    MAX_RAW_BODY_BYTES,
    MIN_GROUP_SIZE,
)
from swarmnode.identity.envelope import decoded
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS
from swarmnode.tasks.task import MAX_ABS_REWARD, MAX_INDEX, MAX_SEED
from swarmnode.types import ExampleKey, RolloutGroup

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]

Count = Annotated[int, Meta(ge=0, le=2**53)]

Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]

Index = Annotated[int, Meta(ge=0, lt=MAX_INDEX)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The announcement of one group. Everything in it is a claim of its author."""

    protocol: int
    swarm: Name
    body_hash: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 of the body as it travels, compressed: a wrong body is detected before it is decompressed."""
    body_bytes: Annotated[int, Meta(ge=1, le=MAX_BODY_BYTES)]
    """Its length; no more than this is ever read from a peer."""
    task: Name
    version: Name
    seed: Seed
    index: Index
    group_size: Annotated[int, Meta(ge=MIN_GROUP_SIZE, le=MAX_GROUP_SIZE)]
    reward_mean: Annotated[float, Meta(ge=-MAX_ABS_REWARD, le=MAX_ABS_REWARD)] | None
    """Mean reward by the author's judge; None: not scored. It helps to choose what to fetch and is never
    trained on."""
    reward_std: Annotated[float, Meta(ge=0, le=MAX_ABS_REWARD)] | None
    model_family: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    model_size: Count | None
    """Parameters of the author's model, adapter included."""
    policy_version: Count
    """Version of the author's policy; it cannot be compared with ours."""
    created_ms: Count
    """Milliseconds since the epoch by the author's clock."""

    @property
    def key(self) -> ExampleKey:
        return ExampleKey(self.task, self.version, self.seed, self.index)

    @property
    def created_s(self) -> float:
        return self.created_ms / 1000


Text = Annotated[str, Meta(max_length=MAX_COMPLETION_CHARS)]


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One completion, without token ids: the receiver has another tokenizer."""

    text: Text | Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_EPISODE_TURNS)]
    """The policy's text; its turns if the task is an environment. Observations do not travel: the receiver's
    own environment makes them."""
    finish: Literal["stop", "length"]
    """Completions that were cut off ("abort") are not answers and do not travel. Nobody can verify the other
    values, so they are not believed (body_check.py)."""


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The answers of one group. It names author and example, so that it fits no other header."""

    author: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]
    task: Name
    version: Name
    seed: Seed
    index: Index
    answers: Annotated[tuple[Answer, ...], Meta(min_length=MIN_GROUP_SIZE, max_length=MAX_GROUP_SIZE)]

    @property
    def key(self) -> ExampleKey:
        return ExampleKey(self.task, self.version, self.seed, self.index)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The time and version at which something came in, by our own clock and policy: those of authors are not
    comparable."""

    at: float
    policy_version: int


@dataclass(frozen=True, slots=True)
class Given:
    """A group of another policy of this process, which need not be fetched or doubted."""

    body: bytes
    """The encoded body, for strangers who ask."""
    group: RolloutGroup
    """The group in the form in which other authors' groups are trained on."""
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Announcement:
    """A header whose signature and bounds have been checked."""

    author: str
    header: Header
    sealed: bytes
    """The envelope as it came."""
    arrival: Arrival
    given: Given | None = None
    """The announced group, if it comes from a policy of this process. None: it must be fetched and judged."""


_COMPRESSION_LEVEL = 3
"""zstd's default: 0.1 ms for a group of 8 x 1000 characters; level 9 takes four times that for 3 % less."""

_encoder = msgspec.msgpack.Encoder()

_header_decoder = msgspec.msgpack.Decoder(Header)

_body_decoder = msgspec.msgpack.Decoder(Body)


def encode_header(header: Header) -> bytes:
    return _encoder.encode(header)


def decode_header(data: bytes) -> Header:
    """Returns the header in an unsealed payload. Raises Rejected: malformed."""
    return decoded(_header_decoder, data)


def encode_body(body: Body) -> bytes:
    """Packs and compresses a body of ours. Raises Rejected: too_large, malformed_body."""
    try:
        raw = _encoder.encode(body)
    except UnicodeEncodeError as error:
        raise Rejected(Reason.MALFORMED_BODY, "a completion is not valid Unicode") from error
    data = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(raw)
    if len(raw) > MAX_RAW_BODY_BYTES or len(data) > MAX_BODY_BYTES:
        raise Rejected(Reason.TOO_LARGE, f"{len(raw)} bytes, {len(data)} compressed")
    return data


def decode_body(data: bytes) -> Body:
    """Decompresses and unpacks a body. Raises Rejected: too_large, bad_compression, malformed_body."""
    if len(data) > MAX_BODY_BYTES:
        raise Rejected(Reason.TOO_LARGE, f"{len(data)} bytes, at most {MAX_BODY_BYTES}")
    try:
        return decoded(_body_decoder, _decompress(data), Reason.MALFORMED_BODY)
    except zstandard.ZstdError as error:
        raise Rejected(Reason.BAD_COMPRESSION, str(error)) from error


def hash_body(data: bytes) -> bytes:
    """Returns the name of a body: the SHA-256 of its compressed bytes."""
    return hashlib.sha256(data).digest()


def fingerprint(body: Body) -> bytes:
    """Returns a digest that is equal for bodies with the same texts for the same example, regardless of
    author and `finish`. The latter is not believed, so changing it must not turn a copy into a new group."""
    texts = [answer.text for answer in body.answers]
    return hashlib.blake2b(_encoder.encode((body.key, texts)), digest_size=16).digest()


def _decompress(data: bytes) -> bytes:
    size = zstandard.get_frame_parameters(data).content_size
    if size == zstandard.CONTENTSIZE_UNKNOWN or size > MAX_RAW_BODY_BYTES:
        raise Rejected(Reason.BAD_COMPRESSION, f"the frame holds {size} bytes, at most {MAX_RAW_BODY_BYTES}")
    return zstandard.ZstdDecompressor().decompress(data, read_across_frames=False, allow_extra_data=False)
