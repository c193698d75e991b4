"""What the members of a pipeline tell each other: one record a message, bounded before anything is allocated.

stage, driver -> [messages] -> transport.py -> wire -> transport.py -> [messages] -> stage, driver

A message is one byte of version and a msgpack array. It names the plan it belongs to, its work (`id`), the
`attempt` and how long it is of use (`deadline_s`, counted from its arrival: clocks differ). The same work
sent again has the same id and a higher attempt, so that a receiver can count it once whatever happens.
Activations and gradients follow their message as raw bytes, described by its `TensorHeader` (codec.py).
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.errors import Rejected

VERSION = 1
"""First byte of every message. Others are ignored, so that newer members may say more."""

MAX_MESSAGE_BYTES = 16 * 1024
"""A message without its tensor. MAX_SEQUENCES lengths of three bytes are most of it."""

MAX_TENSOR_BYTES = 64 * 1024 * 1024
"""A tensor once decoded: 8 samples x 1024 tokens x width 2048 in float32."""

MAX_DIM = 1 << 22
MAX_NODES = 1024
MAX_PATH = 64
"""Stages that one micro-batch visits; no model we train has more layers than this."""

MAX_SEQUENCES = 2048
"""Packed sequences in one micro-batch."""

MAX_DEADLINE_S = 3600.0
MAX_ATTEMPTS = 64
"""Attempts at one message. Who failed so often is not going to succeed."""

MAX_INT8_BLOCK = 4096

CHUNK_BYTES = 256 * 1024
"""A payload travels in pieces of this size, each followed by its checksum. Smaller ones cost more CPU a byte,
larger ones are noticed to be damaged or late only later."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Index = Annotated[int, Meta(ge=0, lt=MAX_NODES)]
Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Dtype = Literal["float32", "bfloat16", "float16"]
CodecName = Literal["none", "fp16", "int8"]


class Refusal(StrEnum):
    """Why a message was not taken. Values never come from the wire, so their number is bounded."""

    NOT_A_MEMBER = "not_a_member"
    TOO_MANY_STREAMS = "too_many_streams"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    MALFORMED = "malformed"
    OTHER_VERSION = "other_version"
    UNKNOWN_PLAN = "unknown_plan"
    WRONG_ROUTE = "wrong_route"
    WRONG_SHAPE = "wrong_shape"
    BAD_CHECKSUM = "bad_checksum"
    NOT_FINITE = "not_finite"
    NO_MEMORY = "no_memory"
    """Its bytes would have had to wait here for longer than it is of use."""
    NO_SLOT = "no_slot"
    """The stage holds as many micro-batches as it may."""
    UNKNOWN_WORK = "unknown_work"
    """A gradient for something never sent, or an answer too late."""
    INTERRUPTED = "interrupted"
    """The stream ended, or we are leaving."""
    INTERNAL = "internal"


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """How the bytes behind a message become a tensor. Consistent and within bounds as soon as it exists."""

    codec: CodecName
    dtype: Dtype
    """Of the tensor that was encoded and of the one decoded."""
    shape: Annotated[tuple[Dim, ...], Meta(min_length=1, max_length=3)]
    block: Annotated[int, Meta(ge=0, le=MAX_INT8_BLOCK)] = 0
    """Elements that share a scale, for int8; 0 for the others."""
    checksum: Annotated[int, Meta(ge=0, lt=2**32)]
    """CRC-32 of the payload. The stream is authenticated already; this finds broken memory and our own
    mistakes, and of all checksums in the standard library it costs least (3 GB/s; BLAKE2b 0.6)."""

    def __post_init__(self) -> None:
        if self.size * _ITEM_BYTES[self.dtype] > MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor {self.shape} of {self.dtype} exceeds {MAX_TENSOR_BYTES} bytes")
        if (self.block > 0) != (self.codec == "int8"):
            raise ValueError("a block belongs to int8, and to nothing else")

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def block_count(self) -> int:
        return -(-self.size // self.block)

    @property
    def payload_bytes(self) -> int:
        """What travels, so that nobody has to claim it."""
        if self.codec == "int8":
            return 4 * self.block_count + self.size
        return self.size * (2 if self.codec == "fp16" else _ITEM_BYTES[self.dtype])


class MessageId(NamedTuple):
    """The work that a message carries or speaks of. The same for every attempt at it."""

    kind: str
    plan: str
    iteration: int
    subject: int
    """The micro-batch, or the stage."""
    position: int


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    plan: Digest
    iteration: Count
    attempt: Annotated[int, Meta(ge=0, lt=MAX_ATTEMPTS)] = 0
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)]


class _Hop(_Message, frozen=True, kw_only=True):
    micro_batch: Count
    """Unique within its plan and iteration; given by the data node, the same on the whole way."""
    agent: Count
    """The slot of the data node that started it."""
    wave: Count
    path: Annotated[tuple[Index, ...], Meta(min_length=2, max_length=MAX_PATH)]
    """Nodes in order of visit, the data node first: the way really taken, which may differ from the plan's
    once a member was replaced or left out."""
    position: Annotated[int, Meta(ge=0, le=MAX_PATH)]
    tensor: TensorHeader

    def __post_init__(self) -> None:
        if not self._first_position() <= self.position <= self._last_position():
            raise ValueError(f"position {self.position} is not on a path of {len(self.path)} nodes")
        if len(set(self.path)) < len(self.path):
            raise ValueError("a path visits a node twice")

    def _first_position(self) -> int:
        return 0

    def _last_position(self) -> int:
        return len(self.path) - 1

    @property
    def id(self) -> MessageId:
        return MessageId(type(self).__name__, self.plan, self.iteration, self.micro_batch, self.position)


