"""What an exchange remembers of the swarm over restarts: what it has seen, and what peers are worth.

Inbox, Fetcher -> [RecentlySeen] -> pool, buffer
Inbox, Fetcher, Reputation -> [Recorder] -> a file in the node's home -> [load] -> Inbox, Fetcher, Reputation
Ledger -> [Door.bar] -> Host.disconnect;   Host.peers -> [Door] -> Fetcher

What was seen is remembered for as long as it could come again, within a bound.

A checkpoint is written when rounds are done; this file at the start, soon after a ban and every
WRITE_EVERY_S, beside the event loop, so that a node that is killed has not forgotten whom it banned and what
it trained on. What was seen after the last write is not in it. Therefore a node that has lived before takes
no header that its author dated before the new start: it may have been heard in the gap, and gossip does not
repeat what is older than a few seconds anyway. Peers whose clock is behind are not heard for as long as it is
behind. What remains: a header dated ahead of time (by no more than MAX_CLOCK_SKEW_S) that was heard in the
last WRITE_EVERY_S before a kill can be sent once more within that time.

Whom we remember to be banned is kept off our connections, too. A ban that only ignored would still cost what
it takes to receive: the daemon reads, checks and forwards what a peer sends before we hear of it. So the
door tells the host (host.py), which keeps a peer away for as long as its ban lasts.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.errors import NetworkError
from swarmnode.exchange.limits import MAX_SEEN, MAX_TRACKED_PEERS
from swarmnode.exchange.reputation import FULL_SCORE, Reputation, Standing
from swarmnode.identity.keys import MAX_PEER_ID_CHARS
from swarmnode.machine.storage import replace_file
from swarmnode.network.host import MAX_BARRED, Host

logger = logging.getLogger(__name__)

KEY_BYTES = 16
"""Bytes kept of a digest: nobody finds two with one among the few thousand that are remembered."""


# ---- the record and its file ----

FORMAT = 1
WRITE_EVERY_S = 10.0
HURRY_S = 1.0
"""The least time between two writes, also where peers are banned one after the other."""
MAX_RECORD_BYTES = 16 * 1024 * 1024
"""Three times what a full record takes."""

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
SeenKeys = Annotated[tuple[tuple[Key, float], ...], Meta(max_length=MAX_SEEN)]
"""Keys and when each was seen first, oldest first."""


class SavedStanding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What reputation.py knows of one peer, but for its allowances."""

    peer: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]
    score: Annotated[float, Meta(ge=0, le=FULL_SCORE)]
    scored_at: float
    banned: bool
    failures: Annotated[int, Meta(ge=0, le=2**31)]
    ask_again_at: float
    slow: bool
    accepted: Annotated[int, Meta(ge=0, le=2**53)]


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The file."""

    format: int
    headers_of_proven: SeenKeys = ()
    headers_of_others: SeenKeys = ()
    groups: SeenKeys = ()
    standings: Annotated[tuple[SavedStanding, ...], Meta(max_length=MAX_TRACKED_PEERS)] = ()


def saved_standings(reputation: Reputation) -> tuple[SavedStanding, ...]:
    """Standings of the peers that there is anything to say of."""
    return tuple(
        SavedStanding(
            peer, one.score, one.scored_at, one.banned, one.failures, one.ask_again_at, one.slow, one.accepted
        )
        for peer, one in reputation.standings()
        if one.accepted or one.failures or one.score < FULL_SCORE
    )


def restore_standings(reputation: Reputation, saved: tuple[SavedStanding, ...]) -> None:
    """Take up what was remembered of peers."""
    for one in saved:
        standing = Standing(
            score=one.score,
            scored_at=one.scored_at,
            banned=one.banned,
            failures=one.failures,
            ask_again_at=one.ask_again_at,
            slow=one.slow,
            accepted=one.accepted,
        )
        reputation.restore(one.peer, standing)


def load(path: Path) -> Record | None:
    """The record that an earlier life left, or None when there was none. One that cannot be read is set
    aside, with a warning: what it knew is lost, and that there was a life before is not."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECORD_BYTES + 1)
        record = msgspec.msgpack.decode(data, type=Record)
        if record.format == FORMAT:
            return record
        problem = f"it has format {record.format}, this version reads {FORMAT}"
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        problem = str(error)
    logger.warning("what we remembered of peers cannot be read and is set aside: %s (%s)", problem, path)
    try:
        path.replace(path.with_name(f"{path.name}.damaged"))
    except OSError as error:
        logger.warning("it could not be set aside: %s", error)
    return Record(FORMAT)


