"""The two planes of an exchange: headers are gossiped to everybody, bodies are asked for by their hash.

publish -> [HeaderPlane.announce] -> topic /swarmnode/2/<swarm>/rollouts/<shard> -> [run] -> Inbox -> pool
publish, fetch -> [BodyStore] -> whoever asks
choose -> [BodyPlane.fetch] -> stream /swarmnode/rollouts/2 -> [answer] of another node -> check_body

Headers are spread over shards by task, so a node hears only of tasks it could train on.

A body comes from its author or from anyone who has it. Request: the 32 bytes of a hash. Response: the body,
or nothing at all for "not here" and "not now". The hash is checked before a body is looked into, so it does
not matter who gave it. We ask no peer for more than it would ask of us: its own limits need not refuse us.
Peers are asked for the bodies of others seldom.
"""

import asyncio
import hashlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable

from swarmnode.errors import HostDown, MessageTooLarge, NetworkError, Rejected, RequestTimeout
from swarmnode.exchange.limits import (
    FALLBACK_PEERS,
    FALLBACKS_BURST,
    FALLBACKS_PER_S,
    MAX_OWN_BODIES,
    PROTOCOL,
    ExchangeSettings,
    Reason,
)
from swarmnode.exchange.messages import Announcement, Header, hash_body
from swarmnode.exchange.reputation import Ledger, TokenBucket
from swarmnode.network.host import Host, Message, Subscription

logger = logging.getLogger(__name__)


# ---- headers ----


def shard_of(task: str, shards: int) -> int:
    """The shard of a task; the same on every node."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big") % shards


def topic_of(swarm: str, shard: int) -> str:
    """The topic of a shard.

    >>> topic_of("commons", 0)
    '/swarmnode/2/commons/rollouts/0'
    """
    return f"/swarmnode/{PROTOCOL}/{swarm}/rollouts/{shard}"


def topics_to_listen_to(settings: ExchangeSettings, tasks: Iterable[str]) -> tuple[str, ...]:
    """The topics of our tasks, or those that the settings name."""
    shards = settings.listen_shards
    if shards is None:
        shards = {shard_of(task, settings.shards) for task in tasks}
    return tuple(topic_of(settings.swarm, shard) for shard in sorted(shards))


class HeaderPlane:
    """Announces sealed headers, and hands everything that is heard to `hear`."""

    def __init__(
        self, host: Host, settings: ExchangeSettings, topics: tuple[str, ...], hear: Callable[[Message], None]
    ) -> None:
        self._host = host
        self._settings = settings
        self._hear = hear
        self._subscriptions: dict[str, Subscription | None] = dict.fromkeys(topics)

    @property
    def overflowed(self) -> int:
        """Messages that the host dropped because we read too slowly."""
        return sum(subscription.dropped for subscription in self._subscriptions.values() if subscription)

    async def subscribe(self) -> bool:
        """Subscribe to the topics that we are not on yet; False when the host is down."""
        try:
            for topic, subscription in self._subscriptions.items():
                self._subscriptions[topic] = subscription or await self._host.subscribe(topic)
        except NetworkError as error:
            logger.info("not yet listening for rollouts: %s", error)
            return False
        return True

    async def run(self) -> None:
        """Listen to all topics, once subscribed, until cancelled or the host is closed."""
        async with asyncio.TaskGroup() as listeners:
            for topic, subscription in self._subscriptions.items():
                if subscription is not None:
                    listeners.create_task(self._listen(subscription), name=f"listen {topic}")

    async def announce(self, task: str, sealed: bytes) -> None:
        """Gossip a sealed header on the topic of its task. Raises NetworkError."""
        await self._host.publish(
            topic_of(self._settings.swarm, shard_of(task, self._settings.shards)), sealed
        )

    async def _listen(self, subscription: Subscription) -> None:
        try:
            async for message in subscription:
                self._hear_safely(message)
                # A full queue hands out message after message without a pause; others want to run too.
                await asyncio.sleep(0)
        finally:
            await subscription.aclose()

    def _hear_safely(self, message: Message) -> None:
        try:
            self._hear(message)
        except Exception:
            # The peer boundary: whatever a message does to us, the next one is heard.
            logger.exception("a header of %s could not be handled", message.sender)


# ---- bodies ----

BODY_PROTOCOL = f"/swarmnode/rollouts/{PROTOCOL}"
HASH_BYTES = 32
UPLOAD_BURST_S = 4.0
"""Seconds' worth of upload that may be used at once: after a round everybody asks at the same time."""

FOREIGN_PART = 4
"""Others' bodies may take up a quarter of what our own may: ours are asked for more often."""


