"""The receiving half of the tensor plane: who may send us what, for how much of our memory, and only once.

stream of a member -> [Receiver] -> Inbox (stage, driver) -> Done | Refused

    sender                                       receiver
    length | message                      ->     member? plan, route? known already? Inbox.admit
    for each chunk: CRC-32 so far | bytes ->     memory reserved, then chunk by chunk
                                          <-     length | Done or Refused, early when it is a refusal

Order matters: the cheapest refusal comes first, nothing is allocated before its size is known to be bounded
and reserved, and only Inbox.take, which sees complete and undamaged bytes, changes anything. Then the message
counts as done: the same (id, attempt) again is answered, not taken a second time.

Nothing here can wait for ever: each chunk, each message and each answer has a deadline, so memory that a
sender holds comes back. Waiting for memory is how a busy member slows its senders down.
"""

import asyncio
import logging
import zlib
from collections import Counter, OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from swarmnode.errors import PeerUnreachable, Rejected
from swarmnode.extensions.pipeline.wire.byte_budget import ByteBudget
from swarmnode.extensions.pipeline.wire.hop_messages import (
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_TENSOR_BYTES,
    Done,
    Hop,
    Message,
    MessageId,
    Refusal,
    Refused,
    Reply,
    ReplyFrame,
)
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers, check_sender
from swarmnode.extensions.pipeline.wire.wire import decode_message, encode_message, payload_bytes
from swarmnode.network.streams import ByteStream

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4
SUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds on the use that other members may make of this machine."""

    max_in_flight: int = 4
    """Messages on their way to one member at once. Two keep a link busy; more share its bandwidth."""
    max_inbound_bytes: int = 4 * MAX_TENSOR_BYTES
    """Payloads being received or checked at once, from all members together."""
    max_inbound_bytes_per_peer: int = 2 * MAX_TENSOR_BYTES
    """Payloads of one member being received or checked at once: it cannot lock the others out."""
    max_streams_per_peer: int = 8
    """Twice max_in_flight: streams of ours that a peer gave up may still be about to close."""
    header_timeout_s: float = 5.0
    """Time in which a message that has begun must be complete."""
    chunk_timeout_s: float = 10.0
    """Time limit of a chunk: 26 KB/s, less than any line that is worth a place in a pipeline."""
    reply_timeout_s: float = 5.0
    """Time in which a sender must take its answer, and hang up if it was refused."""
    idle_timeout_s: float = 60.0
    """Time after which a stream without messages is closed; the next message opens another."""
    max_remembered: int = 4096
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


@dataclass(slots=True)
class TransportCounters:
    """Messages sent, received and refused since the start."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    duplicates: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter[Refusal])
    """Messages of others that were refused, by reason."""


async def send_frame(stream: ByteStream, body: bytes) -> None:
    """Send a message or an answer with its length in front. Raises PeerUnreachable."""
    await stream.send(len(body).to_bytes(LENGTH_BYTES, "big") + body)


async def receive_length(stream: ByteStream, max_bytes: int) -> int:
    """Return the length of the next frame. Raises PeerUnreachable, Rejected: too_large."""
    length = int.from_bytes(await stream.receive(LENGTH_BYTES), "big")
    if length > max_bytes:
        raise Rejected(Refusal.TOO_LARGE, f"a frame of {length} bytes, at most {max_bytes}")
    return length


