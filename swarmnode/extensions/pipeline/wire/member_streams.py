"""The one wire between members: all their messages use the streams of this protocol.

a service -> [MemberStreams.ask] -> stream of a StreamHost -> incoming_streams.py of another member

A stream carries one message at a time and is then reused for the next one, of any service. So messages do not
queue behind a large tensor, a message is given up by closing its stream, and a reused stream already has its
window. At most `max_in_flight` messages of a service are on their way to a member; the others wait for their
turn, and the wait counts towards their deadline.

`ask` makes one attempt. It returns the other member's answer, and raises if there is none; the message may or
may not have been accepted then. So every service can safely be asked the same thing twice.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import NetworkError, PeerUnreachable, Rejected, RequestTimeout
from swarmnode.extensions.pipeline.wire.frames import (
    CHUNK_BYTES,
    AnswerFrame,
    check_length,
    decode,
    encode,
    framed,
    receive_prefix,
)
from swarmnode.extensions.pipeline.wire.incoming_streams import IncomingStreams, WireLimits
from swarmnode.extensions.pipeline.wire.refusals import BadAnswer, MemberRefused, Refusal, Refused
from swarmnode.extensions.pipeline.wire.services import LIMITS, MemberMessage, MemberService
from swarmnode.network.streams import Buffer, ByteStream, StreamHost

logger = logging.getLogger(__name__)

PROTOCOL = "/swarmnode/pipeline"
"""The name has no version, so that members of different versions can meet and refuse each other with a
reason."""

MAX_TOLD = 1024

T = TypeVar("T")


class BrokenOff(PeerUnreachable):
    """The peer was reached, but ended the stream without an answer: it may not know us yet."""


@dataclass(frozen=True, slots=True)
class AnswerBody:
    """The bytes after an answer, as received by the asker."""

    size_bytes: Callable[[Any], int]
    """Called with the answer. Returns the number of bytes that belong to it, or raises Rejected to read
    none."""
    data: bytearray = field(default_factory=bytearray)
    """Bytes are appended to this, so that bytes received before a failure are not lost."""


@dataclass(slots=True)
class _Link:
    """The streams to one member."""

    turns: dict[MemberService, asyncio.Semaphore] = field(
        default_factory=dict[MemberService, asyncio.Semaphore]
    )
    idle: list[tuple[float, ByteStream]] = field(default_factory=list[tuple[float, ByteStream]])
    """Streams ready for the next messages, each with the time of its last answer."""
    users: int = 0
    """Messages on their way or waiting for their turn."""


class MemberStreams:
    """Asks other members, and answers their questions.

    async with MemberStreams(host) as streams, TensorTransport(streams, stage) as transport:
        reply = await transport.send(peer_id, ForwardHop(...), encoded.payload, timeout_s=10.0)
    """

    def __init__(self, host: StreamHost, limits: WireLimits | None = None) -> None:
        self._host = host
        self._limits = limits or WireLimits()
        self._links: dict[str, _Link] = {}
        self._open: set[ByteStream] = set()
        self._told = BoundedDict[str, None](MAX_TOLD)
        """Peers for which the log already says that they have another version."""
        self._leaving = False
        self.incoming = IncomingStreams(self._limits)
        """The services that we offer."""

    async def __aenter__(self) -> Self:
        """Raises HostDown."""
        await self._host.serve_streams(PROTOCOL, self.incoming.serve)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        # The host still hands us streams; without services they are all refused as those of strangers.
        self._leaving = True
        for stream in tuple(self._open):
            self._close(stream)
        await self.incoming.end()

    @property
    def peer_id(self) -> str:
        return self._host.peer_id

    async def ask(
        self,
        peer_id: str,
        service: MemberService,
        message: MemberMessage,
        answer: type[T],
        *,
        timeout_s: float,
        payload: Buffer = b"",
        body: AnswerBody | None = None,
    ) -> T:
        """Send a message in one attempt, and return its answer within `timeout_s` seconds.

        Raises MemberRefused, or its subclass BadAnswer if the answer is invalid (malformed, wrong_shape, or
        rejected by `body.size_bytes`); RequestTimeout, PeerUnreachable (or its subclass BrokenOff), HostDown;
        ValueError if the payload does not fit the message.
        """
        if len(payload) != message.payload_bytes:
            raise ValueError(f"{len(payload)} bytes for a message of {message.payload_bytes}")
        link = self._links.setdefault(peer_id, _Link())
        turn = link.turns.setdefault(service, asyncio.Semaphore(self._limits.max_in_flight))
        until_s = asyncio.get_running_loop().time() + timeout_s
        attempt = _Attempt(service, message, answer, payload, body, until_s, self._limits.chunk_timeout_s)
        link.users += 1
        try:
            async with asyncio.timeout_at(until_s), turn:
                return await self._deliver(peer_id, link, attempt)
        except TimeoutError as error:
            raise RequestTimeout(f"{peer_id} did not answer within {timeout_s:g} s") from error
        finally:
            link.users -= 1
            if not link.idle and not link.users:
                del self._links[peer_id]

    def forget(self, peer_id: str) -> None:
        """Close the idle streams to a peer that will not be asked for a while."""
        link = self._links.get(peer_id, _Link())
        while link.idle:
            self._close(link.idle.pop()[1])

    async def _deliver(self, peer_id: str, link: _Link, attempt: "_Attempt[T]") -> T:
        self._forget_unused()
        while link.idle:
            _, stream = link.idle.pop()
            try:
                return await self._exchange(stream, link, attempt)
            except BrokenOff as error:
                # It was closed unnoticed, and perhaps the others were too. A new stream shows if the peer is
                # still there. If the peer had accepted the message, it will say so again.
                logger.debug("a kept stream to %s was dead: %s", peer_id, error)
        if self._leaving:
            raise PeerUnreachable("we are leaving the pipeline")
        remaining_s = max(attempt.until_s - asyncio.get_running_loop().time(), 0.001)
        stream = await self._host.open_stream(peer_id, PROTOCOL, timeout_s=remaining_s)
        self._open.add(stream)
        return await self._exchange(stream, link, attempt)

    async def _exchange(self, stream: ByteStream, link: _Link, attempt: "_Attempt[T]") -> T:
        """Send one message on this stream and return the answer. Raises MemberRefused, BrokenOff."""
        keep = False
        try:
            answer = await attempt.converse(stream)
            content = None if answer.refused is not None else await attempt.content(stream, answer)
            keep = answer.keep and not self._leaving
        finally:
            if keep:
                link.idle.append((asyncio.get_running_loop().time(), stream))
            else:
                self._close(stream)
        if answer.refused is not None:
            if answer.refused.reason is Refusal.OTHER_VERSION and stream.peer_id not in self._told:
                self._told[stream.peer_id] = None
                logger.warning("%s refuses to talk to us: %s", stream.peer_id, ascii(answer.refused.detail))
            raise MemberRefused(answer.refused)
        return content  # type: ignore[return-value]

    def _forget_unused(self) -> None:
        """Close streams that have been idle for long, and forget peers without any streams."""
        oldest_s = asyncio.get_running_loop().time() - self._limits.idle_timeout_s / 2
        for peer_id, link in tuple(self._links.items()):
            while link.idle and link.idle[0][0] < oldest_s:
                self._close(link.idle.pop(0)[1])
            if not link.idle and not link.users:
                del self._links[peer_id]

    def _close(self, stream: ByteStream) -> None:
        stream.close()
        self._open.discard(stream)


@dataclass(frozen=True, slots=True)
class _Attempt(Generic[T]):
    """One attempt at a message."""

    service: MemberService
    message: MemberMessage
    kind: type[T]
    """The type of the answer."""
    payload: Buffer
    """Must not change until the message is answered."""
    body: AnswerBody | None
    until_s: float
    chunk_timeout_s: float

    async def converse(self, stream: ByteStream) -> AnswerFrame:
        """Write the message while listening for the answer: a refusal stops the writing. Raises
        BrokenOff."""
        failure: NetworkError | Rejected | None = None
        answer: AnswerFrame | None = None
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write(stream))
            try:
                length = (await receive_prefix(stream)).length
                check_length(length, LIMITS[self.service].max_answer_bytes)
                answer = decode(AnswerFrame, await stream.receive(length))
            except (NetworkError, Rejected) as error:
                failure = error
            writing.cancel()
        if isinstance(failure, Rejected) and failure.reason == Refusal.OTHER_VERSION:
            return AnswerFrame(refused=Refused.of(failure), keep=False)
        if answer is None:
            raise BrokenOff(f"no answer: {failure}") from failure
        return answer

    async def content(self, stream: ByteStream, answer: AnswerFrame) -> T:
        """Return the answer of the service, after reading its body. Raises BrokenOff, RequestTimeout,
        BadAnswer."""
        try:
            content = decode(self.kind, answer.content)
            expected = self.body.size_bytes(content) if self.body is not None else 0
            if expected != answer.body_bytes:
                raise Rejected(Refusal.WRONG_SHAPE, f"{answer.body_bytes} bytes in place of {expected}")
        except Rejected as rejected:
            raise BadAnswer(rejected) from rejected
        try:
            for start in range(0, expected, CHUNK_BYTES):
                assert self.body is not None
                async with asyncio.timeout(self.chunk_timeout_s):
                    self.body.data.extend(await stream.receive(min(CHUNK_BYTES, expected - start)))
        except TimeoutError as error:
            raise RequestTimeout(f"{stream.peer_id} stopped in the middle of its answer") from error
        except PeerUnreachable as error:
            raise BrokenOff(f"no whole answer: {error}") from error
        return content

    async def _write(self, stream: ByteStream) -> None:
        loop, payload = asyncio.get_running_loop(), memoryview(self.payload)
        encoded = encode(self.message)
        try:
            await stream.send(framed(self.service, encoded, max(self.until_s - loop.time(), 0.001)))
            for start in range(0, len(payload), CHUNK_BYTES):
                await stream.send(payload[start : start + CHUNK_BYTES])
        except PeerUnreachable as error:
            # The reader of the same stream sees it end too, and may find an answer before the end.
            logger.debug("a stream to %s ended under a message: %s", stream.peer_id, error)
