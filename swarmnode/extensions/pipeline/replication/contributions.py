"""A replica's gradients of an iteration as signed bytes, and back; checked completely before they count.

StageWorker.take_gradients -> [contribute] -> replica_exchange.py -> [open_head, read_values] ->
    contribution_tally.py

What a replica sends follows from the stage's parameters: those that a micro-batch passed, in the order of
their names, as one vector. Its head says which, how many tokens are inside and what digest the bytes have,
and is signed: nobody can speak for another replica, nor deny what it said to one of the others.

With a lossy codec the sender too sums what its bytes decode to, so all replicas sum the same numbers.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from swarmnode.errors import ModelError, Rejected
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    ContributionBounds,
    ContributionFault,
    StageIteration,
)
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum
from swarmnode.extensions.pipeline.wire.codec import INT8_BLOCK, decode, encode
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName, Count, Digest, TensorHeader
from swarmnode.identity.envelope import seal, unseal
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.streams import Buffer

CONTEXT = "swarmnode/1/pipeline-gradient"
MAX_PARAMETERS = 8192
"""Bound of the tensors of a stage: 64 layers with 14 adapter matrices each are 896."""

MAX_HEAD_BYTES = MAX_PARAMETERS // 8 + 1024
PIECE = 4 * 1024 * 1024
"""Elements that the codec takes at a time. Equal at all replicas, since blocks of int8 begin with each
piece."""


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """The signed description of a replica's contribution."""

    exchange: StageIteration
    tokens: Count
    visits: Count
    codec: CodecName
    present: Annotated[bytes, Meta(max_length=MAX_PARAMETERS // 8)]
    """One bit for each parameter, in the order of their names, lowest first: 1 if it has a gradient."""
    digest: Digest
    """SHA-256 of the contribution's bytes."""


@dataclass(frozen=True, slots=True)
class SignedHead:
    head: Head
    author: str
    payload: bytes
    """The head as it was signed. Two different payloads are two contributions."""
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution that is sound by itself. contribution_tally.py compares it with those of the others."""

    signed: SignedHead
    data: Buffer
    sum: GradientSum
    norm: float
    """Euclidean norm of the sum over all its parameters."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


def contribute(
    own: GradientSum,
    exchange: StageIteration,
    expected: ContributionBounds,
    key: NodeKey,
    *,
    codec: CodecName = "none",
) -> Contribution:
    """Return our own contribution. Raises Rejected: not_finite; ModelError for gradients that are not of this
    stage."""
    names = sorted(expected.shapes)
    for name, tensor in own.tensors.items():
        if tuple(tensor.shape) != expected.shapes.get(name):
            raise ModelError(f"a gradient {list(tensor.shape)} of {name} is none of this stage")
    held = [own.tensors[name].detach().reshape(-1) for name in names if name in own.tensors]
    flat = torch.cat(held).to("cpu", torch.float32) if held else torch.zeros(0)
    data = b"".join(bytes(encode(piece, codec).payload.data) for piece in flat.split(PIECE) if len(piece))
    head = Head(
        exchange=exchange,
        tokens=own.tokens,
        visits=own.visits,
        codec=codec,
        present=_bits([name in own.tensors for name in names]),
        digest=hashlib.sha256(data).hexdigest(),
    )
    payload = _encoder.encode(head)
    signed = SignedHead(head, key.peer_id, payload, seal(key, CONTEXT, payload))
    return read_values(signed, data, expected)


def open_head(
    sealed: bytes, exchange: StageIteration, *, among: Sequence[str], author: str | None = None
) -> SignedHead:
    """Return a head that one of these peers signed for this exchange. `author`: exactly this peer.

    Raises Rejected: bad_signature, malformed.
    """
    try:
        envelope = unseal(sealed, CONTEXT, max_bytes=MAX_HEAD_BYTES)
    except Rejected as rejected:
        raise Rejected(ContributionFault.BAD_SIGNATURE, str(rejected)) from rejected
    if envelope.author not in among or author not in (None, envelope.author):
        raise Rejected(ContributionFault.BAD_SIGNATURE, f"signed by {envelope.author}")
    try:
        head = _decoder.decode(envelope.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Rejected(ContributionFault.MALFORMED, str(error)) from error
    if head.exchange != exchange:
        raise Rejected(ContributionFault.MALFORMED, "signed for another iteration, stage or plan")
    return SignedHead(head, envelope.author, envelope.payload, bytes(sealed))


def size_bytes(head: Head, expected: ContributionBounds) -> int:
    """Return the number of bytes that belong to a head, before anything is allocated. Raises Rejected:
    wrong_shape, weight."""
    if head.tokens > expected.max_tokens or head.visits > expected.max_visits:
        raise Rejected(ContributionFault.WEIGHT, f"{head.tokens} tokens in {head.visits} micro-batches")
    if not head.tokens and any(head.present):
        raise Rejected(ContributionFault.WEIGHT, "gradients of no token")
    return sum(header.payload_bytes for header in _headers(head, _size(_names(head, expected), expected)))


def most_bytes(expected: ContributionBounds) -> int:
    """Return the largest size of one contribution: every parameter, in float32."""
    return 4 * _size(sorted(expected.shapes), expected)


def read_values(signed: SignedHead, data: Buffer, expected: ContributionBounds) -> Contribution:
    """Return the contribution behind a head. Raises Rejected: bad_digest, not_finite, malformed, and as
    `size_bytes`.

    Takes seconds for gigabytes.
    """
    head = signed.head
    if len(data) != size_bytes(head, expected) or hashlib.sha256(data).hexdigest() != head.digest:
        raise Rejected(ContributionFault.BAD_DIGEST, f"of {len(data)} bytes of {signed.author}")
    names = _names(head, expected)
    flat = torch.empty(_size(names, expected), dtype=torch.float32)
    # torch reads from what it could write to.
    view, start, first = memoryview(data if isinstance(data, bytearray) else bytearray(data)), 0, 0
    for header in _headers(head, len(flat)):
        end = start + header.payload_bytes
        flat[first : first + header.size] = decode(header, view[start:end])
        start, first = end, first + header.size
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
    if not math.isfinite(norm):
        raise Rejected(ContributionFault.NOT_FINITE)
    sizes = [math.prod(expected.shapes[name]) for name in names]
    parts = zip(names, flat.split(sizes) if names else [], strict=True)
    tensors = {name: part.view(expected.shapes[name]) for name, part in parts}
    return Contribution(signed, data, GradientSum(tensors, head.tokens, head.visits), norm)


def fault_of(rejected: Rejected) -> ContributionFault:
    """Return the fault of a refusal. Reasons of the codec and of envelopes that have no fault of their own
    are malformed."""
    return (
        ContributionFault(rejected.reason)
        if rejected.reason in set(ContributionFault)
        else ContributionFault.MALFORMED
    )


def _bits(flags: Sequence[bool]) -> bytes:
    return sum(flag << index for index, flag in enumerate(flags)).to_bytes(-(-len(flags) // 8), "little")


def _names(head: Head, expected: ContributionBounds) -> list[str]:
    names = sorted(expected.shapes)
    bits = int.from_bytes(head.present, "little")
    if len(head.present) != -(-len(names) // 8) or bits >> len(names):
        raise Rejected(ContributionFault.WRONG_SHAPE, f"this stage has {len(names)} parameters")
    return [name for index, name in enumerate(names) if bits >> index & 1]


def _size(names: Sequence[str], expected: ContributionBounds) -> int:
    return sum(math.prod(expected.shapes[name]) for name in names)


def _headers(head: Head, size: int) -> list[TensorHeader]:
    """Return the headers of the pieces that a vector of this size is sent in."""
    block = INT8_BLOCK if head.codec == "int8" else 0
    sizes = [min(PIECE, size - first) for first in range(0, size, PIECE)]
    return [
        TensorHeader(codec=head.codec, dtype="float32", shape=(elements,), block=block) for elements in sizes
    ]
