"""One member of a pipeline: its seat under the plan, the messages it gets, and its iterations.

TensorTransport -> [PipelineMember: Inbox] -> relay.py (the way of others' micro-batches)
membership.py (seat)        |              -> driver.py (own micro-batches, on a data node)
                            |              -> closing.py (the end of an iteration)
                            v
                     IterationReport

Messages of the iteration that runs and of the next one are taken; all else is refused before its tensor is
read. Members without data serve, and step when the data nodes have finished. Seats change between iterations.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from swarmnode.errors import ModelError, Rejected
from swarmnode.identity.keys import NodeKey
from swarmnode.network.streams import StreamHost
from swarmnode.pipeline.keeping.combining import GradientExchange
from swarmnode.pipeline.plans.simulator import simulate
from swarmnode.pipeline.running.aligning import Offer, nobody
from swarmnode.pipeline.running.closing import Closed, Closing, report_of
from swarmnode.pipeline.running.courier import LARGE_ELEMENTS, Courier
from swarmnode.pipeline.running.driver import Driver
from swarmnode.pipeline.running.relay import Relay
from swarmnode.pipeline.running.seat import Feed, IterationReport, MemberSettings, Reload, Seat
from swarmnode.pipeline.running.term import Term
from swarmnode.pipeline.running.work import IdleWork, Order, StageQueue, WorkTimes
from swarmnode.pipeline.running.workplace import Workplace
from swarmnode.pipeline.stages.stage import StageWorker
from swarmnode.pipeline.stages.stage_state import StageState
from swarmnode.pipeline.wire.codec import decode
from swarmnode.pipeline.wire.emulated import EmulatedCompute
from swarmnode.pipeline.wire.inbound import TransportLimits
from swarmnode.pipeline.wire.messages import (
    Finished,
    Hop,
    Message,
    Refusal,
)
from swarmnode.pipeline.wire.roster import Roster
from swarmnode.pipeline.wire.transport import Pace, TensorTransport

logger = logging.getLogger(__name__)

T = TypeVar("T")

LIMITS = TransportLimits(max_in_flight=16, max_streams_per_peer=32)
"""Several micro-batches are under way between two members, and an emulated link holds each for long."""


class PipelineMember:
    """Serves one stage, and trains where it has data.

    async with PipelineMember(host, key=key, averager=exchange) as member:
        member.seat(Seat(plan, digest(plan), peers, own=2, iteration=0), worker, optimizer)
        report = await member.train(feed)        # on a data node
        await member.wait_step(1)                # elsewhere
    """

    def __init__(
        self,
        host: StreamHost,
        *,
        key: NodeKey,
        averager: GradientExchange,
        settings: MemberSettings | None = None,
        compute: EmulatedCompute | None = None,
        pace: Pace | None = None,
        idle: IdleWork | None = None,
        reload: Reload | None = None,
        limits: TransportLimits = LIMITS,
    ) -> None:
        """`key`: the host's. `reload`: how the weights of the majority are fetched; without, a member whose
        weights differ has lost track."""
        self.settings = settings or MemberSettings()
        self.on_lost: Callable[[str, str], None] = _ignore
        """Called with a peer id and why we think that it is gone. It may be alive all the same."""
        self._key = key
        self._averager = averager
        self._compute = compute
        self._reload = reload
        self._transport = TensorTransport(host, self, limits=limits, pace=pace)
        self._queue = StageQueue(compute=compute, idle=idle)
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._started: set[asyncio.Task[None]] = set()
        self._term: Term | None = None
        self._steps = 0
        """Under the last seat, when it was given up."""
        self._digest = ""
        self._training = False

    async def __aenter__(self) -> Self:
        """Raises HostDown."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._queue)
            await stack.enter_async_context(self._tasks)
            await stack.enter_async_context(self._transport)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for task in tuple(self._started):
            task.cancel()
        if self._term is not None:
            self._term.ended.cancel()
        await self._stack.__aexit__(exc_type, exc, tb)

    @property
    def iteration(self) -> int:
        """Optimizer steps taken; without a seat those of the last one, 0 before the first."""
        return self._term.place.iteration if self._term is not None else self._steps

    @property
    def digest(self) -> str:
        """Of our weights after the last step, as the others were told; empty before the first."""
        return self._digest

    @property
    def lost_track(self) -> bool:
        """Whether this member missed the end of an iteration. It serves again with a new seat and weights."""
        return self._term is not None and self._term.lost_track

    @property
    def stepped(self) -> dict[int, int]:
        """By node: the optimizer steps that it has told us of. On a data node."""
        return dict(self._term.stepped) if self._term is not None else {}

    @property
    def lost(self) -> frozenset[str]:
        """Peers of the plan that did not answer us and have said nothing since."""
        place = self._term.place if self._term is not None else None
        return frozenset(place.seat.peers[node] for node in place.lost) if place is not None else frozenset()

    @property
    def times(self) -> WorkTimes:
        """What the worker thread did since the start."""
        return self._queue.times

    @property
    def transport(self) -> TensorTransport:
        return self._transport

    def lose(self, peer_id: str, why: str) -> None:
        """A peer is known to be gone (membership.py): nothing more is sent along it in this iteration, and
        what is on its way past it starts again."""
        term = self._term
        if term is not None and peer_id in term.place.seat.peers:
            node = term.place.seat.peers.index(peer_id)
            term.place.has_lost(node, why)
            term.driver.lose(node)

    async def in_stage_thread(self, work: Callable[[], T]) -> T:
        """Do something with the worker or its model where its tasks run, behind the one that runs."""
        return await self._queue.call(work)

    def seat(
        self,
        seat: Seat,
        worker: StageWorker,
        optimizer: torch.optim.Optimizer,
        *,
        start: StageState | None = None,
        offer: Offer = nobody,
    ) -> None:
        """Take a place: a new plan, a new stage, or both. Between iterations; what is left of one is dropped.

        `optimizer`: of `worker.model.trainable().values()`. `start`: the stage's state with its moments; None
        where it may not be the one that the pipeline is at. `offer` is given that of each step. Raises
        ModelError while `train` runs.
        """
        former = self._rise()
        scale = self._compute.scale if self._compute is not None else 1.0
        timeline, lost = simulate(seat.plan), set[int]()
        forward_s = seat.plan.instance.forward_s[seat.own] * scale
        place = Workplace(
            seat=seat,
            worker=worker,
            queue=self._queue,
            courier=Courier(self._transport, seat, self.settings, key=self._key, scale=scale, lost=lost),
            settings=self.settings,
            spawn=self._spawn,
            report_lost=lambda node, why: self.on_lost(seat.peers[node], why),
            scale=scale,
            makespan_s=timeline.makespan_s * scale,
            release_s=forward_s if self._compute is not None else 0.0,
            iteration=seat.iteration,
            lost=lost,
        )
        self._queue.adopt(Order.of(seat.plan, seat.own, timeline, scale=scale))
        self._queue.post(_prepare, worker, seat.iteration)
        self._term = term = Term(
            place,
            Relay(place),
            Driver(place),
            Closing(place, optimizer, self._averager, self._reload, start=start, offer=offer),
            asyncio.get_running_loop().create_future(),
        )
        term.iterations = self._spawn(self._iterate(term))
        self._transport.adopt(Roster(seat.digest, seat.peers, seat.own))
        # Of the former plan something may be on its way yet; who was left out of it before is a stranger.
        self._forget_plans(keep={seat.digest, former})

    def unseat(self) -> None:
        """Give up the place: the plan that runs now has no stage for us. Between iterations.

        Nothing is taken from anybody, and the stage's weights are let go. Raises ModelError as `seat`.
        """
        self._rise()
        self._queue.adopt(Order())
        self._forget_plans(keep=())

    def _rise(self) -> str | None:
        """End the term; its plan's digest. Raises ModelError while `train` runs."""
        if self._training:
            raise ModelError("a seat cannot change while an iteration runs", hint="await train first")
        former, self._term = self._term, None
        if former is None:
            return None
        self._steps = former.place.iteration
        former.relay.close()
        former.ended.cancel()
        if former.iterations is not None:
            former.iterations.cancel()
        return former.place.seat.digest

    def _forget_plans(self, *, keep: Collection[str | None]) -> None:
        for plan in self._transport.rosters.keys() - keep:
            self._transport.retire(plan)

    async def train(self, feed: Feed) -> IterationReport:
        """One iteration of a data node, to its end: the step is taken. Raises ModelError without a seat."""
        term = self._term
        if term is None or self._training or self.lost_track:
            raise ModelError("this member cannot train", hint="it needs a seat, and one iteration at a time")
        place, clock = term.place, asyncio.get_running_loop().time
        iteration, ended = place.iteration, term.ended
        busy_s, stragglers = self._queue.times.busy_s, term.relay.stragglers
        self._training = True
        try:
            term.closing.begin()
            drive = await term.driver.run(feed)
            for node in sorted(node for nodes in place.seat.plan.instance.stages for node in nodes):
                if node == place.own:
                    term.closing.hear(term.driver.finished(node))
                else:
                    self._spawn(self._finish(place, term.driver.finished(node), node))
            closed = await asyncio.shield(ended)
        finally:
            self._training = False
        ended_s = clock()
        return report_of(
            iteration,
            drive,
            closed,
            ended_s=ended_s,
            busy_s=self._queue.times.busy_s - busy_s,
            stragglers=term.relay.stragglers - stragglers,
        )

    async def wait_step(self, iteration: int) -> None:
        """Wait until so many optimizer steps are taken. Raises ModelError when this member has lost track."""
        while self.iteration < iteration:
            if self._term is None:
                raise ModelError("a member without a seat takes no steps")
            closed = await asyncio.shield(self._term.ended)
            if closed.lost_track:
                raise ModelError("this member has missed the end of an iteration", hint="give it a new seat")

    def admit(self, peer_id: str, message: Message) -> None:
        """Inbox: whether a message would be taken. Raises Rejected."""
        term = self._term
        if term is None:
            raise Rejected(Refusal.UNKNOWN_WORK, "no plan is running here")
        term.check(peer_id, message)
        term.check_origin(message)

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        """Inbox: a whole message. Raises Rejected."""
        term = self._term
        values = None
        if isinstance(message, Hop):
            large = message.tensor.size > LARGE_ELEMENTS
            header = message.tensor
            values = await asyncio.to_thread(decode, header, payload) if large else decode(header, payload)
        if term is None or term is not self._term:
            raise Rejected(Refusal.UNKNOWN_WORK, "the seat has changed meanwhile")
        term.check(peer_id, message)
        term.take(peer_id, message, values)

    async def _iterate(self, term: Term) -> None:
        """Close iteration after iteration, until this member has lost track."""
        while True:
            knows = await term.closing.ended()
            term.relay.close()
            if not knows:
                logger.warning("nobody told us how iteration %d ended", term.place.iteration)
                term.place.queue.post(term.place.worker.take_gradients)
                term.ended.set_result(Closed(lost_track=True))
                return
            closed = await term.closing.close()
            self._digest = closed.digest
            ended, term.ended = term.ended, asyncio.get_running_loop().create_future()
            ended.set_result(closed)
            if closed.lost_track:
                term.ended.set_result(closed)
                return
            self._queue.begin_iteration()
            if term.relay.begin_iteration():
                term.closing.begin()

    async def _finish(self, place: Workplace, message: Finished, node: int) -> None:
        if await place.courier.message(node, message) == "silent":
            place.has_lost(node, f"did not hear that iteration {message.iteration} is over")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._started.add(task)
        task.add_done_callback(self._started.discard)
        return task


def _ignore(peer_id: str, why: str) -> None:
    logger.info("%s seems to be gone: %s", peer_id, why)


def _prepare(worker: StageWorker, iteration: int) -> None:
    """In the worker thread: forget what was before."""
    worker.take_gradients()
    worker.iteration = iteration
