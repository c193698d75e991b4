"""Activations and gradients between the members of a pipeline: sent, answered, never taken twice.

message_sender.py -> [TensorTransport.send] -> member_streams.py -> [TensorTransport] of another member
                                                                    -> its MessageHandler

`send` makes one attempt. It returns what the other member says, and raises when there is no answer: then the
message may have been taken or not, and sending it again is safe. Choosing another member, or giving up, is
decided above (recovery.py). A message counts as done when MessageHandler.take has seen it, complete:
the same message again is answered, not taken a second time.
"""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import Rejected
from swarmnode.extensions.pipeline.wire.hop_messages import Message
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers, check_sender
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused, Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.network.streams import Buffer

KEPT_PLANS = 2
"""Plans at once: the running one, and the former one, of which something may be on its way yet."""

MAX_REMEMBERED = 4096
"""Messages of one member that are remembered as done: several iterations."""


class MessageHandler(Protocol):
    """The receiver of messages: a stage or a driver. It raises Rejected with a `Refusal` to refuse one."""

    def admit(self, peer_id: str, message: Message) -> None:
        """Called before the payload is read: shape, codec, a free slot. It must not change anything."""
        ...

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        """Called with the whole payload, to be decoded and kept. Returning means: done, never again.

        It may be cancelled at its deadline; what it did by then must not count.
        """
        ...


class TensorTransport:
    """Sends and receives messages of the adopted plans.

    async with TensorTransport(streams, stage) as transport:
        transport.adopt(PlanMembers(digest, peers, own=2))
        refusal = await transport.send(peer_id, ForwardHop(...), encoded.payload, timeout_s=10.0)
    """

    def __init__(self, streams: MemberStreams, inbox: MessageHandler) -> None:
        self._streams = streams
        self._inbox = inbox
        self._plans = BoundedDict[str, PlanMembers](KEPT_PLANS)
        self._answers: dict[tuple[str, int], asyncio.Future[Rejected | None]] = {}
        """By peer and hash of a message that is being taken."""
        self._done: dict[str, BoundedDict[int, None]] = {}
        """By peer, the hashes of messages that were taken."""

    async def __aenter__(self) -> Self:
        self._streams.incoming.begin(MemberService.HOPS, ServiceHandler(Message, self._respond, self._knows))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._plans.clear()
        await self._streams.incoming.end(MemberService.HOPS)

    def adopt(self, members: PlanMembers) -> None:
        """Accept messages of this plan and of the one before it from now on."""
        former = {peer_id for plan in self._plans.values() for peer_id in plan.peers}
        self._plans[members.plan] = members
        for peer_id in former:
            if not self._knows(peer_id):
                self._streams.forget(peer_id)
                self._done.pop(peer_id, None)

    async def send(
        self, peer_id: str, message: Message, payload: Buffer = b"", *, timeout_s: float
    ) -> Refusal | None:
        """Send a message in one attempt. Returns None if it was taken, now or before.

        Raises RequestTimeout, PeerUnreachable, HostDown; ValueError when the payload is not the message's.
        """
        try:
            await self._streams.ask(
                peer_id, MemberService.HOPS, message, type(None), timeout_s=timeout_s, payload=payload
            )
        except MemberRefused as refused:
            return refused.refusal
        return None

    def _knows(self, peer_id: str) -> bool:
        return any(peer_id in members.peers for members in self._plans.values())

    async def _respond(self, incoming: Incoming[Message]) -> Reply:
        """Take a message. The first stream that lives to bring it settles it for all. Raises
        Rejected."""
        peer_id, message = incoming.peer_id, incoming.message
        check_sender(message, peer_id, self._plans)
        key = peer_id, hash(message)
        if key[1] in self._done.get(peer_id, ()):
            return Reply()
        while (pending := self._answers.get(key)) is not None:
            rejected = await asyncio.shield(pending)
            if rejected is None:
                return Reply()
            if rejected.reason != Refusal.INTERRUPTED:
                raise rejected
        pending = self._answers[key] = asyncio.get_running_loop().create_future()
        outcome: Rejected | None = Rejected(Refusal.INTERRUPTED)
        try:
            await self._take(incoming)
            self._done.setdefault(peer_id, BoundedDict(MAX_REMEMBERED))[key[1]] = None
            outcome = None
        except Rejected as rejected:
            outcome = rejected
            raise
        finally:
            del self._answers[key]
            pending.set_result(outcome)
        return Reply()

    async def _take(self, incoming: Incoming[Message]) -> None:
        self._inbox.admit(incoming.peer_id, incoming.message)
        async with incoming.payload() as payload:
            await self._inbox.take(incoming.peer_id, incoming.message, payload)
