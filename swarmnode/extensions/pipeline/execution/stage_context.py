"""State that the parts of a member share while they work under one assignment.

pipeline_member.py makes a [StageContext] -> relay.py, iteration_driver.py, step_barrier.py
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import torch

from swarmnode.extensions.pipeline.execution.member_records import MemberSettings
from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.stages.micro_batches import MicroBatchAttempt
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.wire.hop_messages import Hop
from swarmnode.extensions.pipeline.wire.tensor_transport import TensorTransport
from swarmnode.identity.node_key import NodeKey

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class StageContext:
    """The stage of one assignment, its worker thread, and the transport of its messages."""

    assignment: Assignment
    worker: StageWorker
    """Use it only in the thread of `queue`."""
    optimizer: torch.optim.Optimizer
    queue: StageQueue
    transport: TensorTransport
    key: NodeKey
    """Signs our own micro-batches."""
    settings: MemberSettings
    spawn: Spawn
    """Starts a task that ends with the member at the latest. A task in flight when the assignment changes
    continues with the parts of the former assignment, and its result does not count."""
    report_lost: Callable[[int, str], None]
    """Called with a node that does not answer, and the reason why we think so."""
    makespan_s: float
    """Predicted time of an iteration."""
    iteration: int
    """Number of optimizer steps taken before the running iteration."""
    lost: set[int] = field(default_factory=set[int])
    """Nodes that did not answer and have not sent anything since. They are not tried again."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something happens that may end the iteration."""

    @property
    def own(self) -> int:
        return self.assignment.own

    @property
    def budget_s(self) -> float:
        """Seconds after the start of an iteration during which a data node may start new attempts."""
        settings = self.settings
        return settings.slack * self.makespan_s + 2 * (settings.hop_timeout_s + settings.grace_s)

    def has_lost(self, node: int, why: str) -> None:
        """Record that a node is gone. The record is removed when the node sends something."""
        if node not in self.lost and node != self.own:
            self.lost.add(node)
            self.news.set()
            self.report_lost(node, why)


def attempt_of(message: Hop) -> MicroBatchAttempt:
    """Return the attempt at a micro-batch that a message belongs to."""
    return MicroBatchAttempt(message.agent, message.iteration, message.wave, message.attempt)
