"""What a member of a pipeline is given to work with, and what it tells of an iteration.

membership.py -> [Assignment] -> member.py (relay.py, driver.py, step_barrier.py) -> [IterationReport] -> node
sources.py, rollout_feed.py -> [Feed] -> driver.py
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from swarmnode.pipeline.plans.plan import Plan
from swarmnode.pipeline.stages.micro_batches import StagePath
from swarmnode.pipeline.stages.objectives import LossInputs, Objective
from swarmnode.pipeline.wire.messages import CodecName


@dataclass(frozen=True, slots=True)
class Assignment:
    """A member's position in a plan, from an iteration on."""

    plan: Plan
    digest: str
    """The plan's (plan.digest)."""
    peers: tuple[str, ...]
    """The peer id of each node of the plan's instance."""
    own: int
    """Our node."""
    iteration: int
    """The first one that runs under this plan: optimizer steps taken before."""

    @property
    def stage(self) -> int:
        return self.plan.instance.stage_of[self.own]

    @property
    def replicas(self) -> tuple[str, ...]:
        """The peers of our stage, ourselves among them."""
        return tuple(self.peers[node] for node in self.plan.instance.stages[self.stage])

    @property
    def data_nodes(self) -> frozenset[int]:
        """Those that start micro-batches under this plan."""
        return frozenset(path[0] for path in self.plan.paths)


CLOSE_TIMEOUT_S = 60.0
"""Longest wait for others at the end of an iteration; who comes later is left out of it."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """How a member treats the others. All times are real seconds."""

    activations: CodecName = "fp16"
    """How hidden states are encoded (codec.py)."""
    gradients: CodecName = "fp16"
    """How their gradients are encoded."""
    max_norm: float = 1.0
    """Gradients of a stage are clipped to this norm."""
    hop_timeout_s: float = 10.0
    """A neighbour has taken a message by then, besides `slack` times what the plan says that it takes."""
    reconnect_s: float = 1.0
    """A peer that cannot be reached is tried again for so long."""
    slack: float = 3.0
    """What the plan predicts may take so many times as long."""
    grace_s: float = 5.0
    """And a micro-batch so much longer, before its path is repaired."""
    max_attempts: int = 8
    """A micro-batch is given up after so many attempts."""
    close_timeout_s: float = CLOSE_TIMEOUT_S
    """How long each exchange among the replicas may take at the end of an iteration."""


class Feed(Protocol):
    """What a data node trains on in one iteration."""

    def take(self, agent: int, wave: int, path: StagePath) -> LossInputs | None:
        """The next micro-batch of an agent, whose path has these stages. None: it has no more."""
        ...

    @property
    def objective(self) -> Objective:
        """Undivided: a sum over what is learned from. `LossInputs.tokens` is the number of its terms."""
        ...


Reload = Callable[[tuple[str, ...], int, int], Awaitable[Mapping[str, Tensor]]]
"""(peers to ask, stage, optimizer steps taken) -> a stage's tensors for `StageWorker.load_state`, from a
member whose weights are those of the majority (states.py). Raises NetworkError, CheckpointError."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """What losses sum to over the micro-batches that came back, undivided."""

    loss: float = 0.0
    clipped: int = 0
    kl: float | None = None
    """None: no reference."""
    entropy: float | None = None
    """None: not measured."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One micro-batch that came back along the path that the plan has for it."""

    path: tuple[int, ...]
    """Nodes, the data node first."""
    took_s: float
    """Time between the start of its forward pass and the end of its backward pass, in seconds of the plan."""
    planned_s: float
    """The same as predicted, waiting for others included."""


@dataclass(frozen=True, slots=True)
class IterationReport:
    """One iteration as its data node saw it."""

    iteration: int
    """The one that ended: optimizer steps taken before it."""
    makespan_s: float
    """Real seconds between the start of its first micro-batch and the return of the last."""
    closing_s: float
    """Real seconds between that return and the optimizer step: the step barrier."""
    micro_batches: int
    """How many came back."""
    tokens: int
    """Their weights: tokens, or answers."""
    sums: LossSums
    retried: int
    """Attempts beyond the first of each micro-batch."""
    given_up: int
    """Micro-batches that never came back."""
    skipped: Mapping[int, int] = field(default_factory=dict[int, int])
    """How many micro-batches left out each stage that the plan has for them."""
    lost: tuple[int, ...] = ()
    """Nodes that did not answer."""
    round_trips: tuple[RoundTrip, ...] = ()
    """How long micro-batches took that needed no repair."""
    stragglers: int = 0
    """Micro-batches that were still here, and dropped, when the iteration was closed."""
    busy_share: float = 0.0
    """Share of the whole iteration in which this member's stage computed."""
    contributors: tuple[str, ...] = ()
    """Peers whose gradients are in the step of this stage."""
    rejected: Mapping[str, str] = field(default_factory=dict[str, str])
    """Replicas whose gradients are not, and why."""
    stepped: bool = True
    """Whether the optimizer of this stage took a step."""
    grad_norm: float | None = None
    """Norm of this stage's gradient, before clipping. None: no step."""
    agrees: bool = True
    """Whether the weights here were those of the majority of the replicas; where not, they are now."""
