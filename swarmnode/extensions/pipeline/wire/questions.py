"""A question to a member and its answer, with many bytes behind the answer where there are many.

replica_exchange.py, state_service.py -> [Questions] -> a stream of a StreamHost -> [Questions] -> who answers

    asker                              answerer
    length | question          ->      a member? one stream too many? then `answer` is awaited
                               <-      length | head, then the body in chunks
    hangs up

Bytes are only ever asked for, never pushed: so who receives them has said how many it takes, from whom and
until when, and needs no budget for what others might send. A stream carries one question.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from swarmnode.errors import PeerUnreachable, Rejected, RequestTimeout
from swarmnode.extensions.pipeline.wire.hop_messages import CHUNK_BYTES
from swarmnode.extensions.pipeline.wire.inbound import receive_length, send_frame
from swarmnode.network.streams import Buffer, ByteStream, StreamHost

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 1024


@dataclass(frozen=True, slots=True)
class QuestionLimits:
    """Bounds on the use that askers may make of this machine."""

    max_head_bytes: int = 64 * 1024
    """Bound of an answer without its body."""
    max_streams_per_peer: int = 8
    max_streams: int = 64
    question_timeout_s: float = 5.0
    """Time after the opening of a stream in which its question must be complete."""
    answer_timeout_s: float = 120.0
    """Limit of the computation of an answer."""
    chunk_timeout_s: float = 10.0
    """Time limit of a chunk: 26 KB/s."""


@dataclass(frozen=True, slots=True)
class QuestionReply:
    """An answer: a short head, and a large body where there is one."""

    head: bytes
    body: Buffer = b""
    """Must not be written to until it is sent."""


Respond = Callable[[str, bytes], Awaitable[QuestionReply]]
"""(asking peer, question) -> answer. If it raises Rejected, the stream is closed without an answer."""


class Questions:
    """Both sides of one protocol. `async with` serves it; only admitted peers are answered."""

    def __init__(
        self, host: StreamHost, protocol: str, respond: Respond, limits: QuestionLimits | None = None
    ) -> None:
        self._host = host
        self._protocol = protocol
        self._respond = respond
        self._limits = limits or QuestionLimits()
        self._members: frozenset[str] = frozenset()
        self._streams: Counter[str] = Counter()
        self._serving: set[asyncio.Task[object]] = set()
        self.refused: Counter[str] = Counter()
        """Questions without an answer, by reason."""

    async def __aenter__(self) -> Self:
        """Raises HostDown."""
        await self._host.serve_streams(self._protocol, self._serve)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._members = frozenset()
        serving = tuple(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    @property
    def members(self) -> frozenset[str]:
        return self._members

    def admit(self, peers: Collection[str]) -> None:
        """Answer these peers from now on, and no others."""
        self._members = frozenset(peers)

    async def ask(
        self,
        peer_id: str,
        question: bytes,
        *,
        timeout_s: float,
        body_bytes: Callable[[bytes], int] = lambda head: 0,
        body: bytearray | None = None,
    ) -> tuple[bytes, bytearray]:
        """Return the head and the body of the answer.

        `body_bytes` is called with the head and returns how many bytes to read behind it, or raises Rejected
        to read none. `body`: the bytes are appended to it, so that those that came before a failure are not
        lost. Raises RequestTimeout, PeerUnreachable, HostDown; Rejected: too_large, and what `body_bytes`
        raises.
        """
        body = bytearray() if body is None else body
        try:
            async with asyncio.timeout(timeout_s):
                stream = await self._host.open_stream(peer_id, self._protocol, timeout_s=timeout_s)
                try:
                    await send_frame(stream, question)
                    length = await receive_length(stream, self._limits.max_head_bytes)
                    head = await stream.receive(length)
                    await self._receive(stream, body_bytes(head), body)
                finally:
                    stream.close()
        except TimeoutError as error:
            raise RequestTimeout(f"{peer_id} did not answer within {timeout_s:g} s") from error
        return head, body

    async def _receive(self, stream: ByteStream, size_bytes: int, body: bytearray) -> None:
        for start in range(0, size_bytes, CHUNK_BYTES):
            async with asyncio.timeout(self._limits.chunk_timeout_s):
                body += await stream.receive(min(CHUNK_BYTES, size_bytes - start))

    async def _serve(self, stream: ByteStream) -> None:
        task = asyncio.current_task()
        assert task is not None
        peer_id, limits = stream.peer_id, self._limits
        if peer_id not in self._members:
            self.refused["not_a_member"] += 1
            return
        full = self._streams[peer_id] >= limits.max_streams_per_peer
        if full or self._streams.total() >= limits.max_streams:
            self.refused["too_many_streams"] += 1
            return
        self._streams[peer_id] += 1
        self._serving.add(task)
        try:
            await self._answer(stream)
        except Rejected as rejected:
            self.refused[rejected.reason] += 1
            logger.debug("no answer to %s: %s", peer_id, rejected)
        except (TimeoutError, PeerUnreachable):
            self.refused["interrupted"] += 1
        finally:
            self._serving.discard(task)
            self._streams[peer_id] -= 1
            self._streams += Counter()  # forgets the peers at zero

    async def _answer(self, stream: ByteStream) -> None:
        limits = self._limits
        async with asyncio.timeout(limits.question_timeout_s):
            question = await stream.receive(await receive_length(stream, MAX_QUESTION_BYTES))
        async with asyncio.timeout(limits.answer_timeout_s):
            answer = await self._respond(stream.peer_id, question)
        async with asyncio.timeout(limits.chunk_timeout_s):
            await send_frame(stream, answer.head)
        content = memoryview(answer.body).cast("B")
        for start in range(0, len(content), CHUNK_BYTES):
            async with asyncio.timeout(limits.chunk_timeout_s):
                await stream.send(content[start : start + CHUNK_BYTES])
        async with asyncio.timeout(limits.chunk_timeout_s):
            # The asker hangs up when it has everything. Hanging up first could overtake it.
            await stream.discard()


class QuestionService:
    """Base class of services that ask and answer by one protocol. `async with` serves it."""

    def __init__(
        self, host: StreamHost, protocol: str, respond: Respond, limits: QuestionLimits | None = None
    ) -> None:
        self.questions = Questions(host, protocol, respond, limits)

    async def __aenter__(self) -> Self:
        """Raises HostDown."""
        await self.questions.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.questions.__aexit__(exc_type, exc, tb)

    @property
    def refused(self) -> Mapping[str, int]:
        """Questions of others that were not answered, by reason."""
        return self.questions.refused
