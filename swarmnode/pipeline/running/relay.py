"""A member on the way: micro-batches of data nodes come in, pass its stage, and their gradients go back.

member.py (admit, take) -> [Relay] -> work.py (forward, backward) -> courier.py -> the next node or the former

A micro-batch has a slot here from before its forward pass until after its backward pass. Agents of the plan
have theirs until their last wave of an iteration is back; another one, whose path was repaired, gets one that
is free or is refused at once. So nobody holds a slot while it waits for one, and nothing can deadlock,
whatever the order of stages.

A gradient counts when the node before us has taken the answer. Where it refused, the data node goes another
way and somebody else's counts; where we cannot know, the end of the iteration tells (closing.py).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.model.attention import packed_layout
from swarmnode.pipeline.running.workplace import Workplace, visit_of
from swarmnode.pipeline.stages.visits import StageInput, Visit
from swarmnode.pipeline.wire.messages import (
    Abandoned,
    Backward,
    Forward,
    Lost,
    Passed,
    Refusal,
    Trouble,
)

logger = logging.getLogger(__name__)


class Phase(IntEnum):
    """How far a micro-batch is with us."""

    WAITING = 0
    """For its forward pass."""
    GOING = 1
    """The next node is being told."""
    GONE = 2
    """The next node has it."""
    BACK = 3
    """Its gradient is here."""
    ANSWERED = 4
    """The node before us has its gradient."""


@dataclass(slots=True, eq=False)
class Stay:
    """One attempt at a micro-batch, with us."""

    visit: Visit
    micro_batch: int
    path: tuple[int, ...]
    position: int
    """Ours on the path."""
    shape: tuple[int, ...]
    """Of its hidden states."""
    phase: Phase = Phase.WAITING
    task: asyncio.Task[None] | None = None
    """Of its way there; its way back is not to be interrupted."""


class Slots:
    """Who may be here: the plan's agents until they have passed, as many others as there is room for."""

    def __init__(self, capacity: int, planned: Iterable[int]) -> None:
        self._capacity = capacity
        self._planned = frozenset(planned)
        self._others: set[int] = set()
        self._passed: set[int] = set()
        """Of the planned, those that have no micro-batch to come in this iteration."""

    @property
    def taken(self) -> int:
        return len(self._planned) - len(self._passed) + len(self._others)

    def may_have(self, agent: int, *, early: bool = False) -> bool:
        """Whether the agent has a slot, or would get one. `early`: in the next iteration."""
        planned = self._planned if early else self._planned - self._passed
        return agent in planned or len(planned) + len(self._others - {agent}) < self._capacity

    def take(self, agent: int, *, early: bool = False) -> None:
        """Raises Rejected: no_slot."""
        if not self.may_have(agent, early=early):
            raise Rejected(Refusal.NO_SLOT, f"{self.taken} of {self._capacity} are taken")
        if agent not in self._planned:
            self._others.add(agent)
        elif not early:
            self._passed.discard(agent)

    def give_back(self, agent: int, *, passed: bool = False) -> bool:
        """False: it stays the agent's, until its last micro-batch of the iteration has `passed`."""
        self._others.discard(agent)
        if passed and agent in self._planned:
            self._passed.add(agent)
        return passed or agent not in self._planned

    def begin_iteration(self) -> None:
        """All of the plan's agents come again."""
        self._passed.clear()