class BodyStore:
    """Compressed bodies by SHA-256, bounded in bytes and number. The oldest leave first, because old headers
    are not selected any more."""

    def __init__(self, *, max_bytes: int, max_bodies: int) -> None:
        self._max_bytes = max_bytes
        self._max_bodies = max_bodies
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._bodies)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def put(self, body_hash: bytes, body: bytes) -> None:
        """Keep a body; the oldest ones leave until it fits."""
        if body_hash not in self._bodies:
            self._bodies[body_hash] = body
            self._size_bytes += len(body)
        while self._size_bytes > self._max_bytes or len(self._bodies) > self._max_bodies:
            _, oldest = self._bodies.popitem(last=False)
            self._size_bytes -= len(oldest)

    def get(self, body_hash: bytes) -> bytes | None:
        return self._bodies.get(body_hash)


class BodyPlane:
    """Serves the bodies we have and fetches those we want."""

    def __init__(
        self,
        host: Host,
        settings: ExchangeSettings,
        ledger: Ledger,
        *,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._clock = clock
        self._rng = rng
        self.own = BodyStore(max_bytes=settings.store_bytes, max_bodies=MAX_OWN_BODIES)
        self.foreign = BodyStore(max_bytes=settings.store_bytes // FOREIGN_PART, max_bodies=MAX_OWN_BODIES)
        self._upload = TokenBucket(
            rate_per_s=settings.upload_bytes_per_s, burst=settings.upload_bytes_per_s * UPLOAD_BURST_S
        )
        self._fallbacks = TokenBucket(rate_per_s=FALLBACKS_PER_S, burst=FALLBACKS_BURST)

    async def serve(self) -> bool:
        """Start to answer requests; False when the host is down."""
        try:
            await self._host.serve(BODY_PROTOCOL, self.answer, max_request_bytes=HASH_BYTES)
        except NetworkError as error:
            logger.info("not yet serving rollouts: %s", error)
            return False
        return True

    async def answer(self, peer: str, request: bytes) -> bytes:
        """The body that a peer asks for, or nothing."""
        now = self._clock()
        reputation = self._ledger.reputation
        if reputation.is_banned(peer, now):
            self._ledger.drop(Reason.BANNED, peer)
            return b""
        if not reputation.may_request(peer, now):
            self._ledger.drop(Reason.TOO_MANY_REQUESTS, peer)
            return b""
        if len(request) != HASH_BYTES:
            self._ledger.drop(Reason.BAD_REQUEST, peer)
            return b""
        body = self._held(request)
        if body is None:
            return b""
        if not self._upload.take(len(body), now=now):
            self._ledger.drop(Reason.UPLOAD_LIMITED, peer)
            return b""
        self._ledger.served += 1
        self._ledger.bytes_out += len(body)
        return body

    async def fetch(self, announcement: Announcement, *, timeout_s: float) -> bytes:
        """The body of a header, its hash checked. Raises Rejected (unavailable, timeout), HostDown."""
        header, author = announcement.header, announcement.author
        held = self._held(header.body_hash)
        if held is not None:
            return held
        deadline = asyncio.get_running_loop().time() + timeout_s
        body = await self._ask(author, header, deadline)
        if body is None:
            for peer in await self._others(author):
                body = body or await self._ask(peer, header, deadline)
        if body is None:
            raise Rejected(Reason.UNAVAILABLE)
        self._ledger.fetched += 1
        self._ledger.bytes_in += len(body)
        return body

    def _held(self, body_hash: bytes) -> bytes | None:
        return self.own.get(body_hash) or self.foreign.get(body_hash)

    async def _others(self, author: str) -> list[str]:
        """A few peers that may have fetched a body from an author who cannot give it to us. A proven author
        is asked for rarely enough, since it pauses after each failure; of all others together we ask
        seldom."""
        now = self._clock()
        newcomer = self._ledger.reputation.trust_of(author) == "newcomer"
        if newcomer and not self._fallbacks.take(now=now):
            return []
        others = [peer for peer in await self._host.peers() if peer != author]
        return self._rng.sample(others, min(FALLBACK_PEERS, len(others)))

    async def _ask(self, peer: str, header: Header, deadline: float) -> bytes | None:
        """The body from one peer, or None. Raises HostDown, and Rejected when it let us wait in vain."""
        timeout_s = deadline - asyncio.get_running_loop().time()
        if timeout_s <= 0 or not self._ledger.reputation.ask(peer, self._clock()):
            return None
        try:
            body = await self._host.request(
                peer,
                BODY_PROTOCOL,
                header.body_hash,
                timeout_s=timeout_s,
                max_response_bytes=header.body_bytes,
            )
        except HostDown:
            raise
        except MessageTooLarge:
            body = b"larger than announced"
        except RequestTimeout as error:
            raise Rejected(Reason.TIMEOUT, f"{peer} did not answer") from error
        except NetworkError as error:
            logger.debug("no body from %s: %s", peer, error)
            return None
        if not body:
            return None
        if hash_body(body) != header.body_hash:
            self._ledger.drop(Reason.WRONG_BODY, peer)
            return None
        return body
