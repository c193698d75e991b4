"""The settings and data sources of a pipeline member, and its report of an iteration.

own_stage.py (Assignment) -> pipeline_member.py (relay.py, iteration_driver.py, step_barrier.py) ->
    [IterationReport] -> node
text_feed.py, rollout_feed.py -> [Feed] -> iteration_driver.py
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from swarmnode.extensions.pipeline.feeds.objectives import LossInputs, Objective
from swarmnode.extensions.pipeline.stages.micro_batches import StagePath
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName

CLOSE_TIMEOUT_S = 60.0
"""Longest wait for others at the end of an iteration; members that come later are left out of it."""


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """Time limits, codec and clipping of one member. All times are real seconds."""

    codec: CodecName = "fp16"
    """Codec of hidden states and of their gradients (codec.py)."""
    max_norm: float = 1.0
    """Norm that the gradients of a stage are clipped to."""
    hop_timeout_s: float = 10.0
    """Time for a neighbour to accept a message, in addition to `slack` times the hop time of the plan."""
    reconnect_s: float = 1.0
    """Time during which we keep trying to reach a peer."""
    slack: float = 3.0
    """Factor on every time that the plan predicts."""
    grace_s: float = 5.0
    """Time added to the predicted time of a micro-batch before its path is repaired."""
    close_timeout_s: float = CLOSE_TIMEOUT_S
    """Limit of each exchange among the replicas at the end of an iteration."""


class Feed(Protocol):
    """The source of a data node's micro-batches in one iteration."""

    def take(self, agent: int, wave: int, path: StagePath) -> LossInputs | None:
        """Return the agent's next micro-batch, for a path with these stages, or None if there are no more."""
        ...

    @property
    def objective(self) -> Objective:
        """The undivided loss: a sum over the terms that are learned from. `LossInputs.tokens` counts the
        terms."""
        ...


Reload = Callable[[tuple[str, ...], int], Awaitable[Mapping[str, Tensor]]]
"""(peers to ask, optimizer steps taken) -> the tensors of our stage for `StageWorker.load_state`, from a
member whose weights are the majority's (state_service.py). Raises NetworkError, CheckpointError."""


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One micro-batch that came back along its planned path."""

    path: tuple[int, ...]
    """Nodes, starting with the data node."""
    took_s: float
    """Time between the start of its forward pass and the end of its backward pass."""
    planned_s: float
    """Predicted time of the same round trip, including the time spent waiting for others."""


@dataclass(slots=True)
class IterationReport:
    """One iteration of a data node: counted while its micro-batches run, complete after the step."""

    iteration: int
    """Number of optimizer steps taken before this iteration."""
    makespan_s: float = 0.0
    """Real seconds between the start of its first micro-batch and the return of the last."""
    closing_s: float = 0.0
    """Real seconds between the return of the last micro-batch and the optimizer step: the step barrier."""
    micro_batches: int = 0
    """Micro-batches that came back."""
    tokens: int = 0
    """Sum of the weights of those micro-batches: tokens, or answers."""
    loss: float = 0.0
    """Undivided sum of their losses."""
    retried: int = 0
    """Attempts beyond the first of each micro-batch."""
    given_up: int = 0
    """Micro-batches that never came back."""
    lost: set[int] = field(default_factory=set[int])
    """Nodes that did not answer."""
    round_trips: list[RoundTrip] = field(default_factory=list[RoundTrip])
    """Round trips of the micro-batches that needed no repair."""
    stragglers: int = 0
    """Micro-batches of other data nodes that were still at this member when the iteration was closed, and
    were dropped."""
    busy_share: float = 0.0
    """Share of the iteration during which this member's stage computed."""
    grad_norm: float | None = None
    """Norm of this stage's gradient before clipping. None if no step was taken."""

    @property
    def stepped(self) -> bool:
        """True if the optimizer of this stage took a step."""
        return self.grad_norm is not None
