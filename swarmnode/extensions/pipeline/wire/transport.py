"""Activations and gradients between the members of a pipeline: sent, answered, never taken twice.

stage, driver -> [TensorTransport.send] -> stream of a StreamHost -> inbound.py of another member
                                                                      -> its MessageHandler

A stream carries one message at a time and is used again for the next: messages do not wait for each other
behind a large tensor, giving one up is closing its stream, and a warm stream has its window. Up to
`max_in_flight` messages are on their way to a member; further ones wait for their turn, which counts towards
their deadline.

`send` makes one attempt. It returns what the other member says, and raises when there is no answer: then the
message may have been taken or not, and sending it again, with the same attempt or a higher one, is safe.
Choosing another member, or giving up, is decided above (recovery).
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

import msgspec

from swarmnode.errors import NetworkError, PeerUnreachable, Rejected, RequestTimeout
from swarmnode.extensions.pipeline.wire.hop_messages import (
    CHUNK_BYTES,
    MAX_ANSWER_BYTES,
    VERSION,
    Message,
    Reply,
    ReplyFrame,
)
from swarmnode.extensions.pipeline.wire.inbound import (
    SUM_BYTES,
    MessageHandler,
    Receiver,
    TransportCounters,
    TransportLimits,
    receive_length,
    send_frame,
)
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.wire import (
    NO_PAYLOAD,
    Payload,
    decode_answer,
    encode_message,
    payload_bytes,
)
from swarmnode.network.streams import ByteStream, StreamHost

logger = logging.getLogger(__name__)

PROTOCOL = f"/swarmnode/extensions/pipeline/{VERSION}"

MAX_PLANS = 4
"""Plans at once: the running one, the next one, and former ones whose messages may still be under way."""


@dataclass(frozen=True, slots=True)
class ArrivalWindow:
    """Times by the event loop's clock between which the bytes of a message may arrive."""

    first_s: float
    last_s: float

    def at_s(self, share: float) -> float:
        """Return the time at which this share of the message has arrived; infinity if the last byte never
        does."""
        if math.isinf(self.last_s):
            return math.inf
        return self.first_s + share * (self.last_s - self.first_s)


class LinkPace(Protocol):
    """A link that is slower than the real one (extensions/pipeline/testing/emulated.py)."""

    def arrival(self, peer_id: str, size_bytes: int, now_s: float) -> ArrivalWindow:
        """Return the arrival window of a message. Called once for each message that starts on its way to a
        peer."""
        ...


@dataclass(slots=True)
class _Link:
    """The streams to one member."""

    turn: asyncio.Semaphore
    idle: list[ByteStream] = field(default_factory=list[ByteStream])


