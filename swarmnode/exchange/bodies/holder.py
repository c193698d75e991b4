"""Bodies that a node hands on: their content can be reached even if their author's machine cannot.

gossip -> [Holder.note_announcement] who announced what
request -> BodyTransfer.answer -> [Holder.pull] -> the author, over the connection that it opened -> store

Two homes behind their routers cannot dial each other, but both have dialled some peer: a seed, or a node with
a forwarded port. A connection has two directions, so a peer connected to both can fetch a body from its
author and hand it to the other. A body is fetched when it is first asked for, once however many peers ask,
and kept in a bounded store. Its hash is checked here and again by the receiver, so a holder need not be
trusted.

A holder dials nobody on behalf of others, and fetches only bodies that the author itself announced lately: a
made-up name costs one table look-up. The memory for one author is bounded, and only connected peers are
remembered at all. Announcing costs nothing, and neither does an identity, so authors that announce and do not
deliver must not take memory or places from others: authors that gave us a body have most of the places, and
none occupies them for longer than its own allowance.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from time import monotonic

from swarmnode.errors import Rejected
from swarmnode.exchange.library.signed_group import glance
from swarmnode.exchange.limits import MAX_HEADER_BYTES, SLOW_S
from swarmnode.network.host import Message
from swarmnode.network.stream_slots import MAX_STREAMS
from swarmnode.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

MAX_ANNOUNCED_PER_AUTHOR = 128
"""Bodies of one author that others may ask us for: some rounds' worth. Older headers are hardly ever
selected."""

MAX_AUTHORS = 512
"""Connected authors whose announcements are remembered: some 8 MiB if all of them announce without end."""

MAX_EARLY = 256
"""Announcements kept from peers that do not seem to be connected: a peer that has just connected announces,
too."""

PULL_S = 5.0
"""Seconds within which an author has to give us a body that others ask us for. The asker may be gone by then,
but finds the body when it asks again."""

MAX_PULLS = 64
"""Bodies fetched for others at the same time: 2 MiB of usual ones."""

MAX_PULLS_OF_STRANGERS = 16
"""Most of these that are from authors that have not given us a body yet, one from each."""

MAX_PULLS_PER_AUTHOR = 4
"""Bodies fetched at the same time from one author that has given us one."""

MAX_WAITING = MAX_STREAMS // 2
"""Askers that wait at the same time, in half of the places for streams: a stream that is worked on makes no
room for another, however long the author is silent. Further askers are told "not here" at once."""

MAX_WAITING_FOR_STRANGERS = MAX_WAITING // 2

WAITS_S_PER_S = 0.5
"""Seconds in each second that we wait for one author in vain, or beyond SLOW_S for a body that it gives."""

WAITS_BURST_S = PULL_S
"""An author's line may fail it once; then others are served first."""

MAX_TRIES = 2
"""Failed tries to fetch one body: nobody may make us ask an author in vain for ever."""

Pull = Callable[[str, bytes, int], Awaitable[bytes | None]]
"""Called with (author, hash, size in bytes); returns the body from its author, or None if there is none."""


@dataclass(slots=True)
class Announced:
    """A body that its author announced."""

    size_bytes: int
    created_ms: int
    """By the author's clock."""
    tries: int = MAX_TRIES
    """Failed tries that are left."""


@dataclass(slots=True)
class Author:
    """A connected peer that announces."""

    bodies: dict[bytes, Announced] = field(default_factory=dict[bytes, Announced])
    pulls: int = 0
    """Fetches under way."""
    has_given: bool = False
    """True once it has given us a body."""
    waits: TokenBucket = field(default_factory=lambda: TokenBucket(WAITS_S_PER_S, WAITS_BURST_S))
    """Seconds that we may still wait for it in vain."""

    def remember(self, body_hash: bytes, announced: Announced) -> None:
        """Keeps one more body. The oldest by the author's own clock leaves: anybody may send old headers of
        others again, and they must not displace new ones."""
        self.bodies.setdefault(body_hash, announced)
        if len(self.bodies) > MAX_ANNOUNCED_PER_AUTHOR:
            del self.bodies[min(self.bodies, key=lambda one: self.bodies[one].created_ms)]


