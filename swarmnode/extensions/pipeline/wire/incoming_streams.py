"""The answering half of the wire: checks what peers may ask, and limits the memory and time they may use.

stream of a member -> [IncomingStreams] -> the service that it asks: Incoming -> Reply

    asker                                        answerer
    prefix                                ->     our version? a service of ours, for this peer? length?
    message                               ->     decoded within its bounds; the service looks at it
    payload                               ->     memory reserved, then chunk by chunk, if the service wants it
                                          <-     answer, early when it is a refusal
                                          <-     body in chunks

The order matters: the cheapest refusals come first, and nothing is allocated before its size is known to be
within bounds and is reserved. Nothing here can wait forever: each chunk, message and answer has a deadline,
so memory held by a sender is always released. A busy member slows its senders down by making them wait for
memory.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from swarmnode.errors import PeerUnreachable, Rejected
from swarmnode.extensions.pipeline.wire.byte_budget import ByteBudget
from swarmnode.extensions.pipeline.wire.frames import (
    CHUNK_BYTES,
    AnswerFrame,
    Prefix,
    check_length,
    decode,
    encode,
    framed,
    receive_prefix,
)
from swarmnode.extensions.pipeline.wire.refusals import Refusal, Refused, reason_of
from swarmnode.extensions.pipeline.wire.services import LIMITS, MAX_TENSOR_BYTES, MemberMessage, MemberService
from swarmnode.network.streams import Buffer, ByteStream

logger = logging.getLogger(__name__)

SMALL_FRAME_BYTES = 64 * 1024
"""Larger messages count against the memory of their sender, like payloads."""

LEAST_BYTES_PER_S = 26_000.0
"""Slowest line that is still useful in a pipeline."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits on how much other members may use this machine."""

    max_in_flight: int = 16
    """Messages of one service that may be on their way to one member at once. Two keep a link busy; more
    share it, and an emulated link holds each for a long time."""
    max_inbound_bytes: int = 4 * MAX_TENSOR_BYTES
    """Bytes of payloads being received or checked at once, from all members together."""
    max_inbound_bytes_per_peer: int = 2 * MAX_TENSOR_BYTES
    """The same for a single member, so that it cannot lock the others out."""
    max_stranger_bytes: int = MAX_TENSOR_BYTES // 4
    """The same for all strangers together: room for four probes, in addition to that of members. Identities
    cost nothing, so a stranger has no share of its own."""
    max_streams_per_peer: int = 64
    """Enough for several services at `max_in_flight`, and for streams that the peer gave up and that are
    about to close."""
    max_stranger_streams: int = 64
    """Streams of all strangers together. Beyond this number, a stream that is waiting for its peer is closed
    to make room. An honest peer sends its message together with its stream, so its stream is not chosen,
    however many identities wait."""
    max_streams_per_stranger: int = 8
    header_timeout_s: float = 5.0
    """Time for a started message to be complete, in addition to its bytes at LEAST_BYTES_PER_S."""
    chunk_timeout_s: float = CHUNK_BYTES / LEAST_BYTES_PER_S
    """Time limit of a chunk."""
    reply_timeout_s: float = 5.0
    """Time for a sender to read its answer, and to close the stream if it was refused."""
    idle_timeout_s: float = 60.0
    """Time after which a stream without messages is closed. The next message opens another one."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a service: a record, optionally followed by many bytes."""

    content: Any = None
    body: Buffer = b""
    """Must not be modified until it is sent."""


M = TypeVar("M", bound=MemberMessage)


@dataclass(slots=True, eq=False)
class Incoming(Generic[M]):
    """A message that needs an answer."""

    peer_id: str
    message: M
    timeout_s: float
    """Seconds during which an answer is useful."""
    _stream: ByteStream
    _budget: ByteBudget
    _chunk_timeout_s: float
    is_read: bool = field(init=False)
    """True if all bytes of the message have been read."""
    waits_for_memory: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.is_read = self.message.payload_bytes == 0

    @asynccontextmanager
    async def payload(self) -> AsyncGenerator[bytearray, None]:
        """Receive the bytes after the message. Within the context they count as memory of their sender.
        Raises Rejected: too_large; TimeoutError, PeerUnreachable."""
        size_bytes = self.message.payload_bytes
        self.waits_for_memory = True
        async with self._budget.held(self.peer_id, size_bytes):
            self.waits_for_memory = False
            payload = bytearray(size_bytes)
            for start in range(0, size_bytes, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, size_bytes)
                async with asyncio.timeout(self._chunk_timeout_s):
                    payload[start:end] = await self._stream.receive(end - start)
            self.is_read = True
            yield payload