class Recorder:
    """Writes what `take` gives to a file, now and then and at the end, in a thread and one at a time."""

    def __init__(self, path: Path, take: Callable[[], Record]) -> None:
        self._path = path
        self._take = take
        self._writing: asyncio.Future[None] | None = None
        self._written: Record | None = None
        self._failed = False
        self._in_a_hurry = asyncio.Event()

    def hurry(self) -> None:
        """Something must not be forgotten, whenever we are killed: write within a second."""
        self._in_a_hurry.set()

    async def run(self) -> None:
        """Write until cancelled: at once, so that the next life knows of this one, then now and then."""
        while True:
            await self.write()
            await asyncio.sleep(min(HURRY_S, WRITE_EVERY_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_EVERY_S - HURRY_S):
                    await self._in_a_hurry.wait()
            self._in_a_hurry.clear()

    async def write(self) -> None:
        """Bring the file up to date, if there is anything new. An error of the disk is told once."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        record = self._take()
        if record == self._written:
            return
        # Not to be cancelled: a thread that was left alone would meet the next one at the same file.
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, record)
        await asyncio.shield(self._writing)

    def _write(self, record: Record) -> None:
        try:
            replace_file(self._path, msgspec.msgpack.encode(record))
        except OSError as error:
            if not self._failed:
                logger.warning("what we remember of peers cannot be kept: %s; the node goes on", error)
            self._failed = True
        else:
            self._failed = False
            self._written = record


# ---- what was seen lately ----


def key_of(*parts: bytes) -> bytes:
    """A short key for what may be long. Parts of fixed length cannot be cut elsewhere into another key.

    >>> len(key_of(b"author", b"hash"))
    16
    """
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


class RecentlySeen:
    """A set of keys that forgets each after `ttl_s`, and the oldest when there are more than `max_keys`.

    >>> seen = RecentlySeen(max_keys=2, ttl_s=60.0)
    >>> seen.add(b"one", now=0.0), seen.add(b"one", now=1.0), seen.add(b"one", now=61.0)
    (True, False, True)
    """

    def __init__(self, *, max_keys: int, ttl_s: float) -> None:
        self._max_keys = max_keys
        self._ttl_s = ttl_s
        self._seen_at: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_at)

    def __contains__(self, key: object) -> bool:
        return key in self._seen_at

    def items(self) -> list[tuple[bytes, float]]:
        """Keys and when each was seen first, oldest first."""
        return list(self._seen_at.items())

    def restore(self, items: Iterable[tuple[bytes, float]]) -> None:
        """Take up what was remembered before a restart, as older than all that was added since."""
        since = self._seen_at
        self._seen_at = OrderedDict(sorted(items, key=lambda item: item[1]))
        self._seen_at.update(since)
        while len(self._seen_at) > self._max_keys:
            self._seen_at.popitem(last=False)

    def add(self, key: bytes, now: float) -> bool:
        """Remember a key; False when it was known already."""
        self.forget(now)
        if key in self._seen_at:
            return False
        self._seen_at[key] = now
        if len(self._seen_at) > self._max_keys:
            self._seen_at.popitem(last=False)
        return True

    def renew(self, key: bytes, now: float) -> None:
        """Remember a key as seen now, known or not."""
        self._seen_at.pop(key, None)
        self.add(key, now)

    def forget(self, now: float) -> None:
        """Let go of what was seen too long ago."""
        while self._seen_at:
            key, seen_at = next(iter(self._seen_at.items()))
            if now - seen_at < self._ttl_s:
                return
            del self._seen_at[key]


# ---- whom we keep out ----

LOOK_EVERY_S = 1.0
"""How often we look who is connected, when nobody has just been banned."""


class Door:
    """Disconnects whom `bar` names, and tells `tell` who is connected."""

    def __init__(
        self, host: Host, banned_for_s: Callable[[str], float], tell: Callable[[Sequence[str]], None]
    ) -> None:
        """`banned_for_s`: how long the ban of a peer still lasts."""
        self._host = host
        self._banned_for_s = banned_for_s
        self._tell = tell
        self._to_bar: deque[str] = deque(maxlen=MAX_BARRED)
        self._knocked = asyncio.Event()

    def bar(self, peer: str) -> None:
        """Somebody is banned: out, as soon as the host has time."""
        self._to_bar.append(peer)
        self._knocked.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self._bar_all()
            await self._look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._knocked.wait()
            self._knocked.clear()

    async def _bar_all(self) -> None:
        while self._to_bar:
            peer = self._to_bar.popleft()
            try:
                await self._host.disconnect(peer, barred_s=self._banned_for_s(peer))
            except NetworkError as error:
                logger.debug("%s is banned and could not be disconnected: %s", peer, error)

    async def _look(self) -> None:
        try:
            self._tell(await self._host.peers())
        except NetworkError as error:
            logger.debug("could not look who is connected: %s", error)