class Forward(_Hop, frozen=True, kw_only=True, tag="forward"):
    """A micro-batch's hidden states, for the node at `position` of its path; behind its end the data node
    gets them back for the loss."""

    lengths: Annotated[tuple[Dim, ...], Meta(max_length=MAX_SEQUENCES)] = ()
    """Tokens of each packed sequence, in order; empty: each row is one sequence."""

    def _first_position(self) -> int:
        return 1

    def _last_position(self) -> int:
        return len(self.path)

    @property
    def source(self) -> int:
        """The node that has to send this."""
        return self.path[self.position - 1]

    @property
    def target(self) -> int:
        return self.path[self.position % len(self.path)]


class Backward(_Hop, frozen=True, kw_only=True, tag="backward"):
    """The gradient of the loss by what the node at `position` handed on."""

    @property
    def source(self) -> int:
        """The node that has to send this: the next on the path, the data node for the last."""
        return self.path[(self.position + 1) % len(self.path)]

    @property
    def target(self) -> int:
        return self.path[self.position]


class Abandoned(_Message, frozen=True, kw_only=True, tag="abandoned"):
    """A micro-batch is given up by its data node: whatever is kept for it may go."""

    micro_batch: Count

    @property
    def id(self) -> MessageId:
        return MessageId("Abandoned", self.plan, self.iteration, self.micro_batch, 0)


class _StageReport(_Message, frozen=True, kw_only=True):
    stage: Annotated[int, Meta(ge=0, lt=MAX_PATH)]
    tokens: Count
    """Trained on in this iteration."""
    visits: Count
    """Micro-batches whose gradient is in. A stage's gradient is weighted by them."""
    digest: Digest

    @property
    def id(self) -> MessageId:
        return MessageId(type(self).__name__, self.plan, self.iteration, self.stage, 0)


class StepReady(_StageReport, frozen=True, kw_only=True, tag="ready"):
    """A member has its share of an iteration's gradients; `digest` is that of the weights it steps from."""


class StepDone(_StageReport, frozen=True, kw_only=True, tag="stepped"):
    """A member made its optimizer step; `digest` is that of the weights it came to. Replicas must agree."""


Message = Forward | Backward | Abandoned | StepReady | StepDone


class Done(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="done"):
    """The answer to a message that was taken, now or before: it need not be sent again."""


class Refused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="refused"):
    """The answer to a message that was not taken, and will not be."""

    reason: Refusal


Reply = Done | Refused


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A reply as it travels."""

    reply: Reply
    keep: bool
    """The stream may carry the next message. False: bytes of this one are unread, so it ends here."""


MAX_ANSWER_BYTES = 64


@dataclass(frozen=True, slots=True)
class Roster:
    """Who runs a plan: the peer of each node, in the order of its instance, and which of them we are."""

    plan: str
    """The plan's digest (plan.py)."""
    peers: tuple[str, ...]
    own: int


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes behind a message, and the CRC-32 of everything up to the end of each chunk.

    Taken once where the bytes are made: every attempt at sending them reuses the sums.
    """

    data: memoryview
    checksums: tuple[int, ...]

    @property
    def checksum(self) -> int:
        """Of all of it, for the header."""
        return self.checksums[-1] if self.checksums else 0


def as_payload(data: bytes | bytearray | memoryview) -> Payload:
    """Bytes ready to be sent. Nothing is copied: they must not change until the message is answered."""
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
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def encode_message(message: Message | Answer) -> bytes:
    """A message or an answer, version first."""
    return bytes([VERSION]) + _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """A message within every bound. Raises Rejected: too_large, other_version, malformed."""
    return _decode(_message_decoder, data, MAX_MESSAGE_BYTES)


def decode_answer(data: bytes) -> Answer:
    """An answer. Raises Rejected: too_large, other_version, malformed."""
    return _decode(_answer_decoder, data, MAX_ANSWER_BYTES)


def payload_bytes(message: Message) -> int:
    """What follows a message."""
    return message.tensor.payload_bytes if isinstance(message, Forward | Backward) else 0


def check_sender(message: Message, peer_id: str, rosters: Mapping[str, Roster]) -> None:
    """Whether this peer may say this to us. Raises Rejected: unknown_plan, not_a_member, wrong_route.

    A hop must come from the node before us on its own path, so a member cannot speak for another one.
    """
    roster = rosters.get(message.plan)
    if roster is None:
        raise Rejected(Refusal.UNKNOWN_PLAN)
    if peer_id not in roster.peers:
        raise Rejected(Refusal.NOT_A_MEMBER)
    if not isinstance(message, Forward | Backward):
        return
    if max(message.path) >= len(roster.peers):
        raise Rejected(Refusal.WRONG_ROUTE, "a node that the plan does not have")
    if message.target != roster.own or roster.peers[message.source] != peer_id:
        raise Rejected(Refusal.WRONG_ROUTE, f"from node {message.source} to node {message.target}")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes, max_bytes: int) -> _T:
    if len(data) > max_bytes:
        raise Rejected(Refusal.TOO_LARGE, f"{len(data)} bytes, at most {max_bytes}")
    if data[:1] != bytes([VERSION]):
        raise Rejected(Refusal.OTHER_VERSION if data else Refusal.MALFORMED)
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(Refusal.MALFORMED, str(error)) from error