class TensorTransport:
    """Sends and receives messages of the adopted plans.

    async with TensorTransport(host, stage) as transport:
        transport.adopt(PlanMembers(digest, peers, own=2))
        reply = await transport.send(peer_id, ForwardHop(...), encoded.payload)
    """

    def __init__(
        self,
        host: StreamHost,
        inbox: MessageHandler,
        *,
        limits: TransportLimits | None = None,
        pace: LinkPace | None = None,
    ) -> None:
        self._host = host
        self._limits = limits or TransportLimits()
        self._pace = pace
        self._plans: dict[str, PlanMembers] = {}
        self._links: dict[str, _Link] = {}
        self._open: set[ByteStream] = set()
        self._leaving = False
        self.counters = TransportCounters()
        self._receiver = Receiver(inbox, self._plans, self._limits, self.counters)

    async def __aenter__(self) -> Self:
        """Raises HostDown."""
        await self._host.serve_streams(PROTOCOL, self._receiver.serve)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        # The host goes on to hand us streams; without a plan they are all of strangers.
        self._leaving = True
        self._plans.clear()
        for stream in tuple(self._open):
            self._close(stream)
        await self._receiver.end()

    @property
    def plans(self) -> Mapping[str, PlanMembers]:
        """The running plans, by digest."""
        return MappingProxyType(self._plans)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that senders hold here at the moment."""
        return self._receiver.reserved_bytes

    def adopt(self, members: PlanMembers) -> None:
        """Accept messages of a plan from now on. The MAX_PLANS latest plans stay accepted."""
        self._plans.pop(members.plan, None)
        self._plans[members.plan] = members
        while len(self._plans) > MAX_PLANS:
            self.retire(next(iter(self._plans)))

    def retire(self, plan: str) -> None:
        """Refuse messages of a plan from now on. Unknown plans are ignored."""
        self._plans.pop(plan, None)
        known = {peer for members in self._plans.values() for peer in members.peers}
        for peer_id in self._links.keys() - known:
            for stream in self._links.pop(peer_id).idle:
                self._close(stream)
        self._receiver.forget_strangers()

    async def send(self, peer_id: str, message: Message, payload: Payload = NO_PAYLOAD) -> Reply:
        """Send a message in one attempt, within `message.deadline_s` from now. Returns the answer.

        Raises RequestTimeout, PeerUnreachable, HostDown; ValueError when the payload is not the message's.
        """
        if len(payload.data) != payload_bytes(message):
            raise ValueError(f"{len(payload.data)} bytes for a message of {payload_bytes(message)}")
        link = self._links.setdefault(peer_id, _Link(asyncio.Semaphore(self._limits.max_in_flight)))
        until_s = asyncio.get_running_loop().time() + message.deadline_s
        try:
            async with asyncio.timeout_at(until_s), link.turn:
                return await self._deliver(peer_id, link, message, payload, until_s)
        except TimeoutError as error:
            raise RequestTimeout(f"{peer_id} did not take it within {message.deadline_s:g} s") from error

    async def _deliver(
        self, peer_id: str, link: _Link, message: Message, payload: Payload, until_s: float
    ) -> Reply:
        if link.idle:
            try:
                return await self._exchange(link.idle.pop(), link, message, payload, until_s)
            except PeerUnreachable as error:
                # Closed while nobody looked, and the others with it. A new stream tells whether the peer
                # is there; should it have taken the message, it will say so again.
                logger.debug("a kept stream to %s was dead: %s", peer_id, error)
                while link.idle:
                    self._close(link.idle.pop())
        if self._leaving:
            raise PeerUnreachable("we are leaving the pipeline")
        remaining_s = max(until_s - asyncio.get_running_loop().time(), 0.001)
        stream = await self._host.open_stream(peer_id, PROTOCOL, timeout_s=remaining_s)
        self._open.add(stream)
        return await self._exchange(stream, link, message, payload, until_s)

    async def _exchange(
        self, stream: ByteStream, link: _Link, message: Message, payload: Payload, until_s: float
    ) -> Reply:
        """Send one message on this stream. Returns the answer. Raises PeerUnreachable."""
        now_s = asyncio.get_running_loop().time()
        head = encode_message(msgspec.structs.replace(message, deadline_s=max(until_s - now_s, 0.001)))
        size_bytes = len(head) + len(payload.data)
        arrival = self._pace.arrival(stream.peer_id, size_bytes, now_s) if self._pace else None
        keep = False
        try:
            answer = await _converse(stream, head, payload, arrival)
            keep = answer.keep and self._links.get(stream.peer_id) is link
        finally:
            if keep:
                link.idle.append(stream)
            else:
                self._close(stream)
        self.counters.sent += 1
        self.counters.sent_bytes += size_bytes
        return answer.reply

    def _close(self, stream: ByteStream) -> None:
        stream.close()
        self._open.discard(stream)


async def _converse(
    stream: ByteStream, head: bytes, payload: Payload, arrival: ArrivalWindow | None
) -> ReplyFrame:
    """Write a message and listen for the answer meanwhile: a refusal stops the writing. Raises
    PeerUnreachable."""
    failure: NetworkError | Rejected | None = None
    answer: ReplyFrame | None = None
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(_write(stream, head, payload, arrival))
        try:
            length = await receive_length(stream, MAX_ANSWER_BYTES)
            answer = decode_answer(await stream.receive(length))
        except (NetworkError, Rejected) as error:
            failure = error
        writing.cancel()
    if answer is None:
        raise PeerUnreachable(f"no answer: {failure}") from failure
    return answer


async def _write(stream: ByteStream, head: bytes, payload: Payload, arrival: ArrivalWindow | None) -> None:
    total = max(len(payload.data), 1)
    try:
        await _reach(arrival, 0.0 if payload.data else 1.0)
        await send_frame(stream, head)
        for number, checksum in enumerate(payload.checksums):
            end = min((number + 1) * CHUNK_BYTES, total)
            await _reach(arrival, end / total)
            await stream.send(checksum.to_bytes(SUM_BYTES, "big"))
            await stream.send(payload.data[number * CHUNK_BYTES : end])
    except PeerUnreachable as error:
        # Whoever listens on the same stream meets the same end, and may find an answer before it.
        logger.debug("a stream to %s ended under a message: %s", stream.peer_id, error)


async def _reach(arrival: ArrivalWindow | None, share: float) -> None:
    """Wait until this share of a message may have arrived."""
    if arrival is None:
        return
    loop = asyncio.get_running_loop()
    wait_s = arrival.at_s(share) - loop.time()
    if math.isinf(wait_s):
        await loop.create_future()  # the link is cut: the deadline of the message ends this
    elif wait_s > 0:
        await asyncio.sleep(wait_s)
