"""Starts a data node's own micro-batches, sends them along their paths, and repairs paths that fail.

Feed -> [MicroBatchDriver] -> stage_queue.py (forward, loss, backward), message_sender.py -> the path, and
    back
                                                                            -> step_barrier.py

Each agent sends its micro-batches along its path one by one, as many as there are waves. If a node of the
path is lost, has no slot or takes too long, the path is repaired (recovery.py), and the micro-batch starts
again from its input as a new attempt. Members that get exactly the same input again pass on their output
without recomputing it. Results of older attempts are refused, so they never count.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.execution.in_flight_micro_batches import HopFailure, InFlightMicroBatch
from swarmnode.extensions.pipeline.execution.member_records import Feed, IterationReport, RoundTrip
from swarmnode.extensions.pipeline.execution.message_sender import send, send_hop
from swarmnode.extensions.pipeline.execution.stage_context import StageContext, attempt_of
from swarmnode.extensions.pipeline.feeds.objectives import LossInputs
from swarmnode.extensions.pipeline.plans.recovery import predicted_s, repaired_path
from swarmnode.extensions.pipeline.stages.micro_batches import MicroBatchAttempt, StageInput
from swarmnode.extensions.pipeline.wire.hop_messages import (
    BackwardHop,
    Finished,
    ForwardHop,
    Hop,
    Lost,
    Passed,
    TensorHeader,
    Trouble,
)
from swarmnode.extensions.pipeline.wire.of_each import of_each
from swarmnode.extensions.pipeline.wire.refusals import Refusal

logger = logging.getLogger(__name__)

TRIES = 8
"""Number of attempts after which a micro-batch is given up."""

ASK_TIMEOUT_S = 3.0
"""Time limit for a node to answer the question whether a micro-batch has passed it."""

FULL_PAUSE_S, MAX_FULL_PAUSE_S = 0.2, 2.0
"""Pause before members that had no slot for a micro-batch are asked again; it doubles up to the maximum."""


class MicroBatchDriver:
    """The agents of one data node under one plan."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._plan = context.assignment.plan
        self.agents = tuple(agent for agent, path in enumerate(self._plan.paths) if path[0] == context.own)
        self._began_s = 0.0
        self._in_flight: dict[int, InFlightMicroBatch] = {}
        self._load: Counter[int] = Counter()
        """Number of our micro-batches that hold a slot, by node."""
        self._came_back: list[ForwardHop] = []
        """First messages of the attempts that came back."""
        self._apart: set[frozenset[int]] = set()
        """Pairs of live nodes of which one says that it cannot reach the other in this iteration."""
        self._report = IterationReport(0)

    async def run(self, feed: Feed) -> IterationReport:
        """Send the micro-batches of one iteration along their paths until each is back or given up. Returns
        the report as far as it is known before the step."""
        clock = asyncio.get_running_loop().time
        self._began_s, self._came_back, self._apart = clock(), [], set()
        report = self._report = IterationReport(self._context.iteration)
        async with asyncio.TaskGroup() as agents:
            for agent in self.agents:
                agents.create_task(self._run_agent(agent, feed))
        report.makespan_s, report.micro_batches = clock() - self._began_s, len(self._came_back)
        self._in_flight.clear()
        return report

    def admit(self, message: Hop) -> None:
        """Raises Rejected: unknown_work if the message is not awaited now; wrong_shape."""
        self._awaiting(message)

    def take(self, message: Hop, values: Tensor) -> None:
        """Accept the tensor that was awaited. Raises Rejected as `admit` does."""
        self._awaiting(message).settle(values)

    def hear_of(self, peer_id: str, message: Lost) -> None:
        """Handle a report that a micro-batch cannot get past a node. Raises Rejected: unknown_work,
        wrong_route."""
        for in_flight in self._in_flight.values():
            hop = in_flight.hop
            if (hop.micro_batch, hop.attempt) != (message.micro_batch, message.attempt):
                continue
            if not 0 < message.position < len(hop.path):
                break
            near = hop.path[message.position - 1 : message.position + 2]
            tells = next((node for node in near if self._context.assignment.peers[node] == peer_id), None)
            if tells is None:
                raise Rejected(Refusal.WRONG_ROUTE, f"node {message.position} is not a neighbour's")
            in_flight.settle(HopFailure(message.position, message.fault, told_by=tells))
            return
        raise Rejected(
            Refusal.UNKNOWN_WORK, f"this attempt at micro-batch {message.micro_batch} is not in flight"
        )

    def lose(self, node: int) -> None:
        """Stop waiting for micro-batches whose path contains this lost node."""
        for in_flight in self._in_flight.values():
            if node in in_flight.hop.path[1:]:
                in_flight.settle(HopFailure(in_flight.hop.path.index(node), "silent"))

    def finished(self, node: int) -> Finished:
        """Return the message that tells a member which micro-batches of the ended iteration came back through
        it."""
        back = [(hop.micro_batch, hop.attempt) for hop in self._came_back if node in hop.path]
        return Finished(
            plan=self._context.assignment.digest,
            iteration=self._context.iteration,
            node=self._context.own,
            back=tuple(sorted(back)),
        )

    def _awaiting(self, message: Hop) -> InFlightMicroBatch:
        in_flight = self._in_flight.get(message.agent)
        if (
            in_flight is None
            or in_flight.awaits is not type(message)
            or attempt_of(in_flight.hop) != attempt_of(message)
            or in_flight.hop.path != message.path
        ):
            raise Rejected(Refusal.UNKNOWN_WORK, f"{attempt_of(message)} is not awaited here")
        if message.tensor.shape != (shape := in_flight.hop.tensor.shape):
            raise Rejected(Refusal.WRONG_SHAPE, f"{message.tensor.shape}, it left as {shape}")
        return in_flight

    async def _run_agent(self, agent: int, feed: Feed) -> None:
        """Send an agent's micro-batches along its path, one wave after the other."""
        instance = self._plan.instance
        for wave in range(instance.waves):
            path = self._living(self._plan.paths[agent])
            inputs = feed.take(agent, wave, tuple(instance.stage_of[node] for node in path))
            if inputs is None:
                return
            await self._bring(agent, wave, path, inputs, feed)

    def _living(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """Return the path without nodes that are known to be lost, or out of reach of the one before."""
        lost = self._context.lost
        apart = [after for before, after in pairwise(path) if frozenset((before, after)) in self._apart]
        if lost.isdisjoint(path) and not apart:
            return path
        return repaired_path(self._plan, path, lost, apart, self._load) or path

    async def _bring(
        self, agent: int, wave: int, path: tuple[int, ...], inputs: LossInputs, feed: Feed
    ) -> None:
        """Send one micro-batch along its path until an attempt succeeds or it is given up."""
        context, report, tried = self._context, self._report, set[int]()
        clock, planned = asyncio.get_running_loop().time, self._plan.paths[agent]
        pause_s = FULL_PAUSE_S
        for attempt in range(TRIES):
            began_s = clock()
            if began_s > self._began_s + context.budget_s:
                break
            hop = self._first_hop(agent, wave, attempt, path, inputs)
            self._in_flight[agent] = in_flight = InFlightMicroBatch(hop)
            self._load.update(path)
            try:
                failure = await self._attempt(in_flight, inputs, feed)
            finally:
                self._load.subtract(path)
                in_flight.awaits = None
            if failure is None:
                report.tokens += inputs.tokens
                if path == planned and attempt == 0:
                    took_s, wanted_s = clock() - began_s, predicted_s(self._plan)[agent][wave]
                    report.round_trips.append(RoundTrip(path, took_s, wanted_s))
                return
            report.retried += 1
            node = path[failure.position]
            logger.info("micro-batch %d cannot pass node %d: %s", hop.micro_batch, node, failure.trouble)
            if failure.position == 0:
                break  # Our own layers, or the loss, gave numbers that are not finite.
            if failure.trouble == "silent":
                told_by = failure.told_by
                # A node that another one reports as silent may still answer us.
                if told_by is not None and await self._ask(hop, failure.position, homeward=False) != "silent":
                    self._apart.add(frozenset((told_by, node)))
                else:
                    report.lost.add(node)
                    context.has_lost(node, f"micro-batch {hop.micro_batch} did not get past it")
            tried.add(node)
            again = repaired_path(self._plan, path, context.lost, tried - context.lost, self._load)
            if again is None:
                # All living nodes were tried: their slots become free as their own micro-batches pass.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_FULL_PAUSE_S)
                tried.clear()
                again = repaired_path(self._plan, path, context.lost, (), self._load)
            if again is None:
                break
            path = again
        report.given_up += 1
        self._in_flight.pop(agent, None)

    def _first_hop(
        self, agent: int, wave: int, attempt: int, path: tuple[int, ...], inputs: LossInputs
    ) -> ForwardHop:
        """Return the first message of an attempt. The dtype of its tensor is set when it is encoded."""
        context, layout = self._context, inputs.batch.layout
        shape = (*inputs.batch.input_ids_BT.shape, context.worker.model.hidden_size)
        shares = layout is not None and any(prompt is not None for prompt in layout.prompts)
        return ForwardHop(
            plan=context.assignment.digest,
            iteration=context.iteration,
            attempt=attempt,
            micro_batch=agent * self._plan.instance.waves + wave,
            agent=agent,
            wave=wave,
            path=path,
            position=1,
            tensor=TensorHeader(dtype="float16", shape=shape),
            tokens=inputs.tokens,
            lengths=layout.lengths if layout is not None else (),
            prompts=layout.prompts if layout is not None and shares else (),
        )

    async def _attempt(
        self, in_flight: InFlightMicroBatch, inputs: LossInputs, feed: Feed
    ) -> HopFailure | None:
        """Make one attempt, there and back. Returns None if the micro-batch came back and counts."""
        context, hop, attempt = self._context, in_flight.hop, attempt_of(in_flight.hop)
        worker, queue, batch = context.worker, context.queue, inputs.batch
        item = StageInput(attempt, batch.input_ids_BT, inputs.tokens, batch.layout)
        stages = tuple(self._plan.instance.stage_of[node] for node in hop.path)
        inputs, objective = replace(inputs, path=stages), feed.objective

        def backward(gradient_BTD: Tensor) -> None:
            worker.backward(attempt, gradient_BTD)
            worker.commit(attempt)

        limit_s = self._limit_s(attempt)
        homeward = False
        try:
            async with asyncio.timeout(limit_s):
                hidden_BTD = await queue.perform("forward", attempt.agent, lambda: worker.forward(item))
                arrived = await self._answer_to(in_flight, hop, hidden_BTD)
                if isinstance(arrived, HopFailure):
                    return arrived
                loss, gradient_BTD = await queue.perform(
                    "loss",
                    attempt.agent,
                    lambda: worker.loss(
                        attempt, arrived, lambda hidden: objective(worker.model, hidden, inputs)
                    ),
                )
                homeward = True
                homeward_hop = hop.backward(len(hop.path) - 1)
                gradient = await self._answer_to(in_flight, homeward_hop, gradient_BTD)
                if isinstance(gradient, HopFailure):
                    return gradient
        except Rejected as rejected:
            logger.warning("micro-batch %d is given up: %s", hop.micro_batch, rejected)
            return HopFailure(0, "refused")
        except TimeoutError:
            return await self._culprit(in_flight, homeward=homeward)
        # From here on the other members count it, so it is back even if our own backward pass fails.
        self._came_back.append(hop)
        try:
            await queue.perform("backward", attempt.agent, lambda: backward(gradient))
        except Rejected as rejected:
            logger.warning("our part of micro-batch %d is dropped: %s", hop.micro_batch, rejected)
        self._report.loss += loss
        return None

    def _limit_s(self, attempt: MicroBatchAttempt) -> float:
        """Return the time limit of an attempt, which is long enough that a silent neighbour is noticed
        first."""
        settings, planned_s = self._context.settings, predicted_s(self._plan)[attempt.agent][attempt.wave]
        return planned_s * settings.slack + settings.hop_timeout_s + settings.grace_s

    async def _answer_to(
        self, in_flight: InFlightMicroBatch, hop: ForwardHop | BackwardHop, values: Tensor
    ) -> Tensor | HopFailure:
        """Send this tensor and wait for the one that comes back; if the path has no other node, return the
        tensor itself. Stops early, before the deadline, once a node is known to be gone."""
        if len(hop.path) == 1:
            return values
        arrival = in_flight.expect(type(hop))

        async def send() -> None:
            trouble = await send_hop(self._context, hop, values)
            if trouble is not None and not arrival.done():
                in_flight.settle(HopFailure(hop.position, trouble))

        task = self._context.spawn(send())
        try:
            found = await arrival
        except asyncio.CancelledError:
            task.cancel()
            raise
        if isinstance(found, HopFailure):
            task.cancel()
        return found

    async def _culprit(self, in_flight: InFlightMicroBatch, *, homeward: bool) -> HopFailure:
        """Ask all nodes of the path about an overdue micro-batch. The first that has not passed it on is at
        fault."""
        in_flight.awaits = None
        hop = in_flight.hop
        positions = range(1, len(hop.path))
        troubles = await of_each(positions, lambda position: self._ask(hop, position, homeward))
        order = list(troubles.items())
        if homeward:
            order.reverse()
        guilty = next((position for position, trouble in order if trouble), order[-1][0] if order else 0)
        return HopFailure(guilty, "silent" if guilty else "refused")

    async def _ask(self, hop: ForwardHop, position: int, homeward: bool) -> Trouble | None:
        """Ask a node if it has passed a micro-batch on. Returns None if it has."""
        question = Passed(
            plan=hop.plan, iteration=hop.iteration, attempt=hop.attempt, micro_batch=hop.micro_batch,
            position=position, homeward=homeward,
        )  # fmt: skip
        timeout_s = min(ASK_TIMEOUT_S, self._context.settings.hop_timeout_s)
        return await send(self._context, hop.path[position], question, timeout_s=timeout_s)