class Relay:
    """The micro-batches of others at one member, under one plan."""

    def __init__(self, place: Workplace) -> None:
        plan = place.seat.plan
        self._place = place
        self.slots = Slots(
            plan.instance.memory[place.own],
            (agent for agent, path in enumerate(plan.paths) if place.own in path),
        )
        self._stays: dict[int, Stay] = {}
        """By agent, its newest."""
        self._early: dict[int, tuple[Forward, Tensor]] = {}
        """By agent: what belongs to the next iteration."""
        self.stragglers = 0
        """Micro-batches that an iteration was closed under, since the start."""
        self.troubles: Counter[Trouble] = Counter()
        """Why micro-batches did not get on from here, or through here."""

    def admit(self, message: Forward | Backward) -> None:
        """Raises Rejected: unknown_work for what is over or was never sent from here, no_slot."""
        if isinstance(message, Backward):
            self._expecting(message)
            return
        visit, newest = visit_of(message), self._stays.get(message.agent)
        if message.iteration != self._place.iteration:
            early = self._early.get(message.agent)
            if early is not None and visit <= visit_of(early[0]):
                raise Rejected(Refusal.UNKNOWN_WORK, f"{visit} comes after {visit_of(early[0])}")
        elif newest is not None and visit <= newest.visit:
            raise Rejected(Refusal.UNKNOWN_WORK, f"{visit} comes after {newest.visit}")
        early = message.iteration != self._place.iteration
        if not self.slots.may_have(message.agent, early=early):
            self._free_slots_of_the_lost()
        if not self.slots.may_have(message.agent, early=early):
            raise Rejected(Refusal.NO_SLOT, f"for agent {message.agent}")

    def take(self, message: Forward | Backward, values: Tensor) -> None:
        """Begin the work of a message. Raises as `admit`: the world may have moved on since it was asked."""
        self.admit(message)
        if isinstance(message, Backward):
            stay = self._expecting(message)
            stay.phase = Phase.BACK
            self._place.spawn(self._homeward(stay, values))
            return
        self.slots.take(message.agent, early=message.iteration != self._place.iteration)
        if message.iteration == self._place.iteration:
            self._begin(message, values)
        else:
            self._early[message.agent] = message, values

    def abandon(self, message: Abandoned) -> None:
        """Drop a micro-batch that its data node has given up."""
        for agent, stay in self._stays.items():
            if stay.micro_batch == message.micro_batch and stay.phase < Phase.BACK:
                self._stop(stay)
                self._leave(agent, stay)

    def asked(self, message: Passed) -> None:
        """Whether a micro-batch was handed on. Raises Rejected: too_slow when it is here, unknown_work."""
        for stay in self._stays.values():
            if stay.micro_batch == message.micro_batch and stay.visit.attempt == message.attempt:
                if stay.phase >= (Phase.ANSWERED if message.homeward else Phase.GONE):
                    return
                if stay.phase >= Phase.BACK or not message.homeward:
                    raise Rejected(Refusal.TOO_SLOW)
        raise Rejected(Refusal.UNKNOWN_WORK)

    def close(self) -> None:
        """The iteration is over: what is still on its way is dropped."""
        for agent, stay in self._stays.items():
            self.stragglers += stay.phase < Phase.BACK
            self._stop(stay)
            if agent not in self._early and self.slots.give_back(agent):
                self._place.queue.post(self._place.worker.release, agent)
        self._stays.clear()

    def begin_iteration(self) -> bool:
        """Begin what came early: was there any? The workplace's iteration has been raised."""
        self.slots.begin_iteration()
        early, self._early = self._early, {}
        for message, values in early.values():
            if message.iteration == self._place.iteration:
                self._begin(message, values)
        return bool(early)

    def _expecting(self, message: Backward) -> Stay:
        stay = self._stays.get(message.agent)
        expected = (
            stay is not None
            and stay.visit == visit_of(message)
            and (stay.path, stay.position) == (message.path, message.position)
            and stay.phase in (Phase.GOING, Phase.GONE)
        )
        if stay is None or not expected:
            raise Rejected(Refusal.UNKNOWN_WORK, f"no gradient is awaited for {visit_of(message)}")
        if message.tensor.shape != stay.shape:
            raise Rejected(Refusal.WRONG_SHAPE, f"{message.tensor.shape}, it left as {stay.shape}")
        return stay

    def _begin(self, message: Forward, values: Tensor) -> None:
        former = self._stays.get(message.agent)
        if former is not None:
            self._stop(former)
        stay = Stay(
            visit_of(message), message.micro_batch, message.path, message.position, message.tensor.shape
        )
        self._stays[message.agent] = stay
        stay.task = self._place.spawn(self._onward(stay, message, values))

    def _stop(self, stay: Stay) -> None:
        if stay.task is not None and stay.phase < Phase.BACK:
            stay.task.cancel()

    async def _onward(self, stay: Stay, message: Forward, values: Tensor) -> None:
        place, agent = self._place, message.agent

        def forward() -> Tensor:
            prompts = message.prompts or None
            device = place.worker.model.device
            layout = packed_layout(message.lengths, device, prompts) if message.lengths else None
            place.worker.reserve(agent)
            return place.worker.forward(StageInput(stay.visit, values, message.tokens, layout))

        try:
            output_BTD = await place.queue.perform("forward", agent, forward)
        except Exception as error:  # noqa: BLE001  a peer's numbers must not end the member
            _log_failure("forward", stay.visit, error)
            self._leave(agent, stay)
            await self._tell(stay, stay.position, "refused")
            return
        stay.phase = Phase.GOING
        target = (stay.position + 1) % len(stay.path)
        trouble = await place.courier.forward(
            stay,
            stay.position + 1,
            output_BTD,
            tokens=message.tokens,
            lengths=message.lengths,
            prompts=message.prompts,
            signature=message.signature,
        )
        if trouble is None and stay.phase == Phase.GOING:
            stay.phase = Phase.GONE
        elif trouble is not None and stay.phase == Phase.GOING:
            await self._tell(stay, target, trouble)

    async def _homeward(self, stay: Stay, gradient_BTD: Tensor) -> None:
        place, visit = self._place, stay.visit
        try:
            answer_BTD = await place.queue.perform(
                "backward", visit.agent, lambda: place.worker.backward(visit, gradient_BTD)
            )
            assert answer_BTD is not None  # Only ids have no gradient, and they do not come from elsewhere.
        except Exception as error:  # noqa: BLE001  a peer's numbers must not end the member
            _log_failure("backward", visit, error)
            self._leave(visit.agent, stay)
            await self._tell(stay, stay.position, "refused")
            return
        trouble = await place.courier.backward(stay, stay.position - 1, answer_BTD)
        if trouble is None:
            stay.phase = Phase.ANSWERED
            place.queue.post(place.worker.commit, visit)
        elif trouble != "silent":
            place.queue.post(place.worker.discard, visit)
        self._leave(visit.agent, stay)
        if trouble is not None:
            await self._tell(stay, stay.position - 1, trouble)

    def _free_slots_of_the_lost(self) -> None:
        """Whose data node is gone has nothing more to come in this iteration."""
        for agent, path in enumerate(self._place.seat.plan.paths):
            if path[0] not in self._place.lost or self._place.own not in path:
                continue
            stay = self._stays.get(agent)
            if stay is None or stay.phase != Phase.BACK:
                if stay is not None:
                    self._stop(stay)
                if self.slots.give_back(agent, passed=True):
                    self._place.queue.post(self._place.worker.release, agent)

    def _leave(self, agent: int, stay: Stay) -> None:
        """A slot is free again where nothing more is to come in it, unless its agent is back meanwhile."""
        if self._stays.get(agent) is not stay or agent in self._early:
            return
        is_last = stay.visit.wave == self._place.seat.plan.instance.waves - 1
        if self.slots.give_back(agent, passed=is_last and stay.phase == Phase.ANSWERED):
            self._place.queue.post(self._place.worker.release, agent)

    async def _tell(self, stay: Stay, position: int, trouble: Trouble) -> None:
        """The data node decides what becomes of a micro-batch that does not get on."""
        place, node, data_node = self._place, stay.path[position], stay.path[0]
        self.troubles[trouble] += 1
        if trouble == "silent":
            place.has_lost(node, "did not take a tensor in time")
        if node == data_node or self._stays.get(stay.visit.agent) is not stay:
            return
        message = Lost(
            plan=place.seat.digest, iteration=stay.visit.iteration, attempt=stay.visit.attempt,
            deadline_s=place.courier.deadline_s(data_node), micro_batch=stay.micro_batch, position=position,
            fault=trouble,
        )  # fmt: skip
        if await place.courier.message(data_node, message) == "silent":
            place.has_lost(data_node, "did not take the news of a lost member")


def _log_failure(kind: str, visit: Visit, error: Exception) -> None:
    """What is refused is no news; anything else is a mistake of ours, or of the machine."""
    if isinstance(error, Rejected):
        logger.info("%s has no %s pass here: %s", visit, kind, error)
    else:
        logger.error("the %s pass of %s failed", kind, visit, exc_info=error)
