"""Bodies on the wire: served to peers that ask, and fetched by their hash.

choose -> [BodyTransfer.fetch] -> stream /swarmnode/rollouts/4 -> [answer] of another node -> check_body
                                                                      `-> holder.py -> the author

A body comes from its author, from another peer that has it, or from one connected to its author (holder.py).
Request: the 32 bytes of a hash and the author's peer id. Response: the body, or nothing, both for "not here"
and for "not now". The hash is checked before a body is read, so it does not matter which peer sent it. We ask
no peer for more than we would let it ask of us, so its own limits need not refuse us.

An author that we are not connected to is dialled; if that takes long, connected peers are asked meanwhile
(body_routes.py). After a dial has failed, they are asked first for some minutes.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic

from swarmnode.errors import (
    HostDown,
    MessageTooLarge,
    NetworkError,
    PeerUnreachable,
    Rejected,
    RequestTimeout,
)
from swarmnode.exchange.bodies.body_routes import BodyRoutes
from swarmnode.exchange.bodies.body_store import BodyStore
from swarmnode.exchange.bodies.holder import PULL_S, Holder
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.library.shelf import Shelf
from swarmnode.exchange.limits import (
    MAX_BODY_BYTES,
    MAX_OWN_BODIES,
    PROTOCOL,
    VAIN_ASKS_BURST,
    VAIN_ASKS_PER_S,
)
from swarmnode.exchange.messages import Announcement, hash_body
from swarmnode.exchange.peers.ledger import Ledger
from swarmnode.network.host import Host
from swarmnode.network.multiaddr import MAX_PEER_ID_CHARS, check_peer_id
from swarmnode.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

BODY_PROTOCOL = f"/swarmnode/rollouts/{PROTOCOL}"

HASH_BYTES = 32

MAX_REQUEST_BYTES = HASH_BYTES + MAX_PEER_ID_CHARS

HEAD_START_S = 0.5
"""Seconds in which only the author is asked, if it has to be dialled first: an author that can answer does so
sooner."""

HOLDERS_ASKED = 4
"""Connected peers that are asked for one body, one after the other. If one of them, or a connected author,
takes longer than HEAD_START_S plus the time that a slow line needs for the body, the next is asked as
well."""

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the connections, unless a body asks for one."""

LOOK_AGAIN_S = 0.2
"""Least seconds between two looks at the connections, if a body is out of reach without a new one: a home
asks and announces within a second of connecting, and must not be told "not here"."""

SLOW_LINE_BYTES_PER_S = 256.0 * 1024
"""Rate of a narrow home line. Asking another peer for a body that is already on its way would narrow it
further."""

UPLOAD_BURST_S = 4.0
"""Seconds' worth of upload that may be used at once: after a round everybody asks at the same time. It is at
least two bodies, because the last half is kept for peers that give: with less, a slow upload would let no
body through."""

DOWNLOAD_BURST_S = 4.0
"""Seconds' worth of download that may be used at once. Whatever a body takes beyond that is made up for."""

FOREIGN_PART = 4
"""Others' bodies may take a quarter of the room that our own may: ours are asked for more often."""


