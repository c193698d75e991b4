"""What the parts of a member share under one seat.

member.py makes a [Workplace] -> relay.py, driver.py, closing.py
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from swarmnode.pipeline.running.courier import Courier
from swarmnode.pipeline.running.seat import MemberSettings, Seat
from swarmnode.pipeline.running.work import StageQueue
from swarmnode.pipeline.stages.stage import StageWorker
from swarmnode.pipeline.stages.visits import Visit
from swarmnode.pipeline.wire.messages import Hop

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class Workplace:
    """A stage, its thread, and the way to the others."""

    seat: Seat
    worker: StageWorker
    """Only to be touched in the thread of `queue`."""
    queue: StageQueue
    courier: Courier
    settings: MemberSettings
    spawn: Spawn
    """Starts a task that ends with the member at the latest. What is on its way home when the seat changes
    goes on, with the parts of the former seat: it counts nowhere any more."""
    report_lost: Callable[[int, str], None]
    """A node does not answer, and why we think so."""
    scale: float
    """Real seconds for a second of the plan."""
    makespan_s: float
    """What the plan predicts for an iteration, in real seconds."""
    release_s: float
    """Between the first micro-batches of two agents of this data node, in real seconds; 0 where compute is
    real, and takes the time that it takes."""
    iteration: int
    """The one that runs: optimizer steps taken before."""
    lost: set[int]
    """Nodes that have not answered and have said nothing since. The courier's, too."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the end of the iteration may have come nearer."""

    @property
    def own(self) -> int:
        return self.seat.own

    @property
    def budget_s(self) -> float:
        """From the start of an iteration a data node begins further attempts for so long."""
        settings = self.settings
        return settings.slack * self.makespan_s + 2 * (settings.hop_timeout_s + settings.grace_s)

    def micro_batch(self, agent: int, wave: int) -> int:
        """Its number within an iteration."""
        return agent * self.seat.plan.instance.waves + wave

    def has_lost(self, node: int, why: str) -> None:
        """A node is taken to be gone until it says something."""
        if node not in self.lost and node != self.own:
            self.lost.add(node)
            self.news.set()
            self.report_lost(node, why)


def visit_of(message: Hop) -> Visit:
    """Which attempt at which micro-batch a message belongs to."""
    return Visit(message.agent, message.iteration, message.wave, message.attempt)
