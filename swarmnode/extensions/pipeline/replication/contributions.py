"""A replica's gradients of an iteration as bytes, and back; checked completely before they count.

StageWorker.take_gradients -> [contribute] -> replica_exchange.py -> [read_values] -> contribution_tally.py

The gradients of those parameters that a micro-batch passed travel as a safetensors file. Its head says how
long it is, and how many tokens are inside.
"""

import math
from dataclasses import dataclass

import msgspec
import torch

from swarmnode.errors import ModelError, Rejected
from swarmnode.extensions.pipeline.replication.gradient_exchange import ContributionBounds, ContributionFault
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum
from swarmnode.extensions.pipeline.stages.packed_state import pack_state
from swarmnode.extensions.pipeline.wire.hop_messages import Count

NAME_BYTES = 512
"""Bound of what a safetensors file says of one parameter."""


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The description of a replica's contribution."""

    tokens: Count
    visits: Count
    size_bytes: Count


@dataclass(frozen=True, slots=True)
class Contribution:
    """A contribution that is sound by itself. contribution_tally.py compares it with those of the others."""

    head: Head
    data: bytes
    sum: GradientSum
    norm: float
    """Euclidean norm of the sum over all its parameters."""


def contribute(own: GradientSum, bounds: ContributionBounds) -> Contribution:
    """Return our own contribution. Raises Rejected: not_finite, weight; ModelError for gradients that are not
    of this stage."""
    for name, tensor in own.tensors.items():
        if tuple(tensor.shape) != bounds.shapes.get(name):
            raise ModelError(f"a gradient {list(tensor.shape)} of {name} is none of this stage")
    data = pack_state({name: tensor.to(torch.float32) for name, tensor in own.tensors.items()}).data
    return read_values(Head(own.tokens, own.visits, len(data)), data, bounds)


def size_bytes(head: Head, bounds: ContributionBounds) -> int:
    """Return the number of bytes that belong to a head, before anything is allocated. Raises Rejected:
    wrong_shape, weight."""
    if head.tokens > bounds.max_tokens or head.visits > bounds.max_visits:
        raise Rejected(ContributionFault.WEIGHT, f"{head.tokens} tokens in {head.visits} micro-batches")
    if head.size_bytes > most_bytes(bounds):
        raise Rejected(ContributionFault.WRONG_SHAPE, f"{head.size_bytes} bytes of gradients")
    return head.size_bytes


def most_bytes(bounds: ContributionBounds) -> int:
    """Return the largest size of one contribution: every parameter."""
    sizes = (4 * math.prod(shape) + NAME_BYTES for shape in bounds.shapes.values())
    return NAME_BYTES + sum(sizes)


def read_values(head: Head, data: bytes, bounds: ContributionBounds) -> Contribution:
    """Return the contribution of a head and its bytes. Raises Rejected: malformed, wrong_shape, not_finite,
    and as `size_bytes`.

    Takes seconds for gigabytes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    size_bytes(head, bounds)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise Rejected(ContributionFault.MALFORMED, str(error)) from error
    if tensors and not head.tokens:
        raise Rejected(ContributionFault.WEIGHT, "gradients of no token")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != bounds.shapes.get(name):
            raise Rejected(ContributionFault.WRONG_SHAPE, f"{tensor.dtype} {list(tensor.shape)}")
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in tensors.values()]
    norm = math.hypot(*norms)
    if not math.isfinite(norm):
        raise Rejected(ContributionFault.NOT_FINITE)
    return Contribution(head, data, GradientSum(tensors, head.tokens, head.visits), norm)


def fault_of(rejected: Rejected) -> ContributionFault:
    """Return the fault of a refusal. Reasons that have no fault of their own are malformed."""
    known = rejected.reason in set(ContributionFault)
    return ContributionFault(rejected.reason) if known else ContributionFault.MALFORMED
