"""One request, one response over one stream: the wire format that every host of a swarm speaks.

Host.request -> [ask] -> libp2p stream -> [StreamSlots] -> [answer] -> handler given to Host.serve
gossip -> in_memory.py | p2pd.py -> [MessageQueue] -> whoever called Host.subscribe
p2pd_control.py, p2pd.py, in_memory.py -> [SkipCounters] -> HostStatus.skipped -> status, metrics

On a stream of the negotiated protocol:

    requester                                    responder
    uvarint length | request bytes       ->
                                         <-      uvarint length | response bytes
    closes                               ->      closes

- Frames are an unsigned varint length, then that many bytes, as libp2p frames its own protocols: any libp2p
  implementation can speak to us. The length is checked against a bound before a byte of the body is read.
- The requester keeps its sending half open until it has the whole response; lengths, not half-closes, end a
  message, because the go-libp2p daemon turns a half-close into a close.
- The responder lingers until the requester has hung up, so that no reset can overtake the response.
- A stream that ends before the whole response came is a refusal: the request was too large, the handler
  raised, or the responder is busy. Peers learn nothing more about the reason.

The places for incoming streams are bounded, and nobody holds one by doing nothing. A stream waits for its
request, is worked on, then waits for the far end to take the answer. When all places are taken, one that
waits for its peer makes room, of the peer that has the most of them: an honest peer's request comes with its
stream and is gone in milliseconds, so it is not the one, however many identities wait.

What came in from peers and could not be used is counted by cause, told once, and never a fault of the host.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from swarmnode.errors import MessageTooLarge, NetworkError, PeerUnreachable
from swarmnode.network.host import MAX_GOSSIP_BYTES, Handler, Message

logger = logging.getLogger(__name__)


# ---- frames ----

MAX_UVARINT_BYTES = 5
"""Longest length prefix. Lengths up to 2^35 - 1 are far above any bound of ours, and a peer cannot make us
read more."""


def encode_uvarint(value: int) -> bytes:
    """Returns a number in little-endian base 128, as protobuf and multiformats write it.

    >>> encode_uvarint(300).hex()
    'ac02'
    """
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_uvarint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """Returns the value at `offset` and the offset behind it. Raises NetworkError when it is cut off or
    overlong.

    >>> decode_uvarint(bytes.fromhex("ac02"))
    (300, 2)
    """
    value = 0
    for position, byte in enumerate(data[offset : offset + MAX_UVARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, offset + position + 1
    raise NetworkError("a varint is cut off or overlong")


def encode_frame(body: bytes) -> bytes:
    """Returns a body with its length in front."""
    return encode_uvarint(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Returns the next body. Raises MessageTooLarge before reading a body over `max_bytes`, and
    asyncio.IncompleteReadError if the stream ends inside a frame."""
    prefix = bytearray()
    while not prefix or prefix[-1] >= 0x80:
        if len(prefix) == MAX_UVARINT_BYTES:
            raise MessageTooLarge(f"a frame claims more than 2^{7 * MAX_UVARINT_BYTES} bytes")
        prefix += await reader.readexactly(1)
    size_bytes, _ = decode_uvarint(bytes(prefix))
    if size_bytes > max_bytes:
        raise MessageTooLarge(f"a frame of {size_bytes} bytes exceeds the bound of {max_bytes} bytes")
    return await reader.readexactly(size_bytes)


# ---- places for incoming streams ----

MAX_STREAMS = 256
MAX_STREAMS_PER_PEER = 32
"""The most streams of one peer at once; with the bounds on requests, they are all that strangers can make us
hold."""


class StreamStage(IntEnum):
    """The progress of a stream. In the first two stages it waits for its peer."""

    HALF_OPEN = 0
    ANSWERED = 1
    WORKED_ON = 2


@dataclass(slots=True, eq=False)
class StreamSlot:
    """The place of one stream."""

    peer_id: str
    hang_up: Callable[[], None]
    stage: StreamStage = StreamStage.HALF_OPEN

    def reach(self, stage: StreamStage) -> None:
        self.stage = stage


class StreamSlots:
    """All places, in the order in which their streams came."""

    def __init__(self, *, most: int = MAX_STREAMS, most_per_peer: int = MAX_STREAMS_PER_PEER) -> None:
        self._most = most
        self._most_per_peer = most_per_peer
        self._taken: dict[StreamSlot, None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, peer_id: str, hang_up: Callable[[], None]) -> StreamSlot | None:
        """Returns a place for a new stream, or None. `hang_up` ends the stream if its place is needed."""
        of_peer = [slot for slot in self._taken if slot.peer_id == peer_id]
        if len(of_peer) >= self._most_per_peer and not self._make_room(of_peer):
            return None
        if len(self._taken) >= self._most and not self._make_room(self._of_the_greediest()):
            return None
        slot = StreamSlot(peer_id, hang_up)
        self._taken[slot] = None
        return slot

    def give_back(self, slot: StreamSlot) -> None:
        """Frees the place of a stream that ended, unless it was freed already to make room."""
        self._taken.pop(slot, None)

    def _of_the_greediest(self) -> list[StreamSlot]:
        waiting = Counter(slot.peer_id for slot in self._taken if slot.stage is not StreamStage.WORKED_ON)
        if not waiting:
            return []
        greediest, _ = waiting.most_common(1)[0]
        return [slot for slot in self._taken if slot.peer_id == greediest]

    def _make_room(self, among: list[StreamSlot]) -> bool:
        """Ends the stream that has waited longest for its request, or else longest for its answer to be
        read."""
        waiting = [slot for slot in among if slot.stage is not StreamStage.WORKED_ON]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda slot: slot.stage)
        del self._taken[oldest]
        oldest.hang_up()
        return True


