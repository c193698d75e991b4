"""Converts a replica's gradients of an iteration to bytes and back, and checks them completely.

StageWorker.take_gradients -> [contribute] -> replica_exchange.py -> [read_values] -> contribution_tally.py

The stage's parameters determine what a replica sends: the gradients of those that a micro-batch passed, in
the order of their names, as one float32 vector. Its head says which parameters these are, and the number of
tokens.
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
from swarmnode.extensions.pipeline.replication.gradient_exchange import ContributionBounds, ContributionFault
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum
from swarmnode.extensions.pipeline.wire.frames import encode
from swarmnode.extensions.pipeline.wire.hop_messages import Count
from swarmnode.extensions.pipeline.wire.refusals import Refusal

MAX_PARAMETERS = 8192
"""Limit on the tensors of a stage. For comparison: 64 layers with 14 adapter matrices each have 896."""


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of a replica's contribution."""

    tokens: Count
    visits: Count
    present: Annotated[bytes, Meta(max_length=MAX_PARAMETERS // 8)]
    """One bit for each parameter, in the order of their names, lowest first: 1 if it has a gradient."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution that is sound by itself. contribution_tally.py compares it with the others."""

    head: Head
    data: bytearray
    digest: str
    """SHA-256 of head and bytes. Replicas use it to tell each other what they hold."""
    sum: GradientSum
    norm: float
    """Euclidean norm of the sum over all its parameters."""


def contribute(own: GradientSum, bounds: ContributionBounds) -> Contribution:
    """Return our own contribution. Raises Rejected: not_finite, weight; ModelError for gradients that do not
    belong to this stage."""
    names = sorted(bounds.shapes)
    for name, tensor in own.tensors.items():
        if tuple(tensor.shape) != bounds.shapes.get(name):
            raise ModelError(f"a gradient {list(tensor.shape)} of {name} is none of this stage")
    held = [own.tensors[name].detach().reshape(-1) for name in names if name in own.tensors]
    flat = torch.cat(held).to("cpu", torch.float32) if held else torch.zeros(0)
    present = sum((name in own.tensors) << index for index, name in enumerate(names))
    head = Head(own.tokens, own.visits, present.to_bytes(-(-len(names) // 8), "little"))
    return read_values(head, bytearray(flat.numpy().tobytes()), bounds)


def size_bytes(head: Head, bounds: ContributionBounds) -> int:
    """Return the number of bytes that follow a head, before anything is allocated. Raises Rejected:
    wrong_shape, weight."""
    if head.tokens > bounds.max_tokens or head.visits > bounds.max_visits:
        raise Rejected(ContributionFault.WEIGHT, f"{head.tokens} tokens in {head.visits} micro-batches")
    if not head.tokens and any(head.present):
        raise Rejected(ContributionFault.WEIGHT, "gradients of no token")
    return 4 * sum(_sizes(_names(head, bounds), bounds))


def most_bytes(bounds: ContributionBounds) -> int:
    """Return the largest size of one contribution, with gradients of every parameter."""
    return 4 * sum(_sizes(list(bounds.shapes), bounds))


def read_values(head: Head, data: bytearray, bounds: ContributionBounds) -> Contribution:
    """Return the contribution of a head and its bytes. Raises Rejected: not_finite, and like `size_bytes`.

    Takes seconds for gigabytes.
    """
    if len(data) != size_bytes(head, bounds):
        raise Rejected(Refusal.WRONG_SHAPE, f"{len(data)} bytes of gradients")
    names = _names(head, bounds)
    flat = torch.frombuffer(data, dtype=torch.float32) if data else torch.zeros(0)
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
    if not math.isfinite(norm):
        raise Rejected(Refusal.NOT_FINITE)
    parts = zip(names, flat.split(_sizes(names, bounds)) if names else [], strict=True)
    tensors = {name: part.view(bounds.shapes[name]) for name, part in parts}
    digest = hashlib.sha256(encode(head))
    digest.update(data)
    return Contribution(head, data, digest.hexdigest(), GradientSum(tensors, head.tokens, head.visits), norm)


def _names(head: Head, bounds: ContributionBounds) -> list[str]:
    names = sorted(bounds.shapes)
    bits = int.from_bytes(head.present, "little")
    if len(head.present) != -(-len(names) // 8) or bits >> len(names):
        raise Rejected(Refusal.WRONG_SHAPE, f"this stage has {len(names)} parameters")
    return [name for index, name in enumerate(names) if bits >> index & 1]


def _sizes(names: Sequence[str], bounds: ContributionBounds) -> list[int]:
    return [math.prod(bounds.shapes[name]) for name in names]
