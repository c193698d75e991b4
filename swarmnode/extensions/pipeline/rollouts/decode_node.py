"""Generation steps between members: each goes around its path once, from the data node and back to it.

remote_chain.py (data node) -> [DecodeNode.send_around] -> DecodeNode of the next node -> ... -> the data
                                                           |                                         node
                                             StageCaches, in the thread of its stage

    data node 0           node 3         node 5         data node 0
    embed, own layers -> own layers -> own layers -> norm, head, sampling

A path of n nodes costs n messages per token; if the data node asked each node in turn, it would be 2 (n - 1).
Between continents this determines the speed of generation, since each message takes 50 to 150 ms. So no node
waits for an acknowledgement: the result that comes around is the answer. A node that cannot continue tells
the data node (`Halted`). A node that refuses a step, or ends its stream before it has passed the step on, is
asked again for a while (decode_hops.py). A node that falls silent is either known to be gone
(in_flight_steps.py), or the node before it gives it up in the end.

A stage computes only steps of the plan that it is held under, because it may have other layers under another
one.

A step that arrives twice changes nothing (stage_caches.py), and the worst that any failure here causes is
that a step is sent again. So nothing has to happen exactly once.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec
from torch import Tensor

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import NetworkError, Rejected
from swarmnode.extensions.pipeline.rollouts.chain import ChainFeed, Stopped, StopReason, stopped_by
from swarmnode.extensions.pipeline.rollouts.decode_hops import DecodeHops
from swarmnode.extensions.pipeline.rollouts.decode_messages import (
    MAX_DETAIL,
    Closed,
    DecodeMessage,
    DecodeStep,
    Halted,
    check_message,
)
from swarmnode.extensions.pipeline.rollouts.in_flight_steps import InFlightSteps
from swarmnode.extensions.pipeline.rollouts.routing import Route
from swarmnode.extensions.pipeline.rollouts.stage_caches import Segments, SessionKey, StageCaches
from swarmnode.extensions.pipeline.stages.stage_model import StageModel
from swarmnode.extensions.pipeline.wire.codec import decode
from swarmnode.extensions.pipeline.wire.hop_messages import CodecName, TensorHeader
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.refusals import Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService

logger = logging.getLogger(__name__)

POLL_S = 0.02
MAX_POLL_S = 0.5
"""First and longest pause between checks, in a step of the next policy version, for our new weights."""

TELL_TIMEOUT_S = 10.0
"""Time limit of a message that the receiver can do without."""

NUMBER_BITS = 52
"""Number of bits in the number of a feed."""

MAX_REMEMBERED = 1024
"""Number of sessions whose path is remembered, and of steps that were passed on."""

_T = TypeVar("_T")


class RunInStageThread(Protocol):
    """Runs a function in the stage's thread, between its other work, and returns the result."""

    def __call__(self, fn: Callable[[], _T], /) -> Awaitable[_T]: ...


