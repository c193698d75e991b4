"""The end of an iteration at a member: decide which micro-batches count, average with the replicas, step.

Finished of the data nodes -> [StepBarrier] -> GradientExchange (replica_exchange.py) -> StageWorker.apply
                                                                               -> alignment.py

An iteration ends when every living data node has reported that it is finished, or at a deadline. A member
that has no report by then has lost track (it was frozen or cut off) and does not step alone. Each report says
which micro-batches came back through us. Of our undecided micro-batches, those count and the others do not.
If we have counted a micro-batch that came back along another path, a replica has counted it too, so our whole
sum is left out.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.pipeline.execution.alignment import Alignment, IterationEnd
from swarmnode.extensions.pipeline.execution.message_sender import send
from swarmnode.extensions.pipeline.execution.stage_context import StageContext
from swarmnode.extensions.pipeline.replication.gradient_exchange import (
    Combined,
    ContributionBounds,
    GradientExchange,
    StageIteration,
)
from swarmnode.extensions.pipeline.stages.micro_batches import GradientSum, MicroBatchAttempt
from swarmnode.extensions.pipeline.wire.hop_messages import Finished, Passed
from swarmnode.extensions.pipeline.wire.services import MAX_DEADLINE_S

logger = logging.getLogger(__name__)

NOTHING = GradientSum({}, 0, 0)


def counted_elsewhere(
    counted: Collection[tuple[int, int]], finished: Mapping[int, Finished], data_node: Sequence[int]
) -> set[int]:
    """Return the micro-batches among (agent, number) pairs that we counted but that came back another way.

    `finished`: reports by data node; micro-batches of other data nodes are skipped. `data_node`: by agent.
    """
    agents_back = {node: {number for number, _ in message.back} for node, message in finished.items()}
    return {
        number
        for agent, number in counted
        if data_node[agent] in agents_back and number not in agents_back[data_node[agent]]
    }


class StepBarrier:
    """Ends the iterations of one assignment, one by one."""

    def __init__(
        self, context: StageContext, gradient_exchange: GradientExchange, alignment: Alignment
    ) -> None:
        self._context = context
        self._gradient_exchange = gradient_exchange
        self._alignment = alignment
        self._finished: dict[int, dict[int, Finished]] = {}
        """By iteration, the report of each data node."""
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Start the deadline of the running iteration, when its first message has arrived."""
        self._begun.set()

    def hear(self, message: Finished) -> None:
        """Record that a data node has finished its part."""
        self._finished.setdefault(message.iteration, {})[message.node] = message
        if message.iteration == self._context.iteration:
            self._begun.set()
            self._context.news.set()

    def is_under_way(self, iteration: int) -> bool:
        """Return True if we are a data node and have not finished our part of this iteration."""
        context = self._context
        over = context.iteration > iteration or context.own in self._finished.get(iteration, {})
        return context.own in context.assignment.data_nodes and not over

    @property
    def limit_s(self) -> float:
        """Seconds within which all data nodes must finish, counted from the first message of the iteration or
        the last sign of work from a data node that is still busy."""
        return min(2 * self._context.budget_s + self._context.settings.close_timeout_s, MAX_DEADLINE_S)

    async def ended(self) -> bool:
        """Wait for the end of the iteration. Returns False if no data node has reported it in time."""
        context = self._context
        await self._begun.wait()
        try:
            async with asyncio.timeout(self.limit_s) as limit, asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(limit))
                while not self._heard_all():
                    context.news.clear()
                    await context.news.wait()
                watching.cancel()
        except TimeoutError:
            for node in context.assignment.data_nodes - self._heard.keys():
                context.has_lost(node, f"did not finish iteration {context.iteration}")
        return bool(self._heard)

    async def close(self) -> IterationEnd:
        """Settle, average, step, and compare the weights. Increments the context's iteration."""
        context, iteration = self._context, self._context.iteration
        own = await context.queue.call(self._settle, dict(self._heard))
        combined = await self._combined(own)
        for peer_id, fault in combined.rejected.items():
            logger.info("the gradients of %s are not in step %d: %s", peer_id, iteration + 1, fault)
        grad_norm = await context.queue.call(self._step, combined.sum)
        aligned = await self._alignment.align()
        self._finished = {late: heard for late, heard in self._finished.items() if late > iteration}
        self._begun.clear()
        if self._finished:
            self._begun.set()
        context.iteration += 1
        return replace(aligned, grad_norm=None if aligned.undone else grad_norm)

    async def _watch(self, limit: asyncio.Timeout) -> None:
        """Ask each unfinished data node if it is still at work, and extend the deadline if it is.

        There may be no other message for a long time: one data node may still make rollouts while another has
        begun. The deadline is extended by at most MAX_DEADLINE_S.
        """
        context = self._context
        latest_s = asyncio.get_running_loop().time() + MAX_DEADLINE_S
        while True:
            await asyncio.sleep(min(context.settings.hop_timeout_s, self.limit_s / 2))
            for node in sorted(context.assignment.data_nodes - self._heard.keys() - context.lost):
                question = Passed(
                    plan=context.assignment.digest,
                    iteration=context.iteration,
                    micro_batch=0,
                    homeward=False,
                )
                trouble = None if node == context.own else await send(context, node, question)
                if trouble is None and not limit.expired():
                    limit.reschedule(min(asyncio.get_running_loop().time() + self.limit_s, latest_s))
                elif trouble == "silent" and self._heard:
                    context.has_lost(node, "does not answer at the end of an iteration")

    @property
    def _heard(self) -> dict[int, Finished]:
        return self._finished.get(self._context.iteration, {})

    def _heard_all(self) -> bool:
        context = self._context
        return not context.assignment.data_nodes - self._heard.keys() - context.lost

    def _settle(self, finished: Mapping[int, Finished]) -> GradientSum:
        """Decide which micro-batches count here, and sum their gradients. To be called in the worker
        thread."""
        worker, plan = self._context.worker, self._context.assignment.plan
        waves = plan.instance.waves
        for message in finished.values():
            for number, attempt in message.back:
                agent = number // waves
                if agent >= len(plan.paths) or plan.paths[agent][0] != message.node:
                    continue  # Only an agent's own data node may say what came back.
                worker.commit(MicroBatchAttempt(agent, worker.iteration, number % waves, attempt))
        counted = [(agent, agent * waves + wave) for agent, _, wave in worker.counted]
        astray = counted_elsewhere(counted, finished, [path[0] for path in plan.paths])
        own = worker.take_gradients()
        if astray:
            logger.warning(
                "our gradients are left out: %d micro-batches came back along another path", len(astray)
            )
            return NOTHING
        return own

    def _step(self, total: GradientSum) -> float | None:
        """Take one step of the optimizer. To be called in the worker thread."""
        context = self._context
        try:
            return context.worker.apply(
                total.of_step(1), context.optimizer, max_norm=context.settings.max_norm
            )
        except Rejected as rejected:
            logger.warning("no step in iteration %d: %s", context.iteration, rejected)
            return None

    async def _combined(self, own: GradientSum) -> Combined:
        context, assignment = self._context, self._context.assignment
        us = assignment.peers[assignment.own]
        most = assignment.plan.micro_batches
        expected = ContributionBounds.of(
            context.worker.model.trainable(), max_tokens=most * context.worker.max_tokens, max_visits=most
        )
        try:
            # The exchange has its own time limit. Ended from here, the survivors' sums would differ.
            return await self._gradient_exchange.combine(
                own,
                StageIteration(assignment.digest, assignment.stage, context.iteration),
                assignment.replicas,
                expected,
            )
        except NetworkError as error:
            # If the others went on without us, the next comparison of weights brings us back to theirs.
            logger.warning("taking the step with our own gradients only: %s", error)
            return Combined(own, (us,), {})
