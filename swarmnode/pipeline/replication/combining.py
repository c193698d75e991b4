"""What a stage's replicas must agree on before and after an optimizer step: the seam to averaging.py.

member (GradientSum of its own) -> [GradientExchange.combine] -> Combined -> StageWorker.apply
member (digest of its weights) -> [GradientExchange.compare] -> ReplicaVote (agreement.py) -> aligning.py
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from swarmnode.pipeline.replication.agreement import ReplicaVote
from swarmnode.pipeline.stages.micro_batches import GradientSum
from swarmnode.pipeline.wire.messages import CodecName


class ContributionFault(StrEnum):
    """Why a replica's gradients are not in the sum."""

    SILENT = "silent"
    """Dead, frozen, or too late for the deadline."""
    MALFORMED = "malformed"
    BAD_SIGNATURE = "bad_signature"
    BAD_DIGEST = "bad_digest"
    """Its bytes are not those that it signed for."""
    WRONG_SHAPE = "wrong_shape"
    WEIGHT = "weight"
    """More tokens or micro-batches than the plan gives it."""
    NOT_FINITE = "not_finite"
    NORM = "norm"
    EQUIVOCATION = "equivocation"
    """It signed two different contributions to one iteration."""
    LATE = "late"
    """Ours: the others had closed without it."""


@dataclass(frozen=True, slots=True)
class ContributionBounds:
    """What a replica may contribute at most; the same for all replicas of a stage under a plan."""

    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the stage's parameters, by global name: what a replica sends, and in which order,
    follows."""
    max_tokens: int
    """Learned from by one replica in one iteration: the agents that visit it x waves x most of one."""
    max_visits: int
    """Micro-batches of one replica in one iteration; those that it takes for a lost one included."""

    @classmethod
    def of(
        cls, parameters: Mapping[str, Tensor], *, max_tokens: int, max_visits: int
    ) -> "ContributionBounds":
        """`parameters`: `StageModel.trainable()`."""
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        return cls(shapes, max_tokens, max_visits)


@dataclass(frozen=True, slots=True)
class Combined:
    """The gradients of a stage's iteration."""

    sum: GradientSum
    """The summed gradients of the contributors; bitwise the same at each replica that has the same
    contributors."""
    contributors: tuple[str, ...]
    """Peer ids, sorted. One's own may be missing."""
    rejected: Mapping[str, ContributionFault]
    """The other replicas, and why."""
    agreed: bool = True
    """Whether all replicas that answer said that they sum the same. False: `compare` will find out."""


@dataclass(frozen=True, slots=True)
class AveragingSettings:
    codec: CodecName = "none"
    """Compression of the gradients on their way. fp16 halves the bytes; sums beyond 65504 are clamped to
    it."""
    max_norm_ratio: float = 16.0
    """A replica's gradient a token may be so many times the (lower) median of the replicas' norms. Means over
    few micro-batches of unequal size differ by single digits."""
    contribution_timeout_s: float = 30.0
    """How long a replica may be behind another with its iteration, and a fetch may take besides its bytes."""
    round_timeout_s: float = 10.0
    """One answer without gradients."""
    least_bytes_per_s: float = 250_000.0
    """A line that is slower (2 Mbit/s) costs its replica the contribution."""


@dataclass(slots=True)
class ExchangeCounters:
    """What averaging did since the start."""

    combined: int = 0
    rejected: Counter[ContributionFault] = field(default_factory=Counter[ContributionFault])
    stragglers: int = 0
    """Replicas that asked after an exchange was closed without them."""
    disagreements: int = 0
    """Exchanges that ended with replicas that hold different sets."""


@dataclass(frozen=True, slots=True)
class StageIteration:
    """Which iteration of which stage it is about."""

    plan: str
    """Its digest."""
    stage: int
    iteration: int


class GradientExchange(Protocol):
    """Averages gradients among the replicas of one stage. `replicas` are peer ids, one's own among them."""

    async def combine(
        self,
        own: GradientSum,
        exchange: StageIteration,
        replicas: Sequence[str],
        expected: ContributionBounds,
    ) -> Combined:
        """The sum over all replicas whose contribution is sound. Bounded in time whatever they do."""
        ...

    async def compare(
        self, digest: str, exchange: StageIteration, replicas: Sequence[str], *, before: str = ""
    ) -> ReplicaVote:
        """`digest`: of the state after the step. `before`: of the one that we can go back to; empty where we
        do not know that the pipeline was there."""
        ...


class Alone:
    """The exchange of a stage without replicas."""

    async def combine(
        self,
        own: GradientSum,
        exchange: StageIteration,
        replicas: Sequence[str],
        expected: ContributionBounds,
    ) -> Combined:
        return Combined(own, tuple(replicas[:1]), {})

    async def compare(
        self, digest: str, exchange: StageIteration, replicas: Sequence[str], *, before: str = ""
    ) -> ReplicaVote:
        return ReplicaVote(agrees=True, digest=digest)