class Holder:
    """Knows the bodies that connected authors announced, and fetches them when others ask."""

    def __init__(self, pull: Pull) -> None:
        self._pull = pull
        self._connected: frozenset[str] = frozenset()
        self._authors: OrderedDict[str, Author] = OrderedDict()
        self._early: deque[Message] = deque(maxlen=MAX_EARLY)
        self._pulls: dict[tuple[str, bytes], asyncio.Task[bytes | None]] = {}
        self._pulls_of_strangers = self._waiting = self._waiting_for_strangers = 0
        self._tasks: asyncio.TaskGroup | None = None
        self.pulled = 0
        """Bodies that we fetched because others asked for them."""

    def set_connected(self, peers: Collection[str]) -> None:
        """Sets the peers that we are connected to. Announcements of all others are forgotten."""
        came, self._connected = frozenset(peers) - self._connected, frozenset(peers)
        for author in self._authors.keys() - self._connected:
            del self._authors[author]
        early = tuple(self._early)
        self._early.clear()
        for message in early:
            if message.sender in came:
                self.note_announcement(message)

    def note_announcement(self, message: Message) -> None:
        """Remembers the body that a gossiped header announces, if we could fetch it.

        The signature inside is not checked: the network has verified the sender, and a fetched body must have
        the announced hash.
        """
        author = message.sender
        if len(message.data) > MAX_HEADER_BYTES:
            return
        if author not in self._connected:
            self._early.append(message)
            return
        try:
            said_author, header = glance(message.data)
        except Rejected:
            return
        if said_author != author:
            return
        known = self._authors.setdefault(author, Author())
        self._authors.move_to_end(author)
        known.remember(header.body_hash, Announced(header.body_bytes, header.created_ms))
        if len(self._authors) > MAX_AUTHORS:
            # Authors that gave us a body stay; strangers displace each other.
            strangers = (name for name, one in self._authors.items() if not one.has_given)
            del self._authors[next(strangers, next(iter(self._authors)))]

    async def run(self) -> None:
        """Fetches for others until cancelled. While it does not run, nothing is fetched for anybody."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    async def pull(self, author: str, body_hash: bytes) -> bytes | None:
        """Returns the body that `author` announced under this hash, or None if we cannot get it."""
        known = self._authors.get(author)
        announced = None if known is None else known.bodies.get(body_hash)
        if known is None or announced is None or not announced.tries:
            return None
        stranger = not known.has_given
        if self._waiting >= MAX_WAITING or (
            stranger and self._waiting_for_strangers >= MAX_WAITING_FOR_STRANGERS
        ):
            return None
        running = self._pulls.get((author, body_hash))
        if running is None:
            if self._tasks is None or not self._has_place(known):
                return None
            running = self._start_pull(self._tasks, author, known, body_hash, announced)
        # If the asker goes away, the fetch goes on: other and later askers still want the body. If this
        # holder stops, the fetch is cancelled, but its askers are not.
        self._waiting += 1
        self._waiting_for_strangers += stranger
        try:
            await asyncio.wait([running])
        finally:
            self._waiting -= 1
            self._waiting_for_strangers -= stranger
        return None if running.cancelled() else running.result()

    def _has_place(self, author: Author) -> bool:
        if len(self._pulls) >= MAX_PULLS or not author.waits.has(0.0, now=monotonic()):
            return False
        if author.has_given:
            return author.pulls < MAX_PULLS_PER_AUTHOR
        return author.pulls == 0 and self._pulls_of_strangers < MAX_PULLS_OF_STRANGERS

    def _start_pull(
        self, tasks: asyncio.TaskGroup, name: str, author: Author, body_hash: bytes, announced: Announced
    ) -> "asyncio.Task[bytes | None]":
        stranger = not author.has_given

        def end(task: "asyncio.Task[bytes | None]") -> None:
            author.pulls -= 1
            self._pulls_of_strangers -= stranger
            del self._pulls[name, body_hash]

        author.pulls += 1
        self._pulls_of_strangers += stranger
        task = self._pulls[name, body_hash] = tasks.create_task(
            self._fetch(name, author, body_hash, announced)
        )
        task.add_done_callback(end)
        return task

    async def _fetch(self, name: str, author: Author, body_hash: bytes, announced: Announced) -> bytes | None:
        body, began = None, monotonic()
        try:
            body = await self._pull(name, body_hash, announced.size_bytes)
        except Exception:
            # The peer boundary: whatever one author does to us, we go on fetching from the others.
            logger.exception("failed to fetch a body of %s for others", name)
        took_s = monotonic() - began
        if body is None:
            announced.tries -= 1
            author.waits.owe(took_s)
        else:
            author.has_given = True
            author.waits.owe(max(0.0, took_s - SLOW_S))
            self.pulled += 1
        return body
