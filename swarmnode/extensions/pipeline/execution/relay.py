"""Passes other members' micro-batches through this member's stage, and sends their gradients back.

pipeline_member.py (admit, take) -> [Relay] -> stage_queue.py (forward, backward) -> message_sender.py -> the
    next or former node

A micro-batch holds a slot here from before its forward pass until after its backward pass. Slots are reserved
for the plan's agents until their last wave of an iteration is back. Any other agent, whose path was repaired,
gets a free slot or is refused at once. So no micro-batch waits for a slot while it holds another, and nothing
can deadlock, whatever the order of stages.

A gradient counts once the node before us has accepted our answer. If that node refused it, the data node uses
another path and another member's gradient counts. If we cannot know, the end of the iteration decides
(step_barrier.py).
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import msgspec
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.execution.message_sender import send, send_hop
from swarmnode.extensions.pipeline.execution.stage_context import StageContext, attempt_of
from swarmnode.extensions.pipeline.scheduling.simulator import Kind
from swarmnode.extensions.pipeline.stages.micro_batches import MicroBatchAttempt, StageInput
from swarmnode.extensions.pipeline.wire.hop_messages import (
    BackwardHop,
    ForwardHop,
    Lost,
    Passed,
    Trouble,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.model.attention import packed_layout

logger = logging.getLogger(__name__)


class RelayPhase(IntEnum):
    """Progress of a micro-batch at this member. The values are in this order."""

    WAITING = 0
    """It waits for its forward pass."""
    GOING = 1
    """It is being sent to the next node."""
    GONE = 2
    """The next node has accepted it."""
    BACK = 3
    """Its gradient has arrived here."""
    ANSWERED = 4
    """The node before us has accepted its gradient."""


@dataclass(slots=True, eq=False)
class RelayedMicroBatch:
    """One attempt at a micro-batch, in flight through this member."""

    hop: ForwardHop
    """The message in which it arrived."""
    phase: RelayPhase = RelayPhase.WAITING
    task: asyncio.Task[None] | None = None
    """The task that sends it to the next node. Its way back must not be interrupted."""

    @property
    def attempt(self) -> MicroBatchAttempt:
        return attempt_of(self.hop)


class AgentSlots:
    """Slots for micro-batches: reserved for the plan's agents until their last wave is back, otherwise free
    for other agents."""

    def __init__(self, capacity: int, planned: Iterable[int]) -> None:
        self._capacity = capacity
        self._planned = frozenset(planned)
        self._others: set[int] = set()
        self._passed: set[int] = set()
        """Planned agents that have no more micro-batches in this iteration."""

    @property
    def taken(self) -> int:
        return len(self._planned) - len(self._passed) + len(self._others)

    def may_have(self, agent: int, *, early: bool = False) -> bool:
        """Return True if the agent has a slot or can get one. `early`: for the next iteration."""
        planned = self._planned if early else self._planned - self._passed
        return agent in planned or len(planned) + len(self._others - {agent}) < self._capacity

    def take(self, agent: int, *, early: bool = False) -> None:
        """Take a slot for the agent. Raises Rejected: no_slot."""
        if not self.may_have(agent, early=early):
            raise Rejected(Refusal.NO_SLOT, f"{self.taken} of {self._capacity} are taken")
        if agent not in self._planned:
            self._others.add(agent)
        elif not early:
            self._passed.discard(agent)

    def give_back(self, agent: int, *, passed: bool = False) -> bool:
        """Free the agent's slot and return True, unless the slot stays reserved. A planned agent keeps its
        slot until its last micro-batch has `passed`."""
        self._others.discard(agent)
        if passed and agent in self._planned:
            self._passed.add(agent)
        return passed or agent not in self._planned

    def begin_iteration(self) -> None:
        """Reserve slots for all planned agents again."""
        self._passed.clear()


class Relay:
    """Other members' micro-batches at this member, under one plan."""

    def __init__(self, context: StageContext) -> None:
        plan = context.assignment.plan
        self._context = context
        self.slots = AgentSlots(
            plan.instance.memory[context.own],
            (agent for agent, path in enumerate(plan.paths) if context.own in path),
        )
        self._relayed: dict[int, RelayedMicroBatch] = {}
        """The newest attempt of each agent."""
        self._early: dict[int, tuple[ForwardHop, Tensor]] = {}
        """By agent, a micro-batch of the next iteration that came early."""
        self.stragglers = 0
        """Micro-batches since the start that were still here when their iteration was closed."""

    def admit(self, message: ForwardHop | BackwardHop) -> None:
        """Raises Rejected: no_slot; unknown_work for a micro-batch that is over or was never sent on from
        here."""
        if isinstance(message, BackwardHop):
            self._expecting(message)
            return
        attempt, early = attempt_of(message), message.iteration != self._context.iteration
        former = self._newest(message.agent, early=early)
        if former is not None and attempt <= attempt_of(former):
            raise Rejected(Refusal.UNKNOWN_WORK, f"{attempt} comes after {attempt_of(former)}")
        if not self.slots.may_have(message.agent, early=early):
            self._free_slots_of_the_lost()
        if not self.slots.may_have(message.agent, early=early):
            raise Rejected(Refusal.NO_SLOT, f"for agent {message.agent}")

    def take(self, message: ForwardHop | BackwardHop, values: Tensor) -> None:
        """Start to work on a message that has just been admitted."""
        if isinstance(message, BackwardHop):
            relayed = self._expecting(message)
            relayed.phase = RelayPhase.BACK
            self._context.spawn(self._homeward(relayed, values))
            return
        self.slots.take(message.agent, early=message.iteration != self._context.iteration)
        if message.iteration == self._context.iteration:
            self._begin(message, values)
        else:
            self._early[message.agent] = message, values

    def asked(self, message: Passed) -> None:
        """Return if the micro-batch was passed on. Raises Rejected: too_slow while it is still here,
        unknown_work if it is not."""
        for relayed in self._relayed.values():
            if (relayed.hop.micro_batch, relayed.hop.attempt) == (message.micro_batch, message.attempt):
                if relayed.phase >= (RelayPhase.ANSWERED if message.homeward else RelayPhase.GONE):
                    return
                if relayed.phase >= RelayPhase.BACK or not message.homeward:
                    raise Rejected(Refusal.TOO_SLOW)
        raise Rejected(Refusal.UNKNOWN_WORK)

    def close(self) -> None:
        """End the iteration: drop the micro-batches that are still here."""
        for agent, relayed in self._relayed.items():
            self.stragglers += relayed.phase < RelayPhase.BACK
            self._stop(relayed)
            if agent not in self._early and self.slots.give_back(agent):
                self._context.queue.post(self._context.worker.release, agent)
        self._relayed.clear()

    def begin_iteration(self) -> bool:
        """Start the micro-batches that came early. Returns True if there were any. The context's iteration
        must already have been raised."""
        self.slots.begin_iteration()
        early, self._early = self._early, {}
        for message, values in early.values():
            self._begin(message, values)
        return bool(early)

    def _newest(self, agent: int, *, early: bool = False) -> ForwardHop | None:
        """Return the message of the agent's newest attempt. `early`: for the next iteration."""
        if early:
            return self._early[agent][0] if agent in self._early else None
        return self._relayed[agent].hop if agent in self._relayed else None

    def _expecting(self, message: BackwardHop) -> RelayedMicroBatch:
        relayed = self._relayed.get(message.agent)
        expected = (
            relayed is not None
            and relayed.attempt == attempt_of(message)
            and (relayed.hop.path, relayed.hop.position) == (message.path, message.position)
            and relayed.phase in (RelayPhase.GOING, RelayPhase.GONE)
        )
        if relayed is None or not expected:
            raise Rejected(Refusal.UNKNOWN_WORK, f"no gradient is awaited for {attempt_of(message)}")
        if message.tensor.shape != relayed.hop.tensor.shape:
            raise Rejected(
                Refusal.WRONG_SHAPE, f"{message.tensor.shape}, it left as {relayed.hop.tensor.shape}"
            )
        return relayed

    def _begin(self, message: ForwardHop, values: Tensor) -> None:
        former = self._relayed.get(message.agent)
        if former is not None:
            self._stop(former)
        relayed = self._relayed[message.agent] = RelayedMicroBatch(message)
        relayed.task = self._context.spawn(self._onward(relayed, values))

    def _stop(self, relayed: RelayedMicroBatch) -> None:
        if relayed.task is not None and relayed.phase < RelayPhase.BACK:
            relayed.task.cancel()

    async def _onward(self, relayed: RelayedMicroBatch, values: Tensor) -> None:
        context, hop = self._context, relayed.hop

        def forward() -> Tensor:
            device = context.worker.model.device
            layout = packed_layout(hop.lengths, device, hop.prompts or None) if hop.lengths else None
            return context.worker.forward(StageInput(relayed.attempt, values, hop.tokens, layout))

        try:
            output_BTD = await context.queue.perform("forward", hop.agent, forward)
        except Exception as error:  # noqa: BLE001  a peer's numbers must not end the member
            await self._give_up(relayed, "forward", error)
            return
        relayed.phase = RelayPhase.GOING
        onward = msgspec.structs.replace(hop, position=hop.position + 1)
        trouble = await send_hop(context, onward, output_BTD)
        if trouble is None and relayed.phase == RelayPhase.GOING:
            relayed.phase = RelayPhase.GONE
        elif trouble is not None and relayed.phase == RelayPhase.GOING:
            await self._tell(hop, onward.position % len(hop.path), trouble)

    async def _homeward(self, relayed: RelayedMicroBatch, gradient_BTD: Tensor) -> None:
        context, hop, attempt = self._context, relayed.hop, relayed.attempt
        try:
            answer_BTD = await context.queue.perform(
                "backward", attempt.agent, lambda: context.worker.backward(attempt, gradient_BTD)
            )
            assert answer_BTD is not None  # Only token ids have no gradient, and no other member sends us ids
        except Exception as error:  # noqa: BLE001  a peer's numbers must not end the member
            await self._give_up(relayed, "backward", error)
            return
        trouble = await send_hop(context, hop.backward(hop.position - 1), answer_BTD)
        if trouble is None:
            relayed.phase = RelayPhase.ANSWERED
            context.queue.post(context.worker.commit, attempt)
        elif trouble != "silent":
            context.queue.post(context.worker.discard, attempt)
        self._leave(relayed)
        if trouble is not None:
            await self._tell(hop, hop.position - 1, trouble)

    def _free_slots_of_the_lost(self) -> None:
        """Free the slots of agents whose data node is gone: they send no more micro-batches in this
        iteration."""
        for agent, path in enumerate(self._context.assignment.plan.paths):
            if path[0] not in self._context.lost or self._context.own not in path:
                continue
            relayed = self._relayed.get(agent)
            if relayed is None or relayed.phase != RelayPhase.BACK:
                if relayed is not None:
                    self._stop(relayed)
                if self.slots.give_back(agent, passed=True):
                    self._context.queue.post(self._context.worker.release, agent)

    async def _give_up(self, relayed: RelayedMicroBatch, kind: Kind, error: Exception) -> None:
        """Drop a micro-batch whose pass failed here. A refusal is logged as information, any other exception,
        which is a fault of ours or of the machine, as an error."""
        if isinstance(error, Rejected):
            logger.info("%s has no %s pass here: %s", relayed.attempt, kind, error)
        else:
            logger.error("the %s pass of %s failed", kind, relayed.attempt, exc_info=error)
        self._leave(relayed)
        await self._tell(relayed.hop, relayed.hop.position, "refused")

    def _leave(self, relayed: RelayedMicroBatch) -> None:
        """Free the slot of a micro-batch if its agent sends no more in it and has not sent another
        meanwhile."""
        agent = relayed.hop.agent
        if self._relayed.get(agent) is not relayed or agent in self._early:
            return
        is_last = relayed.attempt.wave == self._context.assignment.plan.instance.waves - 1
        if self.slots.give_back(agent, passed=is_last and relayed.phase == RelayPhase.ANSWERED):
            self._context.queue.post(self._context.worker.release, agent)

    async def _tell(self, hop: ForwardHop, position: int, trouble: Trouble) -> None:
        """Tell the data node that a micro-batch cannot get past a node. The data node decides what to do with
        it."""
        context, node, data_node = self._context, hop.path[position], hop.path[0]
        if trouble == "silent":
            context.has_lost(node, "did not take a tensor in time")
        if node == data_node or self._newest(hop.agent) is not hop:
            return
        message = Lost(
            plan=hop.plan, iteration=hop.iteration, attempt=hop.attempt, micro_batch=hop.micro_batch,
            position=position, fault=trouble,
        )  # fmt: skip
        if await send(context, data_node, message) == "silent":
            context.has_lost(data_node, "did not take the news of a lost member")
