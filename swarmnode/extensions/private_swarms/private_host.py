"""A host in a private swarm: a `Host` around another one, for holders of the key only."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Container
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Self

import msgspec

from swarmnode.errors import (
    MessageTooLarge,
    NetworkError,
    PeerUnreachable,
    Rejected,
    RequestTimeout,
)
from swarmnode.extensions.private_swarms.private_swarm import MAX_NEWS_BYTES, PrivateSwarm, SwarmUpdate
from swarmnode.extensions.private_swarms.sealed_stream import SealedStream, accepted, opened
from swarmnode.extensions.private_swarms.swarm_key import NONCE_BYTES, SEAL_BYTES, SwarmKey
from swarmnode.network.host import MAX_GOSSIP_BYTES, Handler, HostStatus, Message, Subscription
from swarmnode.network.message_queue import MessageQueue
from swarmnode.network.rpc import READ_TIMEOUT_S, Service
from swarmnode.network.streams import ByteStream, StreamHandler, StreamHost

logger = logging.getLogger(__name__)

GREETING = "greeting/1"
MAX_GREETING_BYTES = 64

LOOK_S = 1.0
"""Seconds between checks of the connected peers and of the home's file, which a command may have
changed."""

PROVE_S = 10.0
"""Seconds within which a peer must prove the key; an honest peer needs one round trip."""

GREET_S = 3.0
GREETED_AT_ONCE = 16

STRANGER_S = 60.0
"""Seconds for which a peer without the key is kept away, so a mistyped key can be corrected a minute
later."""

REMOVED_S = 3600.0

NEWS_EVERY_S = 5.0
"""Seconds after which the next few connected members are asked for a newer list."""

ASKED_AT_ONCE = 8
"""Number of members asked each time."""

MAX_PROVED = 4096


class PrivateHost:
    """A `StreamHost` around another one, which it starts and stops."""

    def __init__(self, inner: StreamHost, swarm: PrivateSwarm, *, prove_s: float = PROVE_S) -> None:
        """`prove_s`: seconds within which a peer must prove the key."""
        self._inner = inner
        self._swarm = swarm
        self._prove_s = prove_s
        self._moved_to = swarm.key
        """The key for whose names we currently serve and listen."""
        self._exit = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._listening: dict[MessageQueue, asyncio.Task[None]] = {}
        self._services: dict[str, Service] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}
        self._proved: dict[str, None] = {}
        """Peers that proved the valid key. libp2p vouches for a peer id, so one proof is enough."""
        self._seen_s: dict[str, float] = {}
        """By peer without a proof, the time at which it was first seen."""
        self._asked_s = 0.0
        self._follow_by_s = 0.0
        """Time by which members will have moved to our key too. No peer is barred before then."""
        self._told_of_key = False
        """True once we have warned that our key may be wrong, or have met a member. The warning is given
        once."""

    @property
    def peer_id(self) -> str:
        return self._inner.peer_id

    async def __aenter__(self) -> Self:
        await self._exit.enter_async_context(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        # The task group must not see the caller's exception: it would wrap it into a group.
        await self._exit.aclose()

    def status(self) -> HostStatus:
        return replace(self._inner.status(), private=True)

    @property
    def may_publish(self) -> Container[str]:
        """Container of the peer ids whose groups the founder's current list accepts. It may change while the
        exchange uses it."""
        return self._swarm

    async def addresses(self) -> tuple[str, ...]:
        return await self._inner.addresses()

    async def peers(self) -> tuple[str, ...]:
        """Returns the ids of connected members, without strangers."""
        return tuple(peer for peer in await self._inner.peers() if self._is_member(peer))

    async def far_ends(self) -> dict[str, tuple[str, ...]]:
        """Addresses at the far ends of the connections to members, by peer id."""
        return {peer: ends for peer, ends in (await self._inner.far_ends()).items() if self._is_member(peer)}

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> str:
        """Dials a peer and makes it prove the key. Raises PeerUnreachable, RequestTimeout."""
        started_s = time.monotonic()
        peer_id = await self._inner.connect(address, timeout_s=timeout_s)
        try:
            await self._greet(peer_id, max(timeout_s - (time.monotonic() - started_s), 0.1))
        except PeerUnreachable as error:
            if not self._told_of_key:
                self._told_of_key = True
                logger.warning("%s", error)
            raise
        return peer_id

    async def disconnect(self, peer_id: str, *, barred_s: float = 0.0) -> None:
        await self._inner.disconnect(peer_id, barred_s=barred_s)

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossips `data`, at most MAX_GOSSIP_BYTES minus SEAL_BYTES."""
        if len(data) > MAX_GOSSIP_BYTES - SEAL_BYTES:
            raise MessageTooLarge(
                f"a gossip message of {len(data)} bytes exceeds {MAX_GOSSIP_BYTES - SEAL_BYTES} bytes"
            )
        key = self._swarm.key
        await self._inner.publish(key.name("topic", topic), key.seal(data, "gossip", topic, self.peer_id))

    async def subscribe(self, topic: str, *, queue_size: int = 1024) -> MessageQueue:
        key = self._swarm.key
        below = await self._inner.subscribe(key.name("topic", topic), queue_size=queue_size)
        queue = MessageQueue(topic, queue_size, self._unsubscribe)
        self._listen(queue, below, key)
        return queue

    async def serve(self, protocol: str, handler: Handler, *, max_request_bytes: int) -> None:
        served = Service(protocol, handler, max_request_bytes)
        await self._serve(self._swarm.key, served)
        self._services[protocol] = served

    async def request(
        self, peer_id: str, protocol: str, data: bytes, *, timeout_s: float = 10.0, max_response_bytes: int
    ) -> bytes:
        return await self._request(
            self._swarm.key, peer_id, protocol, data, timeout_s=timeout_s, most=max_response_bytes
        )

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        await self._serve_streams(self._swarm.key, protocol, handler)
        self._stream_handlers[protocol] = handler

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float = 10.0) -> SealedStream:
        self._check(peer_id)
        key = self._swarm.key
        stream = await self._inner.open_stream(peer_id, key.name("protocol", protocol), timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await opened(stream, key, protocol, self.peer_id)
        except TimeoutError as error:
            stream.close()
            raise RequestTimeout(f"{peer_id} did not accept the stream within {timeout_s:g} s") from error
        except BaseException:
            stream.close()
            raise

    async def advertise(self, namespace: str, *, timeout_s: float = 10.0) -> None:
        await self._inner.advertise(self._swarm.key.name("namespace", namespace), timeout_s=timeout_s)

    async def find(self, namespace: str, *, limit: int = 16, timeout_s: float = 10.0) -> tuple[str, ...]:
        name = self._swarm.key.name("namespace", namespace)
        return await self._inner.find(name, limit=limit, timeout_s=timeout_s)

    # ---- start and end ----

    @asynccontextmanager
    async def _run(self) -> AsyncGenerator[None, None]:
        async with self._inner, asyncio.TaskGroup() as self._tasks:
            watching = self._tasks.create_task(self._watch())
            try:
                await self._serve_greetings()
                yield
            finally:
                watching.cancel()
                for queue in tuple(self._listening):
                    queue.close()

    async def _watch(self) -> None:
        while True:
            try:
                self._swarm.refresh()
                if self._swarm.key != self._moved_to:
                    await self._move()
                await self._look()
            except NetworkError as error:
                logger.debug("could not list the connected peers: %s", error)
            await asyncio.sleep(LOOK_S)

    # ---- members ----

    def _is_member(self, peer_id: str) -> bool:
        return peer_id in self._proved and peer_id not in self._swarm.removed

    def _check(self, peer_id: str) -> None:
        if peer_id in self._swarm.removed:
            raise PeerUnreachable(f"{peer_id} was removed from the private swarm {self._swarm.name}")

    def _has_proved(self, peer_id: str, key: SwarmKey) -> None:
        """Records that a peer sealed a message that we could open, if the key is the valid one."""
        if key != self._swarm.key or peer_id in self._swarm.removed:
            return
        self._proved[peer_id] = None
        self._told_of_key = True
        self._seen_s.pop(peer_id, None)
        if len(self._proved) > MAX_PROVED:
            del self._proved[next(iter(self._proved))]
        self._swarm.met.note(peer_id)

    async def _look(self) -> None:
        """Greets new peers, disconnects those without the key, and asks members for a newer list."""
        connected = set(await self._inner.peers())
        now_s = time.monotonic()
        strangers = sorted(connected - self._proved.keys() - self._swarm.removed)
        self._seen_s = {peer: self._seen_s.get(peer, now_s) for peer in strangers}
        for peer in connected & self._swarm.removed:
            await self._inner.disconnect(peer, barred_s=REMOVED_S)
        for peer, seen_s in tuple(self._seen_s.items()):
            if now_s - seen_s > self._prove_s and now_s > self._follow_by_s:
                logger.debug("disconnecting %s: it did not prove that it has the key of the swarm", peer)
                await self._inner.disconnect(peer, barred_s=STRANGER_S)
        to_greet = sorted(self._seen_s, key=lambda peer: self._seen_s[peer], reverse=True)[:GREETED_AT_ONCE]
        if now_s - self._asked_s >= NEWS_EVERY_S:
            self._asked_s = now_s
            to_greet += self._next_to_ask(connected)
        async with asyncio.TaskGroup() as greetings:
            for peer in to_greet:
                greetings.create_task(self._try_to_greet(peer))

    def _next_to_ask(self, connected: set[str]) -> list[str]:
        """Returns the connected members to ask next, and moves them to the end of the queue."""
        next_ones = [peer for peer in self._proved if peer in connected and self._is_member(peer)]
        for peer in next_ones[:ASKED_AT_ONCE]:
            self._proved[peer] = self._proved.pop(peer)
        return next_ones[:ASKED_AT_ONCE]

    async def _try_to_greet(self, peer_id: str) -> None:
        try:
            await self._greet(peer_id, GREET_S)
        except NetworkError as error:
            logger.debug("%s", error)

    async def _greet(self, peer_id: str, timeout_s: float) -> None:
        """Makes a peer prove the key. Raises PeerUnreachable, RequestTimeout."""
        key = self._swarm.key
        asked = msgspec.msgpack.encode(self._swarm.version)
        try:
            answer = await self._request(
                key, peer_id, GREETING, asked, timeout_s=timeout_s, most=MAX_NEWS_BYTES
            )
            self._swarm.hear(msgspec.msgpack.decode(answer, type=SwarmUpdate))
        except PeerUnreachable as error:
            raise PeerUnreachable(
                f"{peer_id} was reached, but does not know our key for the private swarm {self._swarm.name}",
                hint="it is in another swarm, or our invitation is mistyped or too old: ask for a new one",
            ) from error
        except (Rejected, msgspec.MsgspecError) as error:
            raise PeerUnreachable(f"{peer_id} handed on an invalid list: {error}") from error

    async def _serve_greetings(self) -> None:
        """Serves greetings under the valid key and under earlier ones, which returning members still use."""
        for key in map(SwarmKey, self._swarm.record.secrets):

            async def welcome(peer_id: str, request: bytes, key: SwarmKey = key) -> bytes:
                try:
                    version = msgspec.msgpack.decode(request, type=int)
                except msgspec.MsgspecError as error:
                    raise Rejected("malformed", str(error)) from error
                news = self._swarm.news_for(peer_id, key, version)
                if news is None:
                    raise Rejected("not_a_member")
                return msgspec.msgpack.encode(news)

            await self._serve(key, Service(GREETING, welcome, MAX_GREETING_BYTES))

    async def _move(self) -> None:
        """Moves to the names of another key. Called again if the host was down."""
        key = self._swarm.key
        # A member learns of the key when it asks us in its rotation, or asks another member that has it.
        turns = -(-len(self._proved) // ASKED_AT_ONCE) + 2
        self._follow_by_s = time.monotonic() + NEWS_EVERY_S * turns
        self._proved.clear()
        self._seen_s.clear()
        await self._serve_greetings()
        for served in tuple(self._services.values()):
            await self._serve(key, served)
        for protocol, handler in tuple(self._stream_handlers.items()):
            await self._serve_streams(key, protocol, handler)
        for queue in tuple(self._listening):
            below = await self._inner.subscribe(key.name("topic", queue.topic))
            if queue.closed:
                await below.aclose()
                continue
            self._listening[queue].cancel()
            self._listen(queue, below, key)
        self._moved_to = key

    # ---- sealed messages ----

    def _listen(self, queue: MessageQueue, below: Subscription, key: SwarmKey) -> None:
        self._listening[queue] = self._tasks.create_task(self._pump(queue, below, key))

    def _unsubscribe(self, queue: MessageQueue) -> None:
        listening = self._listening.pop(queue, None)
        if listening is not None:
            listening.cancel()

    async def _pump(self, queue: MessageQueue, below: Subscription, key: SwarmKey) -> None:
        """Moves the messages that we can open from the topic to the reader."""
        try:
            async for message in below:
                opened_message = self._opened(queue.topic, message, key)
                if opened_message is not None:
                    queue.put(opened_message)
                # A full queue returns message after message without a pause. Let other tasks run too.
                await asyncio.sleep(0)
        finally:
            await below.aclose()
        queue.close()

    def _opened(self, topic: str, message: Message, key: SwarmKey) -> Message | None:
        if message.sender in self._swarm.removed:
            return None
        if message.oversized:
            # It cannot be sealed by an honest member. Strangers are dealt with as such.
            return replace(message, topic=topic) if message.sender in self._proved else None
        try:
            data = key.open(message.data, "gossip", topic, message.sender)
        except Rejected as error:
            logger.debug("bad gossip from %s: %s", message.sender, error)
            return None
        self._has_proved(message.sender, key)
        return Message(topic, message.sender, data)

    async def _serve(self, key: SwarmKey, served: Service) -> None:
        protocol = served.protocol

        async def handler(peer_id: str, sealed: bytes) -> bytes:
            """Returns the sealed response, or nothing to a peer without the key."""
            if peer_id in self._swarm.removed or (key != self._swarm.key and protocol != GREETING):
                return b""
            try:
                request = key.open(sealed, "request", protocol, peer_id, self.peer_id)
                self._has_proved(peer_id, key)
                response = await served.handler(peer_id, request)
            except Rejected as error:
                logger.debug("a request from %s was not answered: %s", peer_id, error)
                return b""
            return key.seal(response, "response", protocol, peer_id, self.peer_id, sealed[:NONCE_BYTES])

        await self._inner.serve(
            key.name("protocol", protocol), handler, max_request_bytes=served.max_request_bytes + SEAL_BYTES
        )

    async def _request(
        self, key: SwarmKey, peer_id: str, protocol: str, data: bytes, *, timeout_s: float, most: int
    ) -> bytes:
        self._check(peer_id)
        sealed = key.seal(data, "request", protocol, self.peer_id, peer_id)
        answer = await self._inner.request(
            peer_id,
            key.name("protocol", protocol),
            sealed,
            timeout_s=timeout_s,
            max_response_bytes=most + SEAL_BYTES,
        )
        try:
            # The nonce of the request is the challenge: a response to another request cannot be opened here.
            response = key.open(answer, "response", protocol, self.peer_id, peer_id, sealed[:NONCE_BYTES])
        except Rejected as error:
            raise PeerUnreachable(f"{peer_id} did not answer like a member") from error
        self._has_proved(peer_id, key)
        return response

    async def _serve_streams(self, key: SwarmKey, protocol: str, handler: StreamHandler) -> None:
        async def accept(stream: ByteStream) -> None:
            if stream.peer_id in self._swarm.removed or key != self._swarm.key:
                return
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    sealed = await accepted(stream, key, protocol, self.peer_id)
                if not self._is_member(stream.peer_id):
                    await self._greet(stream.peer_id, GREET_S)
            except (TimeoutError, RequestTimeout) as error:
                raise PeerUnreachable("the stream was opened but nothing arrived") from error
            await handler(sealed)

        await self._inner.serve_streams(key.name("protocol", protocol), accept)
