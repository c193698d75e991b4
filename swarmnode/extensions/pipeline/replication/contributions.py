"""A replica's gradients of an iteration as bytes, and back; checked completely before they count.

StageWorker.take_gradients -> [contribute] -> replica_exchange.py -> [read_values] -> contribution_tally.py

What a replica sends follows from the stage's parameters: those that a micro-batch passed, in the order of
their names, as one vector of float32. Its head says which, and how many tokens are inside.
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

MAX_PARAMETERS = 8192
"""Bound of the tensors of a stage: 64 layers with 14 adapter matrices each are 896."""


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of a replica's contribution."""

    tokens: Count
    visits: Count
    present: Annotated[bytes, Meta(max_length=MAX_PARAMETERS // 8)]
    """One bit for each parameter, in the order of their names, lowest first: 1 if it has a gradient."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution that is sound by itself. contribution_tally.py compares it with those of the others."""

    head: Head
    data: bytearray
    digest: str
    """SHA-256 of head and bytes, by which replicas tell each other what they hold."""
    sum: GradientSum
    norm: float
    """Euclidean norm of the sum over all its parameters."""


def contribute(own: GradientSum, expected: ContributionBounds) -> Contribution:
    """Return our own contribution. Raises Rejected: not_finite, weight; ModelError for gradients that are not
    of this stage."""
    names = sorted(expected.shapes)
    for name, tensor in own.tensors.items():
        if tuple(tensor.shape) != expected.shapes.get(name):
            raise ModelError(f"a gradient {list(tensor.shape)} of {name} is none of this stage")
    held = [own.tensors[name].detach().reshape(-1) for name in names if name in own.tensors]
    flat = torch.cat(held).to("cpu", torch.float32) if held else torch.zeros(0)
    present = sum((name in own.tensors) << index for index, name in enumerate(names))
    head = Head(own.tokens, own.visits, present.to_bytes(-(-len(names) // 8), "little"))
    return read_values(head, bytearray(flat.numpy().tobytes()), expected)


def size_bytes(head: Head, expected: ContributionBounds) -> int:
    """Return the number of bytes that belong to a head, before anything is allocated. Raises Rejected:
    wrong_shape, weight."""
    if head.tokens > expected.max_tokens or head.visits > expected.max_visits:
        raise Rejected(ContributionFault.WEIGHT, f"{head.tokens} tokens in {head.visits} micro-batches")
    if not head.tokens and any(head.present):
        raise Rejected(ContributionFault.WEIGHT, "gradients of no token")
    return 4 * sum(_sizes(_names(head, expected), expected))


def most_bytes(expected: ContributionBounds) -> int:
    """Return the largest size of one contribution: every parameter."""
    return 4 * sum(_sizes(list(expected.shapes), expected))


def read_values(head: Head, data: bytearray, expected: ContributionBounds) -> Contribution:
    """Return the contribution of a head and its bytes. Raises Rejected: not_finite, and as `size_bytes`.

    Takes seconds for gigabytes.
    """
    if len(data) != size_bytes(head, expected):
        raise Rejected(ContributionFault.WRONG_SHAPE, f"{len(data)} bytes of gradients")
    names = _names(head, expected)
    flat = torch.frombuffer(data, dtype=torch.float32) if data else torch.zeros(0)
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
    if not math.isfinite(norm):
        raise Rejected(ContributionFault.NOT_FINITE)
    parts = zip(names, flat.split(_sizes(names, expected)) if names else [], strict=True)
    tensors = {name: part.view(expected.shapes[name]) for name, part in parts}
    digest = hashlib.sha256(encode(head))
    digest.update(data)
    return Contribution(head, data, digest.hexdigest(), GradientSum(tensors, head.tokens, head.visits), norm)


def fault_of(rejected: Rejected) -> ContributionFault:
    """Return the fault of a refusal. Reasons that have no fault of their own are malformed."""
    known = rejected.reason in set(ContributionFault)
    return ContributionFault(rejected.reason) if known else ContributionFault.MALFORMED


def _names(head: Head, expected: ContributionBounds) -> list[str]:
    names = sorted(expected.shapes)
    bits = int.from_bytes(head.present, "little")
    if len(head.present) != -(-len(names) // 8) or bits >> len(names):
        raise Rejected(ContributionFault.WRONG_SHAPE, f"this stage has {len(names)} parameters")
    return [name for index, name in enumerate(names) if bits >> index & 1]


def _sizes(names: Sequence[str], expected: ContributionBounds) -> list[int]:
    return [math.prod(expected.shapes[name]) for name in names]
