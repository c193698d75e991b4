"""Streams of frames of generation between members: one stream each way, nothing answered, all of it bounded.

stage_decode.py -> [FrameStreams.send] -> stream -> [FrameStreams] of another member -> handle(frame) ->
    stage_decode.py

Unlike the tensor plane of training (transport.py), which makes sure that each message is taken once, a frame
here is sent and forgotten: steps are harmless twice and missed when they are lost, and what counts is the
time that each takes. Frames to one peer share a stream, opened again when it has broken; when it ends, who
sent on it is told at once: the far end is gone, or did not want what came last.

Order matters as there: membership and route first, then memory for the tensor, then its bytes. A member may
have `max_steps_per_stream` frames in work; it is not read further before one of them is done.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from swarmnode.errors import HostDown, NetworkError, PeerUnreachable, Rejected
from swarmnode.extensions.pipeline.rollouts.decode_messages import (
    MAX_FRAME_BYTES,
    DecodeStep,
    Frame,
    check_frame,
    decode_frame,
    encode_frame,
)
from swarmnode.extensions.pipeline.rollouts.stage_cache import Segments, tails_of
from swarmnode.extensions.pipeline.wire.byte_budget import ByteBudget
from swarmnode.extensions.pipeline.wire.codec import encode
from swarmnode.extensions.pipeline.wire.hop_messages import MAX_TENSOR_BYTES, CodecName, Refusal
from swarmnode.extensions.pipeline.wire.inbound import LENGTH_BYTES, receive_length
from swarmnode.extensions.pipeline.wire.plan_members import PlanMembers
from swarmnode.extensions.pipeline.wire.transport import LinkPace
from swarmnode.extensions.pipeline.wire.wire import Payload
from swarmnode.network.streams import ByteStream, StreamHost

logger = logging.getLogger(__name__)

PROTOCOL = "/swarmnode/pipeline-decode/1"


class BrokenOff(PeerUnreachable):
    """The peer is reachable and has ended the stream."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds on the use that the generation of others may make of this machine, besides the bounds of the
    caches."""

    max_inbound_bytes: int = 2 * MAX_TENSOR_BYTES
    max_inbound_bytes_per_peer: int = MAX_TENSOR_BYTES
    max_streams_per_peer: int = 4
    """One stream is in use; others may be about to close."""
    max_steps_per_stream: int = 64
    """Steps that are being computed or sent on. One for each session that a neighbour passes to us is
    enough."""
    frame_timeout_s: float = 10.0
    """Time in which a frame with its tensor must be complete once it has begun."""
    idle_timeout_s: float = 300.0
    ask_timeout_s: float = 3.0
    """Time after which a node that does not answer a question about a feed counts as lost."""


@dataclass(slots=True)
class DecodeCounters:
    """Steps computed, bytes sent and frames refused since the start."""

    steps: int = 0
    """Steps computed here for others."""
    sent_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    """Frames of peers that were refused, by reason."""


Handle = Callable[[PlanMembers, Frame, bytearray], Awaitable[None]]
"""Called with a checked frame and the bytes behind it."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """An outgoing stream."""

    stream: ByteStream
    over: bool = False


Ended = Callable[[Outgoing], Awaitable[None]]
"""Called with an outgoing stream that has ended. Frames sent on it may be lost."""


@dataclass(frozen=True, slots=True)
class _Taken:
    members: PlanMembers
    frame: Frame
    payload: bytearray
    memory: AsyncExitStack


@dataclass(slots=True)
class _Link:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    outgoing: Outgoing | None = None


class FrameStreams:
    """The incoming and outgoing streams of one member."""

    def __init__(
        self,
        host: StreamHost,
        plans: Mapping[str, PlanMembers],
        handle: Handle,
        ended: Ended,
        *,
        limits: DecodeLimits,
        counters: DecodeCounters,
        pace: LinkPace | None,
    ) -> None:
        """`plans`: those that are running, by digest; it may change while streams are open."""
        self._host = host
        self._plans = plans
        self._handle = handle
        self._ended = ended
        self._limits = limits
        self._counters = counters
        self._pace = pace
        self._links: dict[str, _Link] = {}
        self._streams: Counter[str] = Counter()
        self._serving: set[asyncio.Task[object]] = set()
        self._is_over = False
        self._tasks = asyncio.TaskGroup()
        self._watching: set[asyncio.Task[None]] = set()
        self._budget = ByteBudget(limits.max_inbound_bytes, limits.max_inbound_bytes_per_peer)

    async def start(self) -> None:
        """Raises HostDown."""
        await self._host.serve_streams(PROTOCOL, self._serve)
        await self._tasks.__aenter__()

    async def end(self) -> None:
        self._is_over = True
        for link in self._links.values():
            if link.outgoing is not None:
                link.outgoing.stream.close()
        tasks = *self._serving, *self._watching
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tasks.__aexit__(None, None, None)

    async def send(self, peer_id: str, frame: Frame, payload: Payload) -> Outgoing:
        """Send a frame. Returns the stream that it was sent on. The caller sets the deadline. Raises
        PeerUnreachable (of which BrokenOff is one), RequestTimeout, HostDown."""
        head = encode_frame(frame)
        size_bytes = len(head) + len(payload.data)
        if self._pace is not None:
            loop = asyncio.get_running_loop()
            arrival = self._pace.arrival(peer_id, size_bytes, loop.time())
            await asyncio.sleep(arrival.last_s - loop.time())
        data = b"".join((len(head).to_bytes(LENGTH_BYTES, "big"), head, payload.data))
        link = self._links.setdefault(peer_id, _Link())
        async with link.turn:
            was_open = link.outgoing is not None
            try:
                outgoing = await self._write(peer_id, link, data)
            except PeerUnreachable:
                if not was_open:
                    raise
                # It was closed while nobody looked. A new stream tells whether the peer is there.
                outgoing = await self._write(peer_id, link, data)
        self._counters.sent_bytes += size_bytes
        return outgoing

    async def send_step(
        self, members: PlanMembers, segments: Segments, hidden_ND: Tensor, codec: CodecName, **fields: Any
    ) -> Outgoing:
        """Send hidden states to the node at `position`, as `send`; behind the end of the path only the
        tails."""
        is_last = fields["position"] == len(fields["path"])
        encoded = encode(tails_of(hidden_ND, segments) if is_last else hidden_ND, codec)
        step = DecodeStep(
            cells=segments.cells, starts=segments.starts, counts=segments.counts, tails=segments.tails,
            forks=segments.forks, tensor=encoded.header, **fields,
        )  # fmt: skip
        return await self.send(members.peers[step.target], step, encoded.payload)

    async def reaches(self, peer_id: str) -> bool:
        """Return True if a stream to the peer can be opened. The caller sets the deadline."""
        link = self._links.setdefault(peer_id, _Link())
        try:
            async with link.turn:
                link.outgoing = link.outgoing or await self._open(peer_id, link)
        except PeerUnreachable as error:
            logger.debug("%s cannot be reached: %s", peer_id, error)
            return False
        except NetworkError as error:
            # That is slow, or it is us.
            logger.debug("no stream to %s: %s", peer_id, error)
        return True

    async def _open(self, peer_id: str, link: _Link) -> Outgoing:
        outgoing = Outgoing(await self._host.open_stream(peer_id, PROTOCOL))
        if self._is_over:
            outgoing.stream.close()
            raise HostDown("the streams of generation have been closed here")
        task = self._tasks.create_task(self._watch(link, outgoing))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return outgoing

    async def _watch(self, link: _Link, outgoing: Outgoing) -> None:
        """Wait for the end of the stream. Nothing is answered on it, so anything that is read means that it
        is over."""
        stream = outgoing.stream
        try:
            await stream.receive(1)
        except PeerUnreachable as error:
            logger.debug("a stream to %s has ended: %s", stream.peer_id, error)
        stream.close()
        outgoing.over = True
        if link.outgoing is outgoing:
            link.outgoing = None
        await self._ended(outgoing)

    async def _write(self, peer_id: str, link: _Link, data: bytes) -> Outgoing:
        outgoing = link.outgoing or await self._open(peer_id, link)
        # A stream on which a frame was broken off, by an error or a deadline, carries no other.
        link.outgoing = None
        try:
            await outgoing.stream.send(data)
            if outgoing.over:
                raise BrokenOff(f"{peer_id} ended the stream")
            link.outgoing = outgoing
        except PeerUnreachable as error:
            raise BrokenOff(error.message) from error
        finally:
            if link.outgoing is None:
                outgoing.stream.close()
        return outgoing

    async def _serve(self, stream: ByteStream) -> None:
        """Handle the frames of one incoming stream until it ends."""
        peer_id = stream.peer_id
        known = any(peer_id in members.peers for members in self._plans.values())
        if not known or self._streams[peer_id] >= self._limits.max_streams_per_peer:
            # A stranger is told nothing.
            self._counters.refused[Refusal.TOO_MANY_STREAMS if known else Refusal.NOT_A_MEMBER] += 1
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._streams[peer_id] += 1
        try:
            await self._take_frames(stream)
        finally:
            self._serving.discard(task)
            self._streams[peer_id] -= 1

    async def _take_frames(self, stream: ByteStream) -> None:
        turns = asyncio.Semaphore(self._limits.max_steps_per_stream)
        # What was begun is ended, also when the stream is not there any more: the frame may be the last one.
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    async with asyncio.timeout(self._limits.idle_timeout_s):
                        length = await receive_length(stream, MAX_FRAME_BYTES)
                        await turns.acquire()
                    taken = await self._take(stream, length)
                    tasks.create_task(self._finish(taken, turns))
            except PeerUnreachable:
                pass
            except TimeoutError:
                self._counters.refused[Refusal.TOO_SLOW] += 1
            except Rejected as rejected:
                # Where its next frame begins is not known: the stream ends.
                self._counters.refused[rejected.reason] += 1
                logger.debug("refused a frame of %s: %s", stream.peer_id, rejected)
                stream.close()

    async def _take(self, stream: ByteStream, length: int) -> _Taken:
        """Receive a frame with its payload. Raises Rejected, PeerUnreachable, TimeoutError."""
        async with asyncio.timeout(self._limits.frame_timeout_s), AsyncExitStack() as memory:
            frame = decode_frame(await stream.receive(length))
            members = check_frame(frame, stream.peer_id, self._plans)
            payload = bytearray()
            if isinstance(frame, DecodeStep):
                size_bytes = frame.tensor.payload_bytes
                await memory.enter_async_context(self._budget.held(stream.peer_id, size_bytes))
                payload += await stream.receive(size_bytes)
            return _Taken(members, frame, payload, memory.pop_all())

    async def _finish(self, taken: _Taken, turns: asyncio.Semaphore) -> None:
        """The peer boundary: no frame may take the node down."""
        try:
            async with taken.memory:
                await self._handle(taken.members, taken.frame, taken.payload)
        except Exception:
            logger.exception("a %s failed", type(taken.frame).__name__)
            self._counters.refused[Refusal.INTERNAL] += 1
        finally:
            turns.release()
