"""The two planes of an exchange: headers are gossiped to everybody, bodies are asked for by their hash.

publish -> [HeaderPlane.announce] -> topic /swarmnode/3/<swarm>/rollouts/<shard> -> [run] -> Inbox -> pool
publish, fetch -> [BodyStore] -> whoever asks
choose -> [BodyPlane.fetch] -> stream /swarmnode/rollouts/3 -> [answer] of another node -> check_body
                                                                   `-> holding.py -> the author

Headers are spread over shards by task, so a node hears only of tasks it could train on.

A body comes from its author or from anyone who has it, or is connected to its author (holding.py). Request:
the 32 bytes of a hash and the author's peer id. Response: the body, or nothing at all for "not here" and "not
now". The hash is checked before a body is looked into, so it does not matter who gave it. We ask no peer for
more than it would ask of us: its own limits need not refuse us.

An author that we are not connected to is dialled; when that takes long, peers that we are connected to are
asked meanwhile (routes.py). Where dialling failed they are asked first, for some minutes.
"""

import asyncio
import hashlib
import itertools
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from swarmnode.errors import HostDown, MessageTooLarge, NetworkError, Rejected, RequestTimeout
from swarmnode.exchange.holding import PULL_S, Holder
from swarmnode.exchange.limits import (
    MAX_OWN_BODIES,
    PROTOCOL,
    VAIN_ASKS_BURST,
    VAIN_ASKS_PER_S,
    ExchangeSettings,
    Reason,
)
from swarmnode.exchange.messages import Announcement, hash_body
from swarmnode.exchange.reputation import Ledger, TokenBucket
from swarmnode.exchange.routes import Routes
from swarmnode.network.host import Host, Message, Subscription
from swarmnode.network.multiaddr import MAX_PEER_ID_CHARS, check_peer_id

logger = logging.getLogger(__name__)


# ---- headers ----


def shard_of(task: str, shards: int) -> int:
    """The shard of a task; the same on every node."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:8], "big") % shards


def topic_of(swarm: str, shard: int) -> str:
    """The topic of a shard.

    >>> topic_of("commons", 0)
    '/swarmnode/3/commons/rollouts/0'
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
MAX_REQUEST_BYTES = HASH_BYTES + MAX_PEER_ID_CHARS

HEAD_START_S = 0.5
"""How long only the author is asked, where it has to be dialled first: who answers does so sooner."""

HOLDERS_ASKED = 4
"""Connected peers that are asked for one body, one after the other. None is waited for: the next is asked
when one takes longer than HEAD_START_S and what a slow line needs for the body."""

LOOK_AGAIN_S = 0.2
"""Who is connected is looked up once more, this long after the last time, where a body cannot be had for want
of it: a home asks and announces in the second in which it comes, and is not to be told "not here"."""

