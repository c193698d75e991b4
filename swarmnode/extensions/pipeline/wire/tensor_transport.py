"""Activations and gradients between the members of a pipeline: sent, answered, never taken twice.

stage_context.py -> [TensorTransport.send] -> member_streams.py -> [TensorTransport] of another member
                                                                    -> its MessageHandler

`send` makes one attempt. It returns what the other member says, and raises when there is no answer: then the
message may have been taken or not, and sending it again is safe. Choosing another member, or giving up, is
decided above (recovery.py). A message is done when MessageHandler.take has seen all of it; the handler knows
the same message again, which is answered without its payload.
"""

from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

from swarmnode.extensions.pipeline.wire.hop_messages import Message
from swarmnode.extensions.pipeline.wire.incoming_streams import Incoming, Reply, ServiceHandler
from swarmnode.extensions.pipeline.wire.member_streams import MemberStreams
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers, check_sender
from swarmnode.extensions.pipeline.wire.refusals import MemberRefused, Refusal
from swarmnode.extensions.pipeline.wire.services import MemberService
from swarmnode.network.streams import Buffer


class MessageHandler(Protocol):
    """The receiver of messages: a stage or a driver. It raises Rejected with a `Refusal` to refuse one."""

    async def admit(self, peer_id: str, message: Message) -> bool:
        """Called before the payload is read: shape, codec, a free slot. Returns False if this very message
        was taken before. It may wait until the message can be taken, and must not change anything."""
        ...

    async def take(self, peer_id: str, message: Message, payload: bytearray) -> None:
        """Called with the whole payload, to be decoded and kept unless another stream was faster.

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
        self._plans: dict[str, PlanMembers] = {}

    async def __aenter__(self) -> Self:
        self._streams.incoming.begin(MemberService.HOPS, ServiceHandler(Message, self._respond, self._knows))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._plans.clear()
        await self._streams.incoming.end(MemberService.HOPS)

    @property
    def plans(self) -> Mapping[str, PlanMembers]:
        """The running plans, by digest."""
        return MappingProxyType(self._plans)

    def adopt(self, members: PlanMembers) -> None:
        """Accept messages of a plan from now on, until it is retired."""
        self._plans[members.plan] = members

    def retire(self, plan: str) -> None:
        """Refuse messages of a plan from now on. Unknown plans are ignored."""
        retired = self._plans.pop(plan, None)
        for peer_id in retired.peers if retired is not None else ():
            if not self._knows(peer_id):
                self._streams.forget(peer_id)

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
        """Take a message. Raises Rejected."""
        peer_id, message = incoming.peer_id, incoming.message
        check_sender(message, peer_id, self._plans)
        if await self._inbox.admit(peer_id, message):
            async with incoming.payload() as payload:
                await self._inbox.take(peer_id, message, payload)
        return Reply()
