"""The interface with which replicas of a stage agree before and after a step (see replica_exchange.py).

member (GradientSum of its own) -> [GradientExchange.combine] -> Combined -> StageWorker.apply
member (digest of its weights) -> [GradientExchange.compare] -> ReplicaVote (replica_vote.py) -> alignment.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta
from torch import Tensor

from swarmnode.extensions.pipeline.replication.replica_vote import ReplicaVote
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum
from swarmnode.extensions.pipeline.wire.hop_messages import MAX_PATH, Count, Digest


class ContributionFault(StrEnum):
    """Reason why a replica's gradients are not in the sum, in addition to those of a bad answer
    (`Refusal`)."""

    SILENT = "silent"
    """Dead, frozen, or too late for the deadline."""
    WEIGHT = "weight"
    """More tokens or micro-batches than the plan allows."""
    NORM = "norm"
    LATE = "late"
    """Most other replicas do not hold it, or hold a different one."""


@dataclass(frozen=True, slots=True)
class ContributionBounds:
    """Bounds of one replica's contribution, equal for all replicas of a stage under a plan."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the stage's parameters, by global name. They determine the size and order of a
    contribution."""
    max_tokens: int
    """Most tokens that one replica can learn from in one iteration: visiting agents x waves x largest
    micro-batch."""
    max_visits: int
    """Most micro-batches of one replica in one iteration, including those taken over from a lost replica."""

    @classmethod
    def of(
        cls, parameters: Mapping[str, Tensor], *, max_tokens: int, max_visits: int
    ) -> "ContributionBounds":
        """Return the bounds for these parameters. `parameters`: `StageModel.trainable()`."""
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        return cls(shapes, max_tokens, max_visits)


@dataclass(frozen=True, slots=True)
class Combined:
    """The combined gradients of a stage in one iteration."""

    sum: GradientSum
    """Sum of the contributors' gradients, bitwise equal at every replica with the same contributors."""
    contributors: tuple[str, ...]
    """Peer ids of the contributors, sorted. Our own may be missing."""
    rejected: Mapping[str, str]
    """Replicas that did not contribute, with the reason."""


@dataclass(frozen=True, slots=True)
class GradientExchangeSettings:
    max_norm_ratio: float = 16.0
    """Largest ratio of a replica's gradient norm per token to the (lower) median of all replicas. Means over
    few micro-batches of unequal size differ by single-digit factors."""
    contribution_timeout_s: float = 30.0
    """Time by which a replica may be behind another one in an iteration, and time that a fetch may take in
    addition to the transfer of its bytes."""
    round_timeout_s: float = 10.0
    """Time limit of one answer without gradients."""
    least_bytes_per_s: float = 250_000.0
    """Slowest line (2 Mbit/s) over which a contribution is fetched."""


class StageIteration(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One iteration of one stage under one plan."""

    plan: Digest
    """Digest of the plan."""
    stage: Annotated[int, Meta(ge=0, lt=MAX_PATH)]
    iteration: Count


class GradientExchange(Protocol):
    """Averages gradients among the replicas of one stage. `replicas` are peer ids, including our own."""

    async def combine(
        self,
        own: GradientSum,
        stage_iteration: StageIteration,
        replicas: Sequence[str],
        bounds: ContributionBounds,
    ) -> Combined:
        """Return the sum over all replicas with a sound contribution. Ends in time whatever they do."""
        ...

    async def compare(
        self, digest: str, stage_iteration: StageIteration, replicas: Sequence[str], *, before: str = ""
    ) -> ReplicaVote:
        """Compare the state after the step with the other replicas.

        `digest`: of the state after the step. `before`: digest of the state that we can go back to, or empty
        if we do not know that the pipeline was at that state.
        """
        ...