Respond = Callable[[Incoming[Any]], Awaitable[Reply]]
"""Answers a message. Raises Rejected to refuse it. It may be cancelled at its deadline; what it did until
then must not count."""


@dataclass(frozen=True, slots=True)
class ServiceHandler:
    """A service that we offer to other members."""

    messages: Any
    """The type of its messages, or a union of tagged ones."""
    respond: Respond
    knows: Callable[[str], bool] | None
    """Returns True if this peer is a member that may ask; other peers get no answer. None: any peer may
    ask."""

    def welcomes(self, peer_id: str) -> bool:
        return self.knows is None or self.knows(peer_id)


@dataclass(slots=True)
class _Stream:
    """A stream that is being served."""

    is_stranger: bool
    service: int = 0
    """The service that it is asking now; 0 for none."""
    waits: bool = True
    """True while we wait for the peer to send something."""


class IncomingStreams:
    """Answers the streams of other members."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._handlers: dict[int, ServiceHandler] = {}
        self._budget = ByteBudget(limits.max_inbound_bytes, limits.max_inbound_bytes_per_peer)
        self._stranger_budget = ByteBudget(limits.max_stranger_bytes, limits.max_stranger_bytes)
        self._streams: Counter[str] = Counter()
        self._serving: dict[asyncio.Task[object], _Stream] = {}
        """Ordered from oldest to newest."""
        self.refused: Counter[Refusal] = Counter()
        """Messages of others that were refused, by reason."""

    def begin(self, service: MemberService, handler: ServiceHandler) -> None:
        """Answer messages to this service from now on."""
        self._handlers[service] = handler

    async def end(self, service: MemberService | None = None) -> None:
        """Stop answering messages to this service, or to all, and end those being answered."""
        for ended in tuple(self._handlers) if service is None else (service,):
            self._handlers.pop(ended, None)
        ending = [task for task, served in self._serving.items() if service in (None, served.service)]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def serve(self, stream: ByteStream) -> None:
        """Answer the messages of one stream until it ends."""
        task = asyncio.current_task()
        assert task is not None
        peer_id = stream.peer_id
        try:
            served = _Stream(is_stranger=not self._knows(peer_id))
            self._make_room(peer_id, served)
        except Rejected as rejected:
            # Strangers get no reason.
            self._count(rejected, peer_id)
            return
        self._serving[task] = served
        self._streams[peer_id] += 1
        try:
            while await self._exchange(stream, served):
                served.service, served.waits = 0, True
        finally:
            del self._serving[task]
            self._streams[peer_id] -= 1
            self._streams += Counter()  # forgets the peers at zero

    def _knows(self, peer_id: str) -> bool:
        """Return True if the peer is a member for one of our services. Raises Rejected: not_a_member, if it
        is not and none of our services is open to strangers."""
        handlers = self._handlers.values()
        if any(handler.knows is not None and handler.knows(peer_id) for handler in handlers):
            return True
        if not any(handler.knows is None for handler in handlers):
            raise Rejected(Refusal.NOT_A_MEMBER)
        return False

    def _make_room(self, peer_id: str, served: _Stream) -> None:
        """Raises Rejected: too_many_streams."""
        limits = self._limits
        most = limits.max_streams_per_stranger if served.is_stranger else limits.max_streams_per_peer
        if self._streams[peer_id] >= most:
            raise Rejected(Refusal.TOO_MANY_STREAMS)
        strangers = [task for task, other in self._serving.items() if other.is_stranger]
        if served.is_stranger and len(strangers) >= limits.max_stranger_streams:
            waiting = [task for task in strangers if self._serving[task].waits]
            if not waiting:
                raise Rejected(Refusal.TOO_MANY_STREAMS)
            waiting[0].cancel()
            # It ends later, and no other stream may count on the same room.
            self._serving[waiting[0]].waits = False

    async def _exchange(self, stream: ByteStream, served: _Stream) -> bool:
        """Answer one message. Returns False if the stream has ended, or has unread bytes."""
        incoming, service, reply = None, 0, Reply()
        rejected: Rejected | None = None
        try:
            prefix = await self._next_prefix(stream)
            if prefix is None:
                return False
            service, timeout_s, length = prefix
            handler = self._handlers.get(service)
            if handler is None or not handler.welcomes(stream.peer_id):
                self._count(Rejected(Refusal.NOT_A_MEMBER), stream.peer_id)
                return False
            # The peer may have become a member, or stopped being one, since the stream was opened.
            served.service, served.is_stranger = service, not self._knows(stream.peer_id)
            budget = self._stranger_budget if served.is_stranger else self._budget
            limits = LIMITS[MemberService(service)]
            check_length(length, limits.max_message_bytes)
            message = decode(handler.messages, await self._receive(stream, length, budget))
            served.waits = False
            timeout_s = min(timeout_s, limits.longest_s)
            incoming = Incoming(
                stream.peer_id, message, timeout_s, stream, budget, self._limits.chunk_timeout_s
            )
            async with asyncio.timeout(timeout_s):
                reply = await handler.respond(incoming)
        except Rejected as error:
            rejected = error
        except TimeoutError:
            waited = incoming is not None and incoming.waits_for_memory
            rejected = Rejected(Refusal.NO_MEMORY if waited else Refusal.TOO_SLOW)
        except PeerUnreachable:
            self.refused[Refusal.INTERRUPTED] += 1
            raise
        except Exception:
            # The peer boundary: no message may take the node down.
            logger.exception("a message of %s to service %d failed", stream.peer_id, service)
            rejected = Rejected(Refusal.INTERNAL)
        if rejected is not None:
            self._count(rejected, stream.peer_id)
        keep = incoming is not None and incoming.is_read
        return await self._say(stream, service, reply, rejected, keep=keep)

    async def _next_prefix(self, stream: ByteStream) -> Prefix | None:
        """Return the prefix of the next message, or None if the asker sends no more. Raises Rejected:
        other_version."""
        try:
            async with asyncio.timeout(self._limits.idle_timeout_s):
                return await receive_prefix(stream)
        except (PeerUnreachable, TimeoutError):
            return None

    async def _receive(self, stream: ByteStream, length: int, budget: ByteBudget) -> bytes:
        large = length > SMALL_FRAME_BYTES
        async with (
            asyncio.timeout(self._limits.header_timeout_s + length / LEAST_BYTES_PER_S),
            budget.held(stream.peer_id, length) if large else nullcontext(),
        ):
            return await stream.receive(length)

    async def _say(
        self, stream: ByteStream, service: int, reply: Reply, rejected: Rejected | None, *, keep: bool
    ) -> bool:
        body = memoryview(reply.body).cast("B")
        answer = AnswerFrame(
            refused=Refused.of(rejected) if rejected is not None else None,
            keep=keep,
            body_bytes=len(body),
            content=msgspec.Raw(encode(reply.content)),
        )
        try:
            async with asyncio.timeout(self._limits.reply_timeout_s):
                await stream.send(framed(service, encode(answer)))
            for start in range(0, len(body), CHUNK_BYTES):
                async with asyncio.timeout(self._limits.chunk_timeout_s):
                    await stream.send(body[start : start + CHUNK_BYTES])
            if not keep:
                async with asyncio.timeout(self._limits.reply_timeout_s):
                    # The asker closes the stream when it has read the answer. Closing first could overtake
                    # the answer.
                    await stream.discard()
        except TimeoutError:
            return False
        return keep

    def _count(self, rejected: Rejected, peer_id: str) -> None:
        self.refused[reason_of(rejected)] += 1
        logger.debug("refused a message of %s: %s", peer_id, rejected)