# ---- request and response ----

READ_TIMEOUT_S = 10.0
"""Seconds within which a request must arrive: a peer that dribbles bytes cannot hold a stream open."""

SMALL_REQUEST_BYTES = 64 * 1024
SMALL_READ_TIMEOUT_S = 4.0
"""Seconds for a small request, which comes with its stream; a large one may come over a slow line."""

ANSWER_TIMEOUT_S = 60.0
"""Seconds for handler and response together, longer than any requester of ours waits."""

LINGER_S = 30.0
"""Seconds that the responder waits for the requester, whose line may be slow, to read and hang up."""


@dataclass(frozen=True, slots=True)
class Service:
    """A served protocol, with the arguments of `Host.serve`."""

    protocol: str
    handler: Handler
    max_request_bytes: int


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, *, max_response_bytes: int
) -> bytes:
    """Sends a request and returns its response. The caller sets the deadline and closes the stream. Raises
    MessageTooLarge for a response over the bound, PeerUnreachable if the stream ends before it."""
    try:
        writer.write(encode_frame(request))
        await writer.drain()
        return await read_frame(reader, max_response_bytes)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise PeerUnreachable("the peer closed the stream without an answer") from error


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    peer_id: str,
    service: Service,
    *,
    reach: Callable[[StreamStage], None] = lambda stage: None,
) -> None:
    """Serves one request. Returns without a response if there is none; the caller closes the stream. `reach`
    is called at each stage."""
    small = service.max_request_bytes <= SMALL_REQUEST_BYTES
    try:
        async with asyncio.timeout(min(READ_TIMEOUT_S, SMALL_READ_TIMEOUT_S if small else READ_TIMEOUT_S)):
            request = await read_frame(reader, service.max_request_bytes)
        reach(StreamStage.WORKED_ON)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            response = await respond(service, peer_id, request)
            if response is None:
                return
            reach(StreamStage.ANSWERED)
            writer.write(encode_frame(response))
            await writer.drain()
        async with asyncio.timeout(LINGER_S):
            await reader.read(1)
    except MessageTooLarge as error:
        logger.debug("refused a request of %s from %s: %s", service.protocol, peer_id, error)
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        logger.debug("lost a request of %s from %s: %r", service.protocol, peer_id, error)


async def respond(service: Service, peer_id: str, request: bytes) -> bytes | None:
    """Calls the handler. Returns None if it raised: at the peer boundary no request may take the node
    down."""
    try:
        return await service.handler(peer_id, request)
    except Exception:
        logger.exception("the handler of %s failed on a request of %s", service.protocol, peer_id)
        return None


# ---- the queue between a topic and its reader ----


def as_heard(topic: str, sender: str, data: bytes) -> Message:
    """Returns an incoming message in the form for a topic's reader.

    >>> as_heard("rollouts", "12D3KooWA", bytes(MAX_GOSSIP_BYTES + 1))
    Message(topic='rollouts', sender='12D3KooWA', data=b'', oversized=True)
    """
    if len(data) > MAX_GOSSIP_BYTES:
        return Message(topic, sender, b"", oversized=True)
    return Message(topic, sender, data)


class MessageQueue:
    """A `Subscription`. The host puts, one reader iterates; `on_close` tells the host to stop putting.

    A full queue drops its oldest message: fresh rollouts are worth more than stale ones.
    """

    def __init__(self, topic: str, queue_size: int, on_close: "Callable[[MessageQueue], None]") -> None:
        if queue_size < 1:
            raise ValueError(f"queue_size is {queue_size}, it must be at least 1")
        self.topic = topic
        self._messages: deque[Message] = deque(maxlen=queue_size)
        self._changed = asyncio.Event()
        self._on_close = on_close
        self._closed = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, message: Message) -> None:
        """Queues a message; without room, the oldest one is dropped and counted."""
        if self._closed:
            return
        self._dropped += len(self._messages) == self._messages.maxlen
        self._messages.append(message)
        self._changed.set()

    def close(self) -> None:
        """Ends the iteration; unread messages are discarded."""
        if not self._closed:
            self._closed = True
            self._changed.set()
            self._on_close(self)

    def __aiter__(self) -> "MessageQueue":
        return self

    async def __anext__(self) -> Message:
        while not self._closed and not self._messages:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise StopAsyncIteration
        return self._messages.popleft()

    async def aclose(self) -> None:
        self.close()


# ---- what could not be used ----


class SkipCause(StrEnum):
    """The reasons for skipping input. Values never come from the wire, so their number is bounded."""

    GOSSIP_AUTHOR = "gossip_author"
    """A message whose author has an id that no libp2p host may have."""
    GOSSIP_SIZE = "gossip_size"
    """A message over MAX_GOSSIP_BYTES; the topic's reader learns its author."""
    PROVIDER_RECORD = "provider_record"
    CONNECTION = "connection"
    ADDRESSES = "addresses"
    STREAM = "stream"


def oversized_story(author: str, size_bytes: int) -> str:
    """Returns the log text for a gossip message that is too long."""
    return f"{author} gossiped {size_bytes} bytes at once"


class SkipCounters:
    """Counters by cause. The first of each cause is logged, a flood is not."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, cause: SkipCause, story: str) -> None:
        """Counts one. `story` describes it and may quote a peer."""
        self._counts[cause] += 1
        if self._counts[cause] == 1:
            logger.warning("skipped what a peer sent: %s; more of these (%s) are only counted", story, cause)

    def counts(self) -> dict[str, int]:
        """Returns the counts of the causes that occurred."""
        return dict(self._counts)
