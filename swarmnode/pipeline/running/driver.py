"""A data node's own micro-batches: started, sent along their paths, brought home, and repaired on the way.

Feed -> [Driver] -> work.py (forward, loss, backward), courier.py -> the path, and back -> closing.py

An agent takes one micro-batch after the other along its path, as many as there are waves. Where a node of
the path is lost, has no slot or takes too long, the path is repaired (recovery.py) and the micro-batch starts
again from its input, as a new attempt: members with the very same input hand their output on without
computing. What an older attempt still brings is refused, so it counts nowhere.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarmnode.errors import Rejected
from swarmnode.pipeline.plans.recovery import deadline_s, predicted_s, repaired_path
from swarmnode.pipeline.running.journeys import Drive, Failure, Journey
from swarmnode.pipeline.running.seat import Feed, Passage
from swarmnode.pipeline.running.workplace import Workplace, visit_of
from swarmnode.pipeline.stages.objectives import LossInputs
from swarmnode.pipeline.stages.visits import StageInput, Visit
from swarmnode.pipeline.wire.messages import (
    MAX_ATTEMPTS,
    Abandoned,
    Backward,
    Finished,
    Forward,
    Hop,
    Lost,
    Passed,
    Refusal,
    Trouble,
)

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 3.0
"""For the answer of a few bytes to where a micro-batch is."""

FULL_PAUSE_S, MAX_FULL_PAUSE_S = 0.2, 2.0
"""Before members that had no slot for a micro-batch are asked again: each time twice as long."""


class Driver:
    """The agents of one data node under one plan."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._plan = place.seat.plan
        self.agents = tuple(agent for agent, path in enumerate(self._plan.paths) if path[0] == place.own)
        self._journeys: dict[int, Journey] = {}
        """By agent, the newest."""
        self._load: Counter[int] = Counter()
        """By node, our micro-batches that hold a slot there."""
        self._drive = Drive(0.0)

    async def run(self, feed: Feed) -> Drive:
        """One iteration's micro-batches, until each is back or given up."""
        clock = asyncio.get_running_loop().time
        self._drive = Drive(clock())
        async with asyncio.TaskGroup() as agents:
            for rank, agent in enumerate(self.agents):
                agents.create_task(self._run_agent(agent, rank, feed))
        self._drive.ended_s = clock()
        self._journeys.clear()
        return self._drive

    def admit(self, message: Hop) -> None:
        """Raises Rejected: unknown_work for what is not awaited, or not any more; wrong_shape."""
        self._awaiting(message)

    def take(self, message: Hop, values: Tensor) -> None:
        """What was awaited is here. Raises as `admit`."""
        self._awaiting(message).settle(values)

    def hear_of(self, peer_id: str, message: Lost) -> None:
        """Somebody on a path says that a node is not passed. Raises Rejected: unknown_work, wrong_route."""
        for journey in self._journeys.values():
            if journey.micro_batch != message.micro_batch or journey.visit.attempt != message.attempt:
                continue
            if not 0 < message.position < len(journey.path):
                break
            near = journey.path[message.position - 1 : message.position + 2]
            if peer_id not in {self._place.seat.peers[node] for node in near}:
                raise Rejected(Refusal.WRONG_ROUTE, f"node {message.position} is not a neighbour's")
            journey.settle(Failure(message.position, message.fault))
            return
        raise Rejected(Refusal.UNKNOWN_WORK, f"micro-batch {message.micro_batch} is not under way so")

    def lose(self, node: int) -> None:
        """A node is gone: what is on its way past it need not be waited for."""
        for journey in self._journeys.values():
            if node in journey.path[1:]:
                journey.settle(Failure(journey.path.index(node), "silent"))

    def finished(self, node: int) -> Finished:
        """What a member has to know of the iteration that `run` has ended."""
        back = [(number, j.visit.attempt) for number, j in self._drive.back.items() if node in j.path]
        return Finished(
            plan=self._place.seat.digest,
            iteration=self._place.iteration,
            deadline_s=self._place.courier.deadline_s(node),
            node=self._place.own,
            back=tuple(sorted(back)),
        )

    def _awaiting(self, message: Hop) -> Journey:
        journey = self._journeys.get(message.agent)
        if (
            journey is None
            or journey.awaits is not type(message)
            or (journey.visit, journey.path) != (visit_of(message), message.path)
        ):
            raise Rejected(Refusal.UNKNOWN_WORK, f"{visit_of(message)} is not awaited here")
        if message.tensor.shape != journey.shape:
            raise Rejected(Refusal.WRONG_SHAPE, f"{message.tensor.shape}, it left as {list(journey.shape)}")
        return journey

    async def _run_agent(self, agent: int, rank: int, feed: Feed) -> None:
        """Its waves, one after the other. `rank`: its place among the agents here."""
        instance = self._plan.instance
        await asyncio.sleep(rank * self._place.release_s)
        for wave in range(instance.waves):
            path = self._living(self._plan.paths[agent])
            inputs = feed.take(agent, wave, tuple(instance.stage_of[node] for node in path))
            if inputs is None:
                return
            await self._bring(agent, wave, path, inputs, feed)

    def _living(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """The path without nodes that are known to be lost."""
        if self._place.lost.isdisjoint(path):
            return path
        return repaired_path(self._plan, path, self._place.lost, (), self._load) or path

    async def _bring(
        self, agent: int, wave: int, path: tuple[int, ...], inputs: LossInputs, feed: Feed
    ) -> None:
        """One micro-batch, attempt after attempt."""
        place, drive, tried = self._place, self._drive, set[int]()
        clock, planned = asyncio.get_running_loop().time, self._plan.paths[agent]
        number, visited, pause_s = place.micro_batch(agent, wave), set[int](), FULL_PAUSE_S
        for attempt in range(min(place.settings.max_attempts, MAX_ATTEMPTS)):
            visited.update(path[1:])
            began_s = clock()
            if began_s > drive.began_s + place.budget_s:
                break
            shape = torch.Size((*inputs.batch.input_ids_BT.shape, place.worker.model.hidden_size))
            journey = Journey(Visit(agent, place.iteration, wave, attempt), number, path, shape)
            self._journeys[agent] = journey
            self._load.update(path)
            try:
                failure = await self._attempt(journey, inputs, feed)
            finally:
                self._load.subtract(path)
                journey.awaits = None
            if failure is None:
                drive.tokens += inputs.tokens
                self._note_skips(agent, path)
                if path == planned and attempt == 0:
                    took_s, wanted_s = clock() - began_s, predicted_s(self._plan)[agent][wave]
                    drive.passages.append(Passage(path, took_s / place.scale, wanted_s))
                return
            drive.retried += 1
            node = path[failure.position]
            logger.info("micro-batch %d does not pass node %d: %s", number, node, failure.trouble)
            if failure.position == 0:
                break  # Our own layers, or the loss, have no finite numbers for it.
            if failure.trouble == "silent":
                drive.lost.add(node)
                place.has_lost(node, f"micro-batch {number} did not get past it")
            tried.add(node)
            again = repaired_path(self._plan, path, place.lost, tried - place.lost, self._load)
            if again is None:
                # All that live were tried: their slots are free when their own micro-batches have passed.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_FULL_PAUSE_S)
                tried.clear()
                again = repaired_path(self._plan, path, place.lost, (), self._load)
            if again is None:
                break
            path = again
        drive.given_up += 1
        self._journeys.pop(agent, None)
        for node in visited - place.lost:
            place.spawn(self._abandon(node, number))

    async def _attempt(self, journey: Journey, inputs: LossInputs, feed: Feed) -> Failure | None:
        """There and back. None: it is back and counts."""
        place, visit = self._place, journey.visit
        worker, queue, batch = place.worker, place.queue, inputs.batch
        item = StageInput(visit, batch.input_ids_BT, inputs.tokens, batch.layout)
        stages = tuple(self._plan.instance.stage_of[node] for node in journey.path)
        inputs, objective = replace(inputs, path=stages), feed.objective

        def forward() -> Tensor:
            worker.reserve(visit.agent)
            return worker.forward(item)

        def backward(gradient_BTD: Tensor) -> None:
            worker.backward(visit, gradient_BTD)
            worker.commit(visit)

        limit_s = self._limit_s(visit)
        homeward = False
        try:
            async with asyncio.timeout(limit_s):
                hidden_BTD = await queue.perform("forward", visit.agent, forward, begins=True)
                arrived = await self._there(journey, hidden_BTD, inputs)
                if isinstance(arrived, Failure):
                    return arrived
                found = await queue.perform(
                    "loss",
                    visit.agent,
                    lambda: worker.loss(
                        visit, arrived, lambda hidden: objective(worker.model, hidden, inputs)
                    ),
                )
                homeward = True
                gradient = await self._back(journey, found.gradient_BTD)
                if isinstance(gradient, Failure):
                    return gradient
        except Rejected as rejected:
            logger.warning("micro-batch %d is given up: %s", journey.micro_batch, rejected)
            return Failure(0, "refused")
        except TimeoutError:
            return await self._culprit(journey, homeward=homeward)
        # From here on the others count it, so it is back whatever becomes of our own part.
        self._drive.back[journey.micro_batch] = journey
        try:
            await queue.perform("backward", visit.agent, lambda: backward(gradient))
        except Rejected as rejected:
            logger.warning("our part of micro-batch %d is dropped: %s", journey.micro_batch, rejected)
        self._drive.outputs.append(found.output)
        return None

    def _limit_s(self, visit: Visit) -> float:
        """How long an attempt may take: a neighbour that is silent is noticed before."""
        settings = self._place.settings
        limit_s = deadline_s(self._plan, visit.agent, visit.wave, slack=settings.slack, floor_s=0.0)
        return limit_s * self._place.scale + settings.hop_timeout_s + settings.grace_s

    async def _there(self, journey: Journey, hidden_BTD: Tensor, inputs: LossInputs) -> Tensor | Failure:
        """Along the path: hidden states behind its end."""
        if len(journey.path) == 1:
            return hidden_BTD
        layout = inputs.batch.layout
        shares = layout is not None and any(prompt is not None for prompt in layout.prompts)
        sending = self._place.courier.forward(
            journey,
            1,
            hidden_BTD,
            tokens=inputs.tokens,
            lengths=layout.lengths if layout is not None else (),
            prompts=layout.prompts if layout is not None and shares else (),
        )
        return await self._answer_to(journey, 1, sending, Forward)

    async def _back(self, journey: Journey, gradient_BTD: Tensor) -> Tensor | Failure:
        """Along the path in reverse: the gradient of what we handed on."""
        last = len(journey.path) - 1
        if last == 0:
            return gradient_BTD
        sending = self._place.courier.backward(journey, last, gradient_BTD)
        return await self._answer_to(journey, last, sending, Backward)

    async def _answer_to(
        self, journey: Journey, position: int, sending: Coroutine[Any, Any, Trouble | None], kind: type[Hop]
    ) -> Tensor | Failure:
        """What comes home of what is sent to the node at `position`. A node that is known to be gone is not
        waited for until the message's deadline."""
        arrival = journey.expect(kind)

        async def send() -> None:
            trouble = await sending
            if trouble is not None and not arrival.done():
                journey.settle(Failure(position, trouble))

        task = self._place.spawn(send())
        try:
            found = await arrival
        except asyncio.CancelledError:
            task.cancel()
            raise
        if isinstance(found, Failure):
            task.cancel()
        return found

    async def _culprit(self, journey: Journey, *, homeward: bool) -> Failure:
        """Who has a micro-batch that is overdue: all are asked, the first that has not handed it on is it."""
        journey.awaits = None
        positions = range(1, len(journey.path))
        async with asyncio.TaskGroup() as asking:
            answers = [
                asking.create_task(self._has_passed(journey, position, homeward)) for position in positions
            ]
        passed = [answer.result() for answer in answers]
        order = list(zip(positions, passed, strict=True))
        if homeward:
            order.reverse()
        guilty = next((position for position, has in order if not has), order[-1][0] if order else 0)
        return Failure(guilty, "silent" if guilty else "refused")

    async def _has_passed(self, journey: Journey, position: int, homeward: bool) -> bool:
        visit = journey.visit
        question = Passed(
            plan=self._place.seat.digest, iteration=visit.iteration, attempt=visit.attempt,
            deadline_s=min(ASK_TIMEOUT_S, self._place.settings.hop_timeout_s),
            micro_batch=journey.micro_batch, position=position, homeward=homeward,
        )  # fmt: skip
        return await self._place.courier.message(journey.path[position], question) is None

    async def _abandon(self, node: int, micro_batch: int) -> None:
        message = Abandoned(
            plan=self._place.seat.digest,
            iteration=self._place.iteration,
            deadline_s=self._place.courier.deadline_s(node),
            micro_batch=micro_batch,
        )
        await self._place.courier.message(node, message)

    def _note_skips(self, agent: int, path: tuple[int, ...]) -> None:
        visited = {self._plan.instance.stage_of[node] for node in path}
        self._drive.skipped.update(set(self._plan.stages(agent)) - visited)
