"""The record of an exchange, which survives a restart: what was seen, and what peers are worth.

Inbox, Fetcher, Reputation -> [Recorder] -> a file in the node's home -> [load] -> Inbox, Fetcher, Reputation

A checkpoint is written when rounds are done; this file at the start, soon after a ban and every
WRITE_EVERY_S, beside the event loop. So a node that is killed remembers its bans and the groups that it
trained on. The file lacks whatever was seen after the last write. Therefore a node that has run before takes
no header that its author dated before the new start: it may have heard the header in the gap, and gossip does
not repeat anything older than a few seconds anyway. Peers whose clock is behind are not heard for as long as
it is behind. One gap remains: a header dated ahead of time (by at most MAX_CLOCK_SKEW_S) and heard in the
last WRITE_EVERY_S before a kill can be sent once more within that time.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmnode.exchange.gossip.thanks import NOTHING_SAVED
from swarmnode.exchange.limits import MAX_SEEN, MAX_TRACKED_PEERS
from swarmnode.exchange.peers.recently_seen import KEY_BYTES
from swarmnode.exchange.peers.reputation import FULL_SCORE, Reputation, Standing
from swarmnode.identity.peer_id import MAX_PEER_ID_CHARS
from swarmnode.machine.storage import read_kept, replace_file

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 10.0

HURRY_S = 1.0
"""Least seconds between two writes, even if peers are banned one after the other."""

MAX_RECORD_BYTES = 16 * 1024 * 1024
"""More than a full record takes: 5 MiB, and 7 of receipts."""

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

SeenKeys = Annotated[tuple[tuple[Key, float], ...], Meta(max_length=MAX_SEEN)]
"""Keys, each with the time when it was first seen, oldest first."""


class SavedStanding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer's standing (reputation.py) without its allowances."""

    peer: Annotated[str, Meta(max_length=MAX_PEER_ID_CHARS)]
    score: Annotated[float, Meta(ge=0, le=FULL_SCORE)]
    scored_at: float
    banned: bool
    failures: Annotated[int, Meta(ge=0, le=2**31)]
    ask_again_at: float
    slow: bool
    accepted: Annotated[int, Meta(ge=0, le=2**53)]


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The contents of the file."""

    format: Literal[1] = 1
    headers_of_proven: SeenKeys = ()
    headers_of_others: SeenKeys = ()
    groups: SeenKeys = ()
    standings: Annotated[tuple[SavedStanding, ...], Meta(max_length=MAX_TRACKED_PEERS)] = ()
    receipts: msgspec.Raw = NOTHING_SAVED


_decoder = msgspec.msgpack.Decoder(Record)


def saved_standings(reputation: Reputation) -> tuple[SavedStanding, ...]:
    """Returns the standings of the peers about which something is known."""
    return tuple(
        SavedStanding(
            peer, one.score, one.scored_at, one.banned, one.failures, one.ask_again_at, one.slow, one.accepted
        )
        for peer, one in reputation.standings()
        if one.accepted or one.failures or one.score < FULL_SCORE
    )


def restore_standings(reputation: Reputation, saved: tuple[SavedStanding, ...]) -> None:
    """Restores saved standings of peers."""
    for one in saved:
        fields = msgspec.structs.asdict(one)
        reputation.restore(fields.pop("peer"), Standing(**fields))


def load(path: Path) -> Record | None:
    """Returns the record of an earlier run, or None if there was none. An unreadable one is set aside with a
    warning: its contents are lost, but not the fact that there was an earlier run."""
    if not path.exists():
        return None
    return read_kept(path, "the record of peers", _decoder.decode, MAX_RECORD_BYTES) or Record()


class Recorder:
    """Writes records to a file, in a thread and one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing: asyncio.Future[None] | None = None
        self._written: Record | None = None
        self._failed = False
        self._in_a_hurry = asyncio.Event()

    def hurry(self) -> None:
        """Has the record written within a second, because something must not be forgotten even if we are
        killed."""
        self._in_a_hurry.set()

    async def run(self, take: Callable[[], Record]) -> None:
        """Writes what `take` returns until cancelled: at once, so that the next run knows of this one, then
        now and then."""
        while True:
            await self.write(take())
            await asyncio.sleep(min(HURRY_S, WRITE_EVERY_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_EVERY_S - HURRY_S):
                    await self._in_a_hurry.wait()
            self._in_a_hurry.clear()

    async def write(self, record: Record) -> None:
        """Brings the file up to date if there is anything new. An error of the disk is logged once."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if record == self._written:
            return
        # Must not be cancelled: a thread left alone would write to the same file as the next.
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write, record)
        await asyncio.shield(self._writing)

    def _write(self, record: Record) -> None:
        try:
            replace_file(self.path, msgspec.msgpack.encode(record))
        except OSError as error:
            if not self._failed:
                logger.warning("cannot write the record of peers: %s; the node continues", error)
            self._failed = True
        else:
            self._failed = False
            self._written = record
