"""The record of an exchange, which outlives a restart: what was seen, and what peers are worth.

Inbox, Fetcher, Reputation -> [Recorder] -> a file in the node's home -> [load] -> Inbox, Fetcher, Reputation

A checkpoint is written when rounds are done; this file at the start, soon after a ban and every
WRITE_EVERY_S, beside the event loop, so that a node that is killed has not forgotten whom it banned and what
it trained on. What was seen after the last write is not in it. Therefore a node that has lived before takes
no header that its author dated before the new start: it may have been heard in the gap, and gossip does not
repeat what is older than a few seconds anyway. Peers whose clock is behind are not heard for as long as it is
behind. What remains: a header dated ahead of time (by no more than MAX_CLOCK_SKEW_S) that was heard in the
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
"""The least time between two writes, also where peers are banned one after the other."""

MAX_RECORD_BYTES = 16 * 1024 * 1024
"""More than a full record takes: 5 MiB, and 7 of receipts."""

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]

SeenKeys = Annotated[tuple[tuple[Key, float], ...], Meta(max_length=MAX_SEEN)]
"""Keys and when each was seen first, oldest first."""


class SavedStanding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer's standing (reputation.py), but for its allowances."""

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

    format: Literal[1] = 1
    headers_of_proven: SeenKeys = ()
    headers_of_others: SeenKeys = ()
    groups: SeenKeys = ()
    standings: Annotated[tuple[SavedStanding, ...], Meta(max_length=MAX_TRACKED_PEERS)] = ()
    receipts: msgspec.Raw = NOTHING_SAVED


_decoder = msgspec.msgpack.Decoder(Record)


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
        fields = msgspec.structs.asdict(one)
        reputation.restore(fields.pop("peer"), Standing(**fields))


def load(path: Path) -> Record | None:
    """The record that an earlier life left, or None when there was none. One that cannot be read is set
    aside, with a warning: what it knew is lost, and that there was a life before is not."""
    if not path.exists():
        return None
    return read_kept(path, "the record of peers", _decoder.decode, MAX_RECORD_BYTES) or Record()


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
                logger.warning("cannot write the record of peers: %s; the node continues", error)
            self._failed = True
        else:
            self._failed = False
            self._written = record