class Receiver:
    """Serves the streams of members."""

    def __init__(
        self,
        inbox: MessageHandler,
        plans: Mapping[str, PlanMembers],
        limits: TransportLimits,
        counters: TransportCounters,
    ) -> None:
        """`plans`: those that are running, by digest; it may change while streams are open."""
        self._inbox = inbox
        self._plans = plans
        self._limits = limits
        self._counters = counters
        self._budget = ByteBudget(limits.max_inbound_bytes, limits.max_inbound_bytes_per_peer)
        self._streams: Counter[str] = Counter()
        self._serving: set[asyncio.Task[object]] = set()
        self._answers: dict[tuple[str, MessageId, int], asyncio.Future[Reply]] = {}
        self._done: dict[str, OrderedDict[tuple[MessageId, int], None]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes that senders hold at the moment."""
        return self._budget.used_bytes

    async def serve(self, stream: ByteStream) -> None:
        """Answer the messages of one stream until it ends."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with self._slot(stream.peer_id):
                while await self._exchange(stream):
                    pass
        except Rejected as rejected:
            # A stranger is told nothing.
            self._count(rejected, stream.peer_id)
        finally:
            self._serving.discard(task)

    async def end(self) -> None:
        """End every stream that is being served."""
        serving = tuple(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def forget_strangers(self) -> None:
        """Drop the remembered messages of peers that are no longer in any plan."""
        known = {peer for members in self._plans.values() for peer in members.peers}
        self._done = {peer: done for peer, done in self._done.items() if peer in known}

    @contextmanager
    def _slot(self, peer_id: str) -> Generator[None, None, None]:
        if not any(peer_id in members.peers for members in self._plans.values()):
            raise Rejected(Refusal.NOT_A_MEMBER)
        if self._streams[peer_id] >= self._limits.max_streams_per_peer:
            raise Rejected(Refusal.TOO_MANY_STREAMS)
        self._streams[peer_id] += 1
        try:
            yield
        finally:
            self._streams[peer_id] -= 1
            self._streams += Counter()  # forgets the peers at zero

    async def _exchange(self, stream: ByteStream) -> bool:
        """Handle one message and answer it. Returns False if the stream is over, or bytes are left in it."""
        try:
            message = await self._next_message(stream)
            if message is None:
                return False
            check_sender(message, stream.peer_id, self._plans)
            reply, in_step = await self._answer(stream, message)
        except Rejected as rejected:
            self._count(rejected, stream.peer_id)
            reply, in_step = Refused(_reason(rejected)), False
        return await self._say(stream, reply, in_step=in_step)

    async def _next_message(self, stream: ByteStream) -> Message | None:
        """Return the next message, or None if the sender has no more. Raises Rejected: too_slow, and as
        `decode_message`."""
        try:
            async with asyncio.timeout(self._limits.idle_timeout_s):
                length = await receive_length(stream, MAX_MESSAGE_BYTES)
        except (PeerUnreachable, TimeoutError):
            return None
        try:
            async with asyncio.timeout(self._limits.header_timeout_s):
                return decode_message(await stream.receive(length))
        except TimeoutError as error:
            raise Rejected(Refusal.TOO_SLOW, "a message that was begun did not come") from error

    async def _answer(self, stream: ByteStream, message: Message) -> tuple[Reply, bool]:
        """Return (answer, True if the payload was read). The first stream to bring a message settles it for
        all."""
        key = (stream.peer_id, message.id, message.attempt)
        unread = payload_bytes(message) > 0
        if key[1:] in self._done.get(stream.peer_id, ()):
            self._counters.duplicates += 1
            return Done(), not unread
        if (pending := self._answers.get(key)) is not None:
            self._counters.duplicates += 1
            return await self._same_answer(pending, message.deadline_s), not unread
        pending = self._answers[key] = asyncio.get_running_loop().create_future()
        reply: Reply = Refused(Refusal.INTERRUPTED)
        try:
            reply = await self._settle(stream, message)
            if isinstance(reply, Done):
                self._remember(key)
            return reply, True
        except Rejected as rejected:
            reply = Refused(_reason(rejected))
            raise
        except PeerUnreachable:
            self._counters.refused[Refusal.INTERRUPTED] += 1
            raise
        finally:
            del self._answers[key]
            pending.set_result(reply)

    async def _same_answer(self, pending: asyncio.Future[Reply], deadline_s: float) -> Reply:
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(pending)
        except TimeoutError as error:
            raise Rejected(Refusal.TOO_SLOW, "the same message is still being taken") from error

    async def _settle(self, stream: ByteStream, message: Message) -> Reply:
        """Read the payload and hand the message over. Raises Rejected while bytes of it may be unread."""
        size_bytes = payload_bytes(message)
        admitted = False
        try:
            async with asyncio.timeout(message.deadline_s):
                self._inbox.admit(stream.peer_id, message)
                async with self._budget.held(stream.peer_id, size_bytes):
                    admitted = True
                    payload = await self._receive_payload(stream, message, size_bytes)
                    return await self._take(stream.peer_id, message, payload)
        except TimeoutError as error:
            reason = Refusal.TOO_SLOW if admitted else Refusal.NO_MEMORY
            raise Rejected(reason, f"of {size_bytes} bytes, due within {message.deadline_s:g} s") from error

    async def _receive_payload(self, stream: ByteStream, message: Message, size_bytes: int) -> bytearray:
        payload = bytearray(size_bytes)
        running = 0
        for start in range(0, size_bytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, size_bytes)
            async with asyncio.timeout(self._limits.chunk_timeout_s):
                expected = int.from_bytes(await stream.receive(SUM_BYTES), "big")
                payload[start:end] = await stream.receive(end - start)
            running = zlib.crc32(memoryview(payload)[start:end], running)
            if running != expected:
                raise Rejected(Refusal.BAD_CHECKSUM, f"in the chunk at byte {start} of {size_bytes}")
        if isinstance(message, Hop) and running != message.tensor.checksum:
            raise Rejected(Refusal.BAD_CHECKSUM, "of the whole payload")
        return payload

    async def _take(self, peer_id: str, message: Message, payload: bytearray) -> Reply:
        """The peer boundary: no message may take the node down."""
        try:
            await self._inbox.take(peer_id, message, payload)
        except Rejected as rejected:
            self._count(rejected, peer_id)
            return Refused(_reason(rejected))
        except Exception:
            logger.exception("taking %s of %s failed", message.id, peer_id)
            self._counters.refused[Refusal.INTERNAL] += 1
            return Refused(Refusal.INTERNAL)
        self._counters.received += 1
        self._counters.received_bytes += len(payload)
        return Done()

    async def _say(self, stream: ByteStream, reply: Reply, *, in_step: bool) -> bool:
        try:
            async with asyncio.timeout(self._limits.reply_timeout_s):
                await send_frame(stream, encode_message(ReplyFrame(reply, keep=in_step)))
                if not in_step:
                    # The sender hangs up when it reads the answer. Hanging up first could overtake it.
                    await stream.discard()
        except TimeoutError:
            return False
        return in_step

    def _remember(self, key: tuple[str, MessageId, int]) -> None:
        done = self._done.setdefault(key[0], OrderedDict())
        done[key[1:]] = None
        if len(done) > self._limits.max_remembered:
            done.popitem(last=False)

    def _count(self, rejected: Rejected, peer_id: str) -> None:
        self._counters.refused[_reason(rejected)] += 1
        logger.debug("refused a message of %s: %s", peer_id, rejected)


def _reason(rejected: Rejected) -> Refusal:
    return Refusal(rejected.reason) if rejected.reason in set(Refusal) else Refusal.INTERNAL
