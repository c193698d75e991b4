"""State shared by the parts of a member that work under one assignment, and how they send their messages.

pipeline_member.py makes a [StageContext] -> relay.py, iteration_driver.py, step_barrier.py
relay.py, iteration_driver.py, step_barrier.py -> [StageContext.hop, message] -> tensor_transport.py

A member that does not know the plan yet says so, and is asked again until the message's deadline; one that
cannot be reached is tried again for a moment, in which a daemon is restarted or a connection found anew.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.pipeline.execution.member_records import Assignment, MemberSettings
from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue
from swarmnode.extensions.pipeline.stages.micro_batches import MicroBatchAttempt
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.hop_messages import (
    BackwardHop,
    ForwardHop,
    Hop,
    Message,
    TensorHeader,
    Trouble,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MAX_DEADLINE_S
from swarmnode.extensions.pipeline.wire.tensor_transport import TensorTransport
from swarmnode.identity.node_key import NodeKey
from swarmnode.network.streams import Buffer

logger = logging.getLogger(__name__)

LARGE_ELEMENTS = 1 << 18
"""Encoding or decoding more than this leaves the event loop: it takes about a millisecond."""

PAUSE_S = 0.05
"""Pause between attempts at the same message."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class StageContext:
    """The stage of one assignment, its thread, and its messages to other members."""

    assignment: Assignment
    worker: StageWorker
    """Only to be touched in the thread of `queue`."""
    optimizer: torch.optim.Optimizer
    queue: StageQueue
    transport: TensorTransport
    settings: MemberSettings
    spawn: Spawn
    """Starts a task that ends with the member at the latest. A task that is in flight when the assignment
    changes runs on with the parts of the former assignment, and its result counts nowhere."""
    report_lost: Callable[[int, str], None]
    """Called with a node that does not answer and the reason why we think so."""
    makespan_s: float
    """Predicted time of an iteration."""
    iteration: int
    """The running iteration: optimizer steps taken before it."""
    key: NodeKey
    """Signs own micro-batches."""
    lost: set[int] = field(default_factory=set[int])
    """Nodes that have not answered and have sent nothing since. They are not tried again."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the end of the iteration may have come nearer."""

    @property
    def own(self) -> int:
        return self.assignment.own

    @property
    def budget_s(self) -> float:
        """Seconds after the start of an iteration in which a data node may begin further attempts."""
        settings = self.settings
        return settings.slack * self.makespan_s + 2 * (settings.hop_timeout_s + settings.grace_s)

    def attempt_of(self, message: Hop) -> MicroBatchAttempt:
        """Return the attempt at a micro-batch that a message belongs to."""
        agent, wave = divmod(message.micro_batch, self.assignment.plan.instance.waves)
        return MicroBatchAttempt(agent, message.iteration, wave, message.attempt)

    def has_lost(self, node: int, why: str) -> None:
        """Record that a node is gone, until it sends something again."""
        if node not in self.lost and node != self.own:
            self.lost.add(node)
            self.news.set()
            self.report_lost(node, why)

    def _timeout_s(self, node: int) -> float:
        """Return the time limit of a hop to this node."""
        hop_s = self.assignment.plan.instance.hop_s[self.assignment.own][node]
        return min(self.settings.hop_timeout_s + self.settings.slack * hop_s, MAX_DEADLINE_S)

    async def hop(
        self, values: Tensor, make: Callable[[TensorHeader], ForwardHop | BackwardHop]
    ) -> Trouble | None:
        """Send hidden states, or their gradient, to the target of the message that `make` returns for their
        header."""
        codec = self.settings.codec
        try:
            if values.numel() > LARGE_ELEMENTS:
                encoded = await asyncio.to_thread(encode, values, codec)
            else:
                encoded = encode(values, codec)
        except Rejected:
            return "refused"
        message = make(encoded.header)
        return await self.message(message.target, message, encoded.payload)

    async def message(
        self,
        node: int,
        message: Message,
        payload: Buffer = b"",
        *,
        timeout_s: float | None = None,
    ) -> Trouble | None:
        """Send a message until it is answered or its time is over: that of a hop to this node, unless
        `timeout_s` is given. Returns None if it was taken."""
        peer_id, clock = self.assignment.peers[node], asyncio.get_running_loop().time
        timeout_s = self._timeout_s(node) if timeout_s is None else timeout_s
        until_s = clock() + timeout_s
        # Under a new plan the others may not know us yet, and hang up on strangers.
        is_new = message.iteration == self.assignment.iteration
        patience_s = timeout_s if is_new else self.settings.reconnect_s
        unreachable_until_s = clock() + patience_s
        while True:
            left_s = max(until_s - clock(), 0.001)
            try:
                refusal = await self.transport.send(peer_id, message, payload, timeout_s=left_s)
            except NetworkError as error:
                logger.debug("%s did not reach %s: %s", type(message).__name__, peer_id, error)
                if node in self.lost or clock() + PAUSE_S >= min(until_s, unreachable_until_s):
                    return "silent"
            else:
                if refusal is None:
                    return None
                if refusal is Refusal.NO_SLOT:
                    return "full"
                if refusal is not Refusal.UNKNOWN_PLAN or clock() + PAUSE_S >= until_s:
                    return "refused"
            await asyncio.sleep(PAUSE_S)