SLOW_LINE_BYTES_PER_S = 256.0 * 1024
"""What a narrow line of a home carries. To ask another for what is on its way would make it narrower."""

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
    """Serves the bodies we have, fetches those we want, and hands on those of peers that nobody can dial."""

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
        self.holder = Holder(self._pull)
        self.routes = Routes()
        self._upload = TokenBucket(
            rate_per_s=settings.upload_bytes_per_s, burst=settings.upload_bytes_per_s * UPLOAD_BURST_S
        )
        self._kept_for_givers = settings.upload_bytes_per_s * UPLOAD_BURST_S / 2
        self._vain_asks = TokenBucket(rate_per_s=VAIN_ASKS_PER_S, burst=VAIN_ASKS_BURST)
        self._looking = asyncio.Lock()
        self._looked_at = 0.0
        """When we learnt who is connected, on the loop's clock."""

    async def serve(self) -> bool:
        """Start to answer requests; False when the host is down."""
        try:
            await self._host.serve(BODY_PROTOCOL, self.answer, max_request_bytes=MAX_REQUEST_BYTES)
        except NetworkError as error:
            logger.info("not yet serving rollouts: %s", error)
            return False
        return True

    def is_connected_to(self, peers: Collection[str]) -> None:
        """Take note of the peers that we hold a connection to."""
        self._looked_at = asyncio.get_running_loop().time()
        self.routes.connected = frozenset(peers)
        self.holder.is_connected_to(peers)

    async def _look_again(self) -> None:
        """See who has come since somebody looked: once, however many want to know."""
        loop = asyncio.get_running_loop()
        wanted_at = loop.time()
        async with self._looking:
            await asyncio.sleep(max(0.0, self._looked_at + LOOK_AGAIN_S - loop.time()))
            if self._looked_at >= wanted_at:
                return
            try:
                self.is_connected_to(await self._host.peers())
            except NetworkError as error:
                logger.debug("could not look who is connected: %s", error)

    async def answer(self, peer: str, request: bytes) -> bytes:
        """Return the body that a peer asks for, or nothing."""
        now, reputation = self._clock(), self._ledger.reputation
        if reputation.is_banned(peer, now):
            self._ledger.drop(Reason.BANNED, peer)
            return b""
        if not reputation.may_request(peer, now):
            self._ledger.drop(Reason.TOO_MANY_REQUESTS, peer)
            return b""
        try:
            body_hash, author = read_request(request)
        except Rejected as rejected:
            self._ledger.drop(rejected.reason, peer)
            return b""
        body = self._held(body_hash)
        # Nothing is fetched for whom we could not hand it to: the cap of our upload bounds that, too.
        if not self._may_take(peer, 0 if body is None else len(body)):
            self._ledger.drop(Reason.UPLOAD_LIMITED, peer)
            return b""
        if body is None and author != peer and not reputation.is_banned(author, now):
            if author not in self.routes.connected:
                await self._look_again()
            body = await self.holder.pull(author, body_hash)
            if body is not None and not self._may_take(peer, len(body)):
                self._ledger.drop(Reason.UPLOAD_LIMITED, peer)
                return b""
        if body is None:
            return b""
        self._upload.owe(len(body))
        reputation.took(peer, len(body))
        self._ledger.served += 1
        self._ledger.bytes_out += len(body)
        return body

    async def fetch(self, announcement: Announcement, *, timeout_s: float) -> bytes:
        """Return the body of a header, its hash checked: from its author, or from who else has it.

        Raises Rejected (unavailable, timeout) and HostDown.
        """
        held = self._held(announcement.header.body_hash)
        if held is not None:
            return held
        if not self.routes.connected:
            await self._look_again()
        search = _Search(announcement, asyncio.get_running_loop().time() + timeout_s)
        body = await self._find(search)
        if body is None and search.host_down is not None:
            raise search.host_down
        if body is None:
            raise Rejected(Reason.TIMEOUT if search.timed_out else Reason.UNAVAILABLE)
        self._ledger.fetched += 1
        self._ledger.bytes_in += len(body)
        return body

    def _may_take(self, peer: str, size_bytes: int) -> bool:
        """Return True if our upload is not used up. What is left of it when much is used is for those who
        give something, too."""
        reserve = 0.0 if self._ledger.reputation.gives(peer) else self._kept_for_givers
        return self._upload.has(size_bytes + reserve, now=self._clock())

    def _held(self, body_hash: bytes) -> bytes | None:
        return self.own.get(body_hash) or self.foreign.get(body_hash)

    async def _find(self, search: "_Search") -> bytes | None:
        """Ask the author where it can be dialled, and peers that we are connected to, the likeliest first.

        Who takes long is not waited for: the next is asked meanwhile, and whoever gives the body first has.
        """
        author, size_bytes = search.announcement.author, search.announcement.header.body_bytes
        connected = author in self.routes.connected
        direct = self.routes.is_direct(author, self._clock())
        newcomer = self._ledger.reputation.trust_of(author) == "newcomer"
        left = self.routes.holders(author, self._rng)[:HOLDERS_ASKED]
        asked: dict[asyncio.Task[bytes | None], str] = {}
        async with asyncio.TaskGroup() as tasks:

            def ask(peer: str) -> None:
                asked[tasks.create_task(self._ask(peer, search, search.left_s))] = peer

            if direct:
                ask(author)
                await asyncio.wait(asked, timeout=None if connected else HEAD_START_S)
            while (giver := next((task for task in asked if task.done() and task.result()), None)) is None:
                # Names of authors that nobody can reach cost nothing; what is asked in vain is bounded.
                if left and not (newcomer and not self._vain_asks.has(now=self._clock())):
                    self._vain_asks.owe(float(newcomer))
                    ask(left.pop(0))
                else:
                    left = []
                running = [task for task in asked if not task.done()]
                if not running:
                    break
                patience_s = HEAD_START_S + size_bytes / SLOW_LINE_BYTES_PER_S if left else None
                await asyncio.wait(running, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in asked:
                task.cancel()
        if direct and not connected and (giver is None or asked[giver] != author):
            self.routes.cannot_dial(author, self._clock())
        if giver is None:
            return None
        body, peer = giver.result(), asked[giver]
        if body is not None and peer != author:
            self._vain_asks.owe(-float(newcomer))
            before = itertools.takewhile(lambda one: one != peer, asked.values())
            self.routes.led_to(author, peer, rather_than=[one for one in before if one != author])
            self._ledger.through_holders += 1
            self._ledger.reputation.gave(peer, len(body))
        return body

    async def _ask(self, peer: str, search: "_Search", patience_s: float) -> bytes | None:
        """Ask one peer. Notes in `search` why there is no body."""
        header, author = search.announcement.header, search.announcement.author
        try:
            return await self._request(peer, author, header.body_hash, header.body_bytes, patience_s)
        except HostDown as error:
            search.host_down = error
        except RequestTimeout:
            search.timed_out = True
        return None

    async def _pull(self, author: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        """Fetch a body that others want from its author, and keep it for them."""
        try:
            body = await self._request(author, author, body_hash, size_bytes, PULL_S)
        except (HostDown, RequestTimeout):
            return None
        if body is not None:
            self._ledger.bytes_in += len(body)
            self._ledger.reputation.gave(author, len(body))
            self.foreign.put(body_hash, body)
        return body

    async def _request(
        self, peer: str, author: str, body_hash: bytes, size_bytes: int, timeout_s: float
    ) -> bytes | None:
        """Return the body as one peer gives it, or None. Raises HostDown, RequestTimeout."""
        if timeout_s <= 0 or not self._ledger.reputation.ask(peer, self._clock()):
            return None
        request = body_hash + author.encode()
        try:
            body = await self._host.request(
                peer, BODY_PROTOCOL, request, timeout_s=timeout_s, max_response_bytes=size_bytes
            )
        except (HostDown, RequestTimeout):
            raise
        except MessageTooLarge:
            # An author may announce another size to us than to who holds its body, who is not to blame.
            if peer == author:
                self._ledger.drop(Reason.WRONG_BODY, peer)
            return None
        except NetworkError as error:
            logger.debug("no body from %s: %s", peer, error)
            return None
        if not body:
            return None
        if hash_body(body) != body_hash:
            self._ledger.drop(Reason.WRONG_BODY, peer)
            return None
        return body


@dataclass(slots=True)
class _Search:
    """What became of the search for one body so far."""

    announcement: Announcement
    deadline: float
    timed_out: bool = False
    host_down: HostDown | None = None

    @property
    def left_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()


def read_request(request: bytes) -> tuple[bytes, str]:
    """Return the hash and the author of a request. Raises Rejected: bad_request."""
    try:
        author = check_peer_id(request[HASH_BYTES:].decode("ascii"))
    except (UnicodeDecodeError, NetworkError) as error:
        raise Rejected(Reason.BAD_REQUEST, "it is not a hash and a peer id") from error
    return request[:HASH_BYTES], author
