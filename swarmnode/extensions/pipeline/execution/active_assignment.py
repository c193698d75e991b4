"""The parts that carry out a running assignment, and the checks that decide which messages they accept.

pipeline_member.py (assign) makes an [ActiveAssignment] -> relay.py, iteration_driver.py, step_barrier.py
pipeline_member.py (admit) -> [ActiveAssignment.check] -> Rejected, before a tensor is read
pipeline_member.py (take) -> [ActiveAssignment.take] -> relay.py, iteration_driver.py, step_barrier.py
"""

import asyncio
from dataclasses import dataclass

from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.execution.alignment import IterationEnd
from swarmnode.extensions.pipeline.execution.hop_checks import check_hop
from swarmnode.extensions.pipeline.execution.iteration_driver import MicroBatchDriver
from swarmnode.extensions.pipeline.execution.relay import Relay
from swarmnode.extensions.pipeline.execution.stage_context import StageContext
from swarmnode.extensions.pipeline.execution.step_barrier import StepBarrier
from swarmnode.extensions.pipeline.wire.hop_messages import (
    BackwardHop,
    Finished,
    ForwardHop,
    Lost,
    Message,
    Passed,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.signing import check_signature


@dataclass(slots=True)
class ActiveAssignment:
    """The parts of a member that work under one assignment, until the member gets the next one."""

    context: StageContext
    relay: Relay
    driver: MicroBatchDriver
    barrier: StepBarrier
    ended: "asyncio.Future[IterationEnd]"
    """The result of the running iteration, once it has ended."""
    iterations: asyncio.Task[None] | None = None
    """The task that closes the iterations one by one."""

    @property
    def lost_track(self) -> bool:
        """True if this member missed the end of an iteration, after which nothing runs here any more."""
        return self.iterations is not None and self.iterations.done()

    def part_for(self, message: ForwardHop | BackwardHop) -> Relay | MicroBatchDriver:
        """Return the driver if the micro-batch started at our data node, otherwise the relay."""
        return self.driver if _comes_home(message) else self.relay

    def check(self, message: Message) -> None:
        """Raises Rejected if no member of our plan may send this message at this point."""
        assignment = self.context.assignment
        if message.plan != assignment.digest or self.lost_track:
            # A former plan; the transport has already checked that it is one of ours.
            raise Rejected(Refusal.UNKNOWN_WORK, "no such plan is running here")
        ahead = message.iteration - self.context.iteration
        if ahead > 0:
            # If no data node is still busy with our iteration, we have missed its end.
            self.barrier.begin()
        if not 0 <= ahead <= 1:
            raise Rejected(Refusal.UNKNOWN_WORK, f"iteration {message.iteration}")
        if isinstance(message, ForwardHop | BackwardHop):
            worker = self.context.worker
            check_hop(message, assignment.plan, worker.model, max_tokens=worker.max_tokens)
            self.part_for(message).admit(message)
        elif isinstance(message, Finished) and message.node not in assignment.data_nodes:
            raise Rejected(Refusal.WRONG_ROUTE, f"node {message.node} starts nothing")

    def check_origin(self, message: Message) -> None:
        """Raises Rejected: bad_signature, unless the micro-batch's data node has signed this attempt.

        Separate from `check` because it costs the most, and its result does not change later.
        """
        # A data node needs no proof for its own messages, and it knows itself which attempts it has begun.
        if isinstance(message, ForwardHop) and message.position > 1 and not _comes_home(message):
            check_signature(message, self.context.assignment.peers[message.path[0]])

    def take(self, peer_id: str, message: Message, values: Tensor | None) -> None:
        """Pass a complete, checked message to the part that handles it. `values`: the tensor of a hop. Raises
        Rejected."""
        node = self.context.assignment.peers.index(peer_id)
        match message:
            case ForwardHop() | BackwardHop() if values is not None:
                if message.iteration == self.context.iteration:
                    self.barrier.begin()
                self.part_for(message).take(message, values)
            case Lost():
                self.driver.hear_of(peer_id, message)
            case Passed() if message.position > 0:
                self.relay.asked(message)
            case Passed() if self.barrier.is_under_way(message.iteration):
                pass
            case Finished():
                self.barrier.hear(message)
            case _:
                raise Rejected(Refusal.UNKNOWN_WORK, "this is said to nobody here")
        self.context.lost.discard(node)


def _comes_home(message: ForwardHop | BackwardHop) -> bool:
    """Return True if the message is addressed to the data node that its micro-batch started from."""
    return message.target == message.path[0]