class BodyTransfer:
    """Serves the bodies that we have, fetches those that we want, and hands on those of peers that nobody can
    dial."""

    def __init__(
        self,
        host: Host,
        settings: ExchangeSettings,
        ledger: Ledger,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        shelf: Shelf | None = None,
    ) -> None:
        """`shelf`: the library's, whose bodies are also served."""
        self._host = host
        self._ledger = ledger
        self._clock = clock
        self._rng = rng
        self._shelf = shelf
        self.own = BodyStore(max_bytes=settings.store_bytes, max_bodies=MAX_OWN_BODIES)
        self.foreign = BodyStore(max_bytes=settings.store_bytes // FOREIGN_PART, max_bodies=MAX_OWN_BODIES)
        self.holder = Holder(self._pull)
        self.routes = BodyRoutes()
        at_once = max(settings.upload_bytes_per_s * UPLOAD_BURST_S, 2.0 * MAX_BODY_BYTES)
        self._upload = TokenBucket(settings.upload_bytes_per_s, at_once)
        self._kept_for_givers = at_once / 2
        rate = settings.download_bytes_per_s
        self._download = None if rate is None else TokenBucket(rate, rate * DOWNLOAD_BURST_S)
        self._vain_asks = TokenBucket(VAIN_ASKS_PER_S, VAIN_ASKS_BURST)
        self._looking = asyncio.Lock()
        self._looked_at = 0.0
        """Time at which we last learnt which peers are connected, on a clock that nobody sets."""

    async def serve(self) -> None:
        """Starts answering requests. Raises NetworkError."""
        await self._host.serve(BODY_PROTOCOL, self.answer, max_request_bytes=MAX_REQUEST_BYTES)

    async def run(self) -> None:
        """Follows our connections, and fetches for others, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.holder.run())
            while True:
                await self._look_again()
                await asyncio.sleep(LOOK_EVERY_S)

    def set_connected(self, peers: Collection[str]) -> None:
        """Sets the peers that we are connected to."""
        self._looked_at = monotonic()
        self.routes.connected = frozenset(peers)
        self.holder.set_connected(peers)

    async def _look_again(self) -> None:
        """Looks up the connections again; concurrent callers share one look-up."""
        wanted_at = monotonic()
        async with self._looking:
            await asyncio.sleep(max(0.0, self._looked_at + LOOK_AGAIN_S - monotonic()))
            if self._looked_at >= wanted_at:
                return
            try:
                self.set_connected(await self._host.peers())
            except NetworkError as error:
                logger.debug("cannot list connected peers: %s", error)

    async def answer(self, peer: str, request: bytes) -> bytes:
        """Returns the body that a peer asks for, or nothing."""
        now, reputation = self._clock(), self._ledger.reputation
        if not self.admit_request(peer):
            return b""
        try:
            body_hash, author = read_request(request)
        except Rejected as rejected:
            self._ledger.drop(rejected.reason, peer, rejected.detail)
            return b""
        body = self._find_held(body_hash)
        # Nothing is fetched for a peer that we could not hand it to, so our upload cap bounds this as well.
        if not self._may_take(peer, 0 if body is None else len(body)):
            return b""
        if body is None and author != peer and not reputation.is_banned(author, now):
            if author not in self.routes.connected:
                await self._look_again()
            body = await self.holder.pull(author, body_hash)
        if body is None:
            return b""
        given = self.give(peer, body)
        self._ledger.served += bool(given)
        return given

    def admit_request(self, peer: str) -> bool:
        """Returns True if this peer may ask us something now, which uses up one of its requests. Otherwise
        counts why it may not."""
        now, reputation = self._clock(), self._ledger.reputation
        if reputation.is_banned(peer, now):
            self._ledger.drop(Reason.BANNED, peer)
            return False
        if not reputation.take_request(peer, now):
            self._ledger.drop(Reason.TOO_MANY_REQUESTS, peer)
            return False
        return True

    def give(self, peer: str, data: bytes) -> bytes:
        """Returns the data for a peer and charges it to our upload cap; returns nothing if the cap is used
        up."""
        if not self._may_take(peer, len(data)):
            return b""
        self._upload.owe(len(data))
        self._ledger.reputation.note_taken(peer, len(data))
        self._ledger.bytes_out += len(data)
        return data

    @property
    def may_fetch(self) -> bool:
        """True while our download allowance lasts. Nothing new is fetched once it is used up."""
        return self._download is None or self._download.has(0.0, now=self._clock())

    def count_download(self, size_bytes: int) -> None:
        """Counts received bytes towards our download."""
        self._ledger.bytes_in += size_bytes
        if self._download is not None:
            self._download.owe(size_bytes)

    async def fetch_from(self, peer: str, announcement: Announcement, *, timeout_s: float) -> bytes:
        """Returns the body of a header as this peer has it, its hash checked. Raises Rejected (unavailable,
        timeout) and HostDown."""
        held = self._find_held(announcement.header.body_hash)
        if held is not None:
            return held
        search = _Search(announcement, monotonic() + timeout_s)
        body = self._count_fetched(search, await self._ask(peer, search, timeout_s))
        self._ledger.reputation.note_given(peer, len(body))
        return body

    async def fetch(self, announcement: Announcement, *, timeout_s: float) -> bytes:
        """Returns the body of a header, its hash checked, from its author or from another peer that has it.

        Raises Rejected (unavailable, timeout) and HostDown.
        """
        held = self._find_held(announcement.header.body_hash)
        if held is not None:
            return held
        if not self.routes.connected:
            await self._look_again()
        search = _Search(announcement, monotonic() + timeout_s)
        return self._count_fetched(search, await self._find(search))

    def _count_fetched(self, search: "_Search", body: bytes | None) -> bytes:
        """Counts and returns the body that a search found. Raises Rejected, HostDown."""
        if body is None and search.host_down is not None:
            raise search.host_down
        if body is None:
            raise Rejected(Reason.TIMEOUT if search.timed_out else Reason.UNAVAILABLE)
        self._ledger.fetched += 1
        self.count_download(len(body))
        return body

    def _may_take(self, peer: str, size_bytes: int) -> bool:
        """Returns True if our upload is not used up, and otherwise counts that it is. Once much of it is
        used, the rest is kept for peers that give something, too."""
        reserve = 0.0 if self._ledger.reputation.gives_enough(peer) else self._kept_for_givers
        if self._upload.has(size_bytes + reserve, now=self._clock()):
            return True
        self._ledger.drop(Reason.UPLOAD_LIMITED, peer)
        return False

    def _find_held(self, body_hash: bytes) -> bytes | None:
        found = self.own.get(body_hash) or self.foreign.get(body_hash)
        return self._shelf.body(body_hash) if found is None and self._shelf is not None else found

    async def _find(self, search: "_Search") -> bytes | None:
        """Asks the author, unless it cannot be dialled, and then connected peers, the likeliest first.

        While a slow peer is waited for, the next one is asked; the first to give the body wins.
        """
        author = search.announcement.author
        patience_s = HEAD_START_S + search.announcement.header.body_bytes / SLOW_LINE_BYTES_PER_S
        connected = author in self.routes.connected
        direct = self.routes.may_dial(author, self._clock())
        newcomer = self._ledger.reputation.trust_of(author) == "newcomer"
        left = self.routes.holders(author, self._rng)[:HOLDERS_ASKED]
        asked: dict[asyncio.Task[bytes | None], str] = {}
        async with asyncio.TaskGroup() as tasks:

            def ask(peer: str) -> None:
                asked[tasks.create_task(self._ask(peer, search, search.left_s))] = peer

            if direct:
                ask(author)
                await asyncio.wait(asked, timeout=patience_s if connected else HEAD_START_S)
            while (giver := next((task for task in asked if task.done() and task.result()), None)) is None:
                # Author names that nobody can reach cost nothing to make up, so vain requests are bounded.
                if left and not (newcomer and not self._vain_asks.has(now=self._clock())):
                    self._vain_asks.owe(float(newcomer))
                    ask(left.pop(0))
                else:
                    left = []
                running = [task for task in asked if not task.done()]
                if not running:
                    break
                await asyncio.wait(
                    running, timeout=patience_s if left else None, return_when=asyncio.FIRST_COMPLETED
                )
            for task in asked:
                task.cancel()
        if direct and not connected and search.in_vain:
            self.routes.note_undialable(author, self._clock())
        if giver is None:
            return None
        body, peer = giver.result(), asked[giver]
        if body is not None:
            self._ledger.reputation.note_given(peer, len(body))
        if body is not None and peer != author:
            self._vain_asks.owe(-float(newcomer))
            before = itertools.takewhile(lambda one: one != peer, asked.values())
            self.routes.note_route(author, peer, rather_than=[one for one in before if one != author])
            self._ledger.through_holders += 1
        return body

    async def _ask(self, peer: str, search: "_Search", patience_s: float) -> bytes | None:
        """Asks one peer. Notes in `search` why there is no body."""
        header, author, body = search.announcement.header, search.announcement.author, None
        try:
            body = await self._request(peer, author, header.body_hash, header.body_bytes, patience_s)
        except HostDown as error:
            search.host_down = error
        except RequestTimeout:
            search.timed_out = True
            return None
        except PeerUnreachable as error:
            logger.debug("no body from %s: %s", peer, error)
            return None
        search.in_vain &= peer != author
        return body

    async def _pull(self, author: str, body_hash: bytes, size_bytes: int) -> bytes | None:
        """Fetches a body that others want from its author, and keeps it for them."""
        if not self.may_fetch:
            return None
        try:
            body = await self._request(author, author, body_hash, size_bytes, PULL_S)
        except (HostDown, RequestTimeout, PeerUnreachable):
            return None
        if body is not None:
            self.count_download(len(body))
            self._ledger.reputation.note_given(author, len(body))
            self.foreign.put(body_hash, body)
        return body

    async def _request(
        self, peer: str, author: str, body_hash: bytes, size_bytes: int, timeout_s: float
    ) -> bytes | None:
        """Returns the body as one peer gives it, or None. Raises HostDown, RequestTimeout,
        PeerUnreachable."""
        if timeout_s <= 0 or not self._ledger.reputation.take_ask(peer, self._clock()):
            return None
        request = body_hash + author.encode()
        try:
            body = await self._host.request(
                peer, BODY_PROTOCOL, request, timeout_s=timeout_s, max_response_bytes=size_bytes
            )
        except (HostDown, RequestTimeout, PeerUnreachable):
            raise
        except MessageTooLarge:
            # An author may announce another size to us than to the holder of its body, which is not to blame.
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
    """The state of the search for one body."""

    announcement: Announcement
    deadline: float
    timed_out: bool = False
    host_down: HostDown | None = None
    in_vain: bool = True
    """True as long as the author was not reached."""

    @property
    def left_s(self) -> float:
        return self.deadline - monotonic()


def read_request(request: bytes) -> tuple[bytes, str]:
    """Returns the hash and the author of a request. Raises Rejected: bad_request."""
    try:
        author = check_peer_id(request[HASH_BYTES:].decode("ascii"))
    except (UnicodeDecodeError, NetworkError) as error:
        raise Rejected(Reason.BAD_REQUEST, "expected a hash and a peer id") from error
    return request[:HASH_BYTES], author
