"""Sends activations and gradients between members of a pipeline. No message is processed twice.

message_sender.py -> [TensorTransport.send] -> member_streams.py -> [TensorTransport] of another member
                                                                    -> its MessageHandler

`send` makes one attempt. It returns the other member's answer, and raises if there is none. The message may
or may not have been accepted then, and it is safe to send it again. Choosing another member, or giving up, is
left to the caller (recovery.py). A message is done when MessageHandler.take has processed it completely: if
the same message comes again, it is answered but not processed again.
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
"""Number of plans kept: the running one, and the former one, whose messages may still be on their way."""

MAX_REMEMBERED = 4096
"""Number of done messages to remember for each member: several iterations."""


class MessageHandler(Protocol):
    """The receiver of messages: a stage or a driver. It raises Rejected with a `Refusal` to refuse a
    message."""

    def admit(self, peer_id: str, message: Message) -> None:
        """Called before the payload is read, to check shape, codec and a free slot. Must not change
        anything."""
        ...

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        """Called with the whole payload, to decode and keep it. Once this returns, the message is done.

        It may be cancelled at its deadline; what it did until then must not count.
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
        """By peer and message hash, the outcome of a message that is being processed."""
        self._done: dict[str, BoundedDict[int, None]] = {}
        """By peer, the hashes of messages that are done."""

    async def __aenter__(self) -> Self:
        self._streams.incoming.begin(MemberService.HOPS, ServiceHandler(Message, self._respond, self._knows))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._plans.clear()
        await self._streams.incoming.end(MemberService.HOPS)

    def adopt(self, members: PlanMembers) -> None:
        """Accept messages of this plan, and of the one before it, from now on."""
        former = {peer_id for plan in self._plans.values() for peer_id in plan.peers}
        self._plans[members.plan] = members
        for peer_id in former:
            if not self._knows(peer_id):
                self._streams.forget(peer_id)
                self._done.pop(peer_id, None)

    async def send(
        self, peer_id: str, message: Message, payload: Buffer = b"", *, timeout_s: float
    ) -> Refusal | None:
        """Send a message in one attempt. Returns None if it was accepted, now or before.

        Raises RequestTimeout, PeerUnreachable, HostDown; ValueError if the payload does not fit the message.
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
        """Process a message. If several streams bring it, the first that succeeds settles it for all. Raises
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
            self._inbox.admit(peer_id, message)
            async with incoming.payload() as payload:
                await self._inbox.take(peer_id, message, payload)
            self._done.setdefault(peer_id, BoundedDict(MAX_REMEMBERED))[key[1]] = None
            outcome = None
        except Rejected as rejected:
            outcome = rejected
            raise
        finally:
            del self._answers[key]
            pending.set_result(outcome)
        return Reply()