class DecodeNode:
    """One member's part in generation: computes the steps that pass it, and sends and receives its own.

    async with DecodeNode(streams, run_in_stage_thread=work.run, version=lambda: worker.iteration) as node:
        node.hold(StageCaches(worker.model, max_bytes=...))
        node.adopt(PlanMembers(digest, peers, own=2))
    """

    def __init__(
        self,
        streams: MemberStreams,
        *,
        run_in_stage_thread: RunInStageThread,
        version: Callable[[], int],
        codec: CodecName = "none",
    ) -> None:
        """`version`: returns the policy version of our own stage. It is called in the stage's thread, in
        which it changes together with the weights."""
        self.run_in_stage_thread = run_in_stage_thread
        self.caches: StageCaches | None = None
        self.plan: str | None = None
        """Digest of the plan under which we hold our stage. None if we have no stage or are about to change
        it."""
        self.on_silent: Callable[[str, str], None] = _ignore
        """Called with the peer id of a member that keeps our steps waiting, and the reason."""
        self.steps = 0
        """Number of steps computed here for other members."""
        self._version = version
        self._streams = streams
        self._members: PlanMembers | None = None
        """Members of the most recently adopted plan, if any."""
        self._in_flight = InFlightSteps(streams.incoming.refused)
        self._hops = DecodeHops(
            streams, codec, self._in_flight,
            plan=lambda: self.plan, suspect=lambda peer_id, why: self.on_silent(peer_id, why),
        )  # fmt: skip
        self.settled = asyncio.Event()
        """Set while our own stage is not being changed."""
        self._routes = BoundedDict[tuple[str, int], tuple[str, tuple[int, ...]]](MAX_REMEMBERED)
        self._passed_on = BoundedDict[tuple[str, int], None](MAX_REMEMBERED)
        """Owner and number of the steps passed on last. Computed again, they would undo later ones."""

    async def __aenter__(self) -> Self:
        handler = ServiceHandler(DecodeMessage, self._respond, self._knows)
        self._streams.incoming.begin(MemberService.GENERATION, handler)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.plan = None
        await self._streams.incoming.end(MemberService.GENERATION)
        await self._hops.end()

    def hold(self, caches: StageCaches | None) -> None:
        """Replace our own stage, for the plan that is adopted next. Sessions of the former stage are
        forgotten, and we stop waiting for steps under way."""
        self.caches, self.plan = caches, None
        self.settled.clear()
        self._routes.clear()
        self._in_flight.replanned("our own stage changes")

    def adopt(self, members: PlanMembers | None) -> None:
        """Accept steps of this plan from now on. None: the plan has no stage for us."""
        self.settled.set()
        if members is None:
            return
        if members.plan != self.plan:
            self._in_flight.replanned("we have another plan")
        self.plan, self._members = members.plan, members

    def lose(self, peer_id: str, why: str) -> None:
        """Stop waiting for steps whose path includes a member that is gone."""
        self._in_flight.lose(peer_id, why)

    @property
    def members(self) -> PlanMembers:
        """The plan that was adopted last. There is one wherever rollouts are made."""
        assert self._members is not None, "rollouts are made under a plan"
        return self._members

    async def compute(
        self,
        plan: str,
        key: SessionKey,
        segments: Segments,
        hidden: Callable[[StageModel], Tensor],
        version: int,
    ) -> Tensor | Stopped:
        """Return the output of our own stage under this plan, once its weights have this version. The caller
        sets the deadline.

        `hidden` returns the input; it is called in the stage's thread. A returned Stopped has no node.
        """
        caches = self.caches
        if caches is None:
            return Stopped(StopReason.OTHER_PLAN, None, "holds no stage")

        def run() -> Tensor | Stopped | None:
            if self.plan != plan:
                return Stopped(StopReason.OTHER_PLAN, None, "holds its stage under another plan")
            own_version = self._version()
            # Members are at most one step apart, so we do not wait for a version farther ahead.
            if own_version > version or own_version + 1 < version:
                return Stopped(StopReason.OTHER_POLICY, None, f"has version {own_version}, not {version}")
            return None if own_version < version else caches.run(key, segments, hidden(caches.model))

        try:
            return await self._once(run)
        except Rejected as rejected:
            return stopped_by(rejected, None)

    async def moves_on(self, version: int, *, within_s: float) -> bool:
        """Wait until our own weights no longer have this version. Returns False if they still do."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._once(lambda: self._version() != version or None)
        return False

    async def _once(self, look: Callable[[], _T | None]) -> _T:
        """Call `look` in the stage's thread, repeatedly, until it returns something. The caller sets the
        deadline."""
        wait_s = POLL_S
        while (found := await self.run_in_stage_thread(look)) is None:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_POLL_S)
        return found

    # Data node

    async def send_around(self, feed: ChainFeed, hidden_ND: Tensor, *, timeout_s: float) -> Tensor | Stopped:
        """Send our own stage's output of a feed around its route. Returns the hidden states of the last
        tokens after the end of the route.

        Ends early with OTHER_PLAN if our own stage changes, and with LOST if a member of the path is gone.
        """
        route = feed.route
        if route.plan != self.plan:
            return Stopped(StopReason.OTHER_PLAN, None, "we have another plan")
        # Members off the path cannot guess the number. The dtype of the tensor is set when it is encoded.
        step = DecodeStep(
            plan=route.plan, session=feed.session, path=route.nodes, position=0,
            number=secrets.randbits(NUMBER_BITS), version=feed.version, segments=feed.segments,
            tensor=TensorHeader(dtype="float16", shape=tuple(hidden_ND.shape)),
        )  # fmt: skip
        return await self._hops.run(self.members, step, hidden_ND, timeout_s=timeout_s)

    async def close_session(self, route: Route, session: int) -> None:
        """Tell the other members to forget a session. A member that does not get the message drops the
        session when it is idle."""
        if route.plan == self.members.plan:
            closed = Closed(plan=route.plan, session=session, path=route.nodes, position=1)
            await self._close_next(self.members, closed)

    def _check_route(self, members: PlanMembers, message: DecodeStep | Closed) -> None:
        """Raises Rejected: wrong_route, unless the message follows the route of its session. The first step
        determines the route; after that, only members on it can send messages of the session."""
        key, route = (members.peers[message.path[0]], message.session), (message.plan, message.path)
        if self._routes.setdefault(key, route) != route:
            raise Rejected(Refusal.WRONG_ROUTE, f"a session along {message.path}")
        if isinstance(message, Closed):
            del self._routes[key]

    # Nodes on the path

    def _knows(self, peer_id: str) -> bool:
        return self._members is not None and peer_id in self._members.peers

    async def _respond(self, incoming: Incoming[DecodeMessage]) -> Reply:
        """Handle a message. A step is answered only after it has been passed on, so that its sender notices
        if we die with it."""
        message = incoming.message
        members = check_message(message, incoming.peer_id, self._members)
        if isinstance(message, Halted):
            self._in_flight.arrived(message, message.stopped)
            return Reply()
        if message.position < len(message.path):
            self._check_route(members, message)
        if isinstance(message, DecodeStep):
            halted = await self._go_on(members, message, incoming)
            if halted is not None:
                await self._tell(members.peers[message.path[0]], halted)
            return Reply()
        if (caches := self.caches) is not None:
            key = members.peers[message.path[0]], message.session
            await self.run_in_stage_thread(lambda: caches.close(key))
        await self._close_next(members, msgspec.structs.replace(message, position=message.position + 1))
        return Reply()

    async def _go_on(
        self, members: PlanMembers, step: DecodeStep, incoming: Incoming[DecodeMessage]
    ) -> Halted | None:
        """Compute a step and pass it on. Returns the reason and the position if that was not possible. Raises
        Rejected: unknown_plan, so that the node before sends it again until we have its plan."""
        clock, owner = asyncio.get_running_loop().time, members.peers[step.path[0]]
        until_s, work = clock() + incoming.timeout_s, (owner, step.number)
        if work in self._passed_on:
            return None  # Its sender did not hear so.
        async with incoming.payload() as payload:
            try:
                hidden_ND = decode(step.tensor, payload)
            except Rejected as rejected:
                return _halted(step, Stopped(StopReason.LOST, None, str(rejected)), max(step.position - 1, 1))
            if step.position == len(step.path):
                self._in_flight.arrived(step, hidden_ND)
                return None
            key = owner, step.session
            found_ND = await self.compute(step.plan, key, step.segments, lambda _: hidden_ND, step.version)
        stopped, position = found_ND, step.position
        if not isinstance(stopped, Stopped):
            self.steps += 1
            left_s, position = max(until_s - clock(), 0.001), step.position + 1
            stopped = await self._hops.pass_on(members, step, stopped, timeout_s=left_s)
            if stopped is None:
                self._passed_on[work] = None
        if stopped is not None and stopped.why is StopReason.OTHER_PLAN:
            raise Rejected(Refusal.UNKNOWN_PLAN, stopped.detail)
        return _halted(step, stopped, position) if stopped is not None else None

    async def _close_next(self, members: PlanMembers, closed: Closed) -> None:
        if closed.position < len(closed.path):
            await self._tell(members.peers[closed.target], closed)

    async def _tell(self, peer_id: str, message: Halted | Closed) -> None:
        """Send a message that the receiver can do without."""
        try:
            await self._streams.ask(
                peer_id, MemberService.GENERATION, message, type(None), timeout_s=TELL_TIMEOUT_S
            )
        except (NetworkError, Rejected) as error:
            logger.debug("%s did not get a %s: %s", peer_id, type(message).__name__, error)


def _ignore(peer_id: str, why: str) -> None:
    logger.debug("%s keeps a step waiting: %s", peer_id, why)


def _halted(step: DecodeStep, stopped: Stopped, position: int) -> Halted:
    return Halted(
        plan=step.plan, session=step.session, path=step.path, position=position, number=step.number,
        why=stopped.why, detail=stopped.detail[:MAX_DETAIL],
    )  # fmt: skip
