"""One member of a pipeline: its assignment under the plan, the messages it receives, and its iterations.

TensorTransport -> [PipelineMember: MessageHandler] -> relay.py (micro-batches of others)
membership.py (assignment)  |                       -> iteration_driver.py (own micro-batches, on a data node)
                            |                       -> step_barrier.py (the end of an iteration)
                            v
                     IterationReport

A member accepts messages of the running iteration and of the next one, and refuses all others before their
tensors are read. Members without data serve the others, and take their step when the data nodes have
finished. Assignments change between iterations.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from swarmnode.errors import ModelError, Rejected
from swarmnode.extensions.pipeline.execution.active_assignment import ActiveAssignment
from swarmnode.extensions.pipeline.execution.alignment import Alignment, IterationEnd
from swarmnode.extensions.pipeline.execution.iteration_driver import MicroBatchDriver
from swarmnode.extensions.pipeline.execution.member_records import (
    Feed,
    IterationReport,
    MemberSettings,
    Reload,
)
from swarmnode.extensions.pipeline.execution.message_sender import LARGE_ELEMENTS, send
from swarmnode.extensions.pipeline.execution.relay import Relay
from swarmnode.extensions.pipeline.execution.stage_context import StageContext
from swarmnode.extensions.pipeline.execution.stage_queue import StageQueue
from swarmnode.extensions.pipeline.execution.step_barrier import StepBarrier
from swarmnode.extensions.pipeline.plans.assignment import Assignment
from swarmnode.extensions.pipeline.replication.gradient_exchange import GradientExchange
from swarmnode.extensions.pipeline.scheduling.simulator import simulate
from swarmnode.extensions.pipeline.stages.stage_worker import StageWorker
from swarmnode.extensions.pipeline.states.holdings import HeldState
from swarmnode.extensions.pipeline.wire.codec import decode
from swarmnode.extensions.pipeline.wire.hop_messages import Finished, Hop, Message
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.tensor_transport import TensorTransport
from swarmnode.identity.node_key import NodeKey

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PipelineMember:
    """Serves one stage, and trains if it is a data node.

    async with PipelineMember(streams, key=key, gradient_exchange=exchange) as member:
        member.assign(Assignment(plan, digest(plan), peers, own=2, iteration=0), worker, optimizer)
        report = await member.train(feed)        # on a data node
        await member.wait_step(1)                # elsewhere
    """

    def __init__(
        self,
        streams: MemberStreams,
        *,
        key: NodeKey,
        gradient_exchange: GradientExchange,
        settings: MemberSettings | None = None,
        queue: StageQueue | None = None,
        reload: Reload | None = None,
    ) -> None:
        """`key`: the host's key. `reload`: fetches the majority's weights; without it, a member whose weights
        differ loses track."""
        self.settings = settings or MemberSettings()
        self.on_lost: Callable[[str, str], None] = _ignore
        """Called with the peer id of a member that seems to be gone, and the reason. The member may still be
        alive."""
        self._key = key
        self._gradient_exchange = gradient_exchange
        self._reload = reload
        self.transport = TensorTransport(streams, self)
        self._queue = queue or StageQueue()
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._started: set[asyncio.Task[None]] = set()
        self._active: ActiveAssignment | None = None
        self._steps = 0
        """Optimizer steps taken when the last assignment ended."""
        self._training = False

    async def __aenter__(self) -> Self:
        """Raises HostDown."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._queue)
            await stack.enter_async_context(self._tasks)
            await stack.enter_async_context(self.transport)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in tuple(self._started):
            task.cancel()
        if self._active is not None:
            self._active.ended.cancel()
        await self._stack.__aexit__(exc_type, exc, tb)

    @property
    def iteration(self) -> int:
        """Optimizer steps taken. Without an assignment: the steps taken when the last one ended, or 0 before
        the first."""
        return self._active.context.iteration if self._active is not None else self._steps

    @property
    def lost_track(self) -> bool:
        """True if this member missed the end of an iteration. To serve again, it needs a new assignment and
        weights."""
        return self._active is not None and self._active.lost_track

    @property
    def lost(self) -> frozenset[str]:
        """Peers of the plan that did not answer us and have not sent anything since."""
        if self._active is None:
            return frozenset()
        context = self._active.context
        return frozenset(context.assignment.peers[node] for node in context.lost)

    def lose(self, peer_id: str, why: str) -> None:
        """Stop sending to a peer that is gone (membership.py) in this iteration. Micro-batches that were to
        pass it start again."""
        active = self._active
        if active is not None and peer_id in active.context.assignment.peers:
            node = active.context.assignment.peers.index(peer_id)
            active.context.has_lost(node, why)
            active.driver.lose(node)

    async def in_stage_thread(self, work: Callable[[], T]) -> T:
        """Run a function in the stage's worker thread, after the running task. Returns its result."""
        return await self._queue.call(work)

    def assign(
        self,
        assignment: Assignment,
        worker: StageWorker,
        optimizer: torch.optim.Optimizer,
        *,
        start: HeldState | None = None,
        offer: Callable[[HeldState], object] = lambda held: None,
    ) -> None:
        """Start to work under a new plan, at a new stage, or both. Call it between iterations: it drops the
        rest of a running one.

        `optimizer`: of `worker.model.trainable().values()`. `start`: the stage's state with its moments, or
        None if it may differ from the pipeline's. `offer`: called with the state after each step. Raises
        ModelError while `train` runs.
        """
        self.unassign()
        context = StageContext(
            assignment=assignment,
            worker=worker,
            optimizer=optimizer,
            queue=self._queue,
            transport=self.transport,
            key=self._key,
            settings=self.settings,
            spawn=self._spawn,
            report_lost=lambda node, why: self.on_lost(assignment.peers[node], why),
            makespan_s=simulate(assignment.plan).makespan_s,
            iteration=assignment.iteration,
        )
        self._queue.post(_prepare, worker, assignment.iteration)
        alignment = Alignment(context, self._gradient_exchange, self._reload, start=start, offer=offer)
        self._active = active = ActiveAssignment(
            context,
            Relay(context),
            MicroBatchDriver(context),
            StepBarrier(context, self._gradient_exchange, alignment),
            asyncio.get_running_loop().create_future(),
        )
        active.iterations = self._spawn(self._iterate(active))
        self.transport.adopt(PlanMembers(assignment.digest, assignment.peers, assignment.own))

    def unassign(self) -> None:
        """Give up the assignment. To be called between iterations.

        No message is accepted until the next assignment, and the stage's weights are released. Raises
        ModelError while `train` runs.
        """
        if self._training:
            raise ModelError("an assignment cannot change while an iteration runs", hint="await train first")
        former, self._active = self._active, None
        if former is None:
            return
        self._steps = former.context.iteration
        former.relay.close()
        former.ended.cancel()
        if former.iterations is not None:
            former.iterations.cancel()

    async def train(self, feed: Feed) -> IterationReport:
        """Run one iteration of a data node, including its step. Raises ModelError without an assignment."""
        active = self._active
        if active is None or self._training or self.lost_track:
            raise ModelError(
                "this member cannot train", hint="it needs an assignment, and one iteration at a time"
            )
        context, clock = active.context, asyncio.get_running_loop().time
        ended = active.ended
        busy_s, stragglers = self._queue.busy_s, active.relay.stragglers
        self._training = True
        try:
            active.barrier.begin()
            report = await active.driver.run(feed)
            back_s = clock()
            for node in sorted(node for nodes in context.assignment.plan.instance.stages for node in nodes):
                if node == context.own:
                    active.barrier.hear(active.driver.finished(node))
                else:
                    self._spawn(self._finish(context, active.driver.finished(node), node))
            closed = await asyncio.shield(ended)
        finally:
            self._training = False
        report.closing_s = clock() - back_s
        whole_s = report.makespan_s + report.closing_s
        report.busy_share = (self._queue.busy_s - busy_s) / whole_s if whole_s > 0 else 0.0
        report.stragglers = active.relay.stragglers - stragglers
        report.grad_norm = closed.grad_norm
        return report

    async def wait_step(self, iteration: int) -> None:
        """Wait until this number of optimizer steps has been taken. Raises ModelError if this member has lost
        track."""
        while self.iteration < iteration:
            if self._active is None:
                raise ModelError("a member without an assignment takes no steps")
            closed = await asyncio.shield(self._active.ended)
            if closed.lost_track:
                raise ModelError(
                    "this member has missed the end of an iteration", hint="give it a new assignment"
                )

    def admit(self, peer_id: str, message: Message) -> None:
        """Implements MessageHandler. Raises Rejected if the message cannot be accepted."""
        active = self._active
        if active is None:
            raise Rejected(Refusal.UNKNOWN_WORK, "no plan is running here")
        active.check(message)
        active.check_origin(message)

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        """Implements MessageHandler: handle a complete message. Raises Rejected."""
        active = self._active
        values = None
        if isinstance(message, Hop):
            large = message.tensor.size > LARGE_ELEMENTS
            header = message.tensor
            values = await asyncio.to_thread(decode, header, payload) if large else decode(header, payload)
        if active is None or active is not self._active:
            raise Rejected(Refusal.UNKNOWN_WORK, "the assignment has changed meanwhile")
        active.check(message)
        active.take(peer_id, message, values)

    async def _iterate(self, active: ActiveAssignment) -> None:
        """Close one iteration after the other, until this member loses track."""
        while True:
            knows = await active.barrier.ended()
            active.relay.close()
            if not knows:
                logger.warning("nobody told us how iteration %d ended", active.context.iteration)
                active.context.queue.post(active.context.worker.take_gradients)
                active.ended.set_result(IterationEnd(lost_track=True))
                return
            closed = await active.barrier.close()
            ended, active.ended = active.ended, asyncio.get_running_loop().create_future()
            ended.set_result(closed)
            if closed.lost_track:
                active.ended.set_result(closed)
                return
            if active.relay.begin_iteration():
                active.barrier.begin()

    async def _finish(self, context: StageContext, message: Finished, node: int) -> None:
        if await send(context, node, message) == "silent":
            context.has_lost(node, f"did not hear that iteration {message.iteration} is over")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task


def _ignore(peer_id: str, why: str) -> None:
    logger.info("%s seems to be gone: %s", peer_id, why)


def _prepare(worker: StageWorker, iteration: int) -> None:
    """Drop the gradients of the former assignment. To be called in the worker thread."""
    worker.take_gradients()
    worker.iteration = iteration
