"""Where every gossiped header comes in, and where headers and then accepted groups wait.

HeaderPlane ---> [Inbox.hear] -+-> [HeaderPool] -> choose -> Fetcher -> [ReplayBuffer] -> Exchange.collect
Neighbourhood -> [Inbox.take] -+                                                            -> trainer

The inbox refuses what is cheap to refuse, then checks, and the order matters. Who may not speak is turned
away before a byte is decoded; nothing is remembered of a header until its signature has been checked; and an
author pays only for what it said itself and lately. Anybody can send a signed message of another again once
gossip has forgotten it, so what we have heard before costs nobody anything, and what is old comes out of a
small allowance of all authors together.

Checked headers wait in the pool to be selected. Most are not, and their bodies are never fetched. The pool is
bounded per author and in all, so its size does not grow with the swarm. When it is full, the author with most
headers in it loses the oldest: newcomers and quiet nodes always find room.

Accepted groups wait in the replay buffer until the trainer draws them. A group enters once, ages by our
policy version and by time, and leaves drawn, stale or displaced: the methods say how many left and why, so
that nothing leaves silently.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from swarmnode.errors import CheckpointError, Rejected
from swarmnode.exchange.limits import (
    LATE_HEADERS_BURST,
    LATE_HEADERS_PER_S,
    LATE_S,
    MAX_AUTHOR_SHARE,
    MAX_BODY_BYTES,
    MAX_CLOCK_SKEW_S,
    MAX_HEADER_BYTES,
    MAX_POOL_HEADERS,
    MAX_POOL_HEADERS_PER_AUTHOR,
    MAX_SEEN,
    MIN_AUTHOR_GROUPS,
    TOTAL_HEADERS_BURST,
    TOTAL_HEADERS_PER_S,
    ExchangeSettings,
    Reason,
)
from swarmnode.exchange.messages import Announcement, Arrival, Given, Header
from swarmnode.exchange.record import RecentlySeen, key_of
from swarmnode.exchange.reputation import Ledger, TokenBucket
from swarmnode.exchange.selection import Trust, draw, is_fresh
from swarmnode.exchange.validation import check_fits, check_gossip
from swarmnode.network.host import Message
from swarmnode.tasks.task import Task
from swarmnode.types import RolloutGroup

# ---- headers that wait to be selected ----


class HeaderPool:
    """Announcements by author, oldest first."""

    def __init__(
        self, *, max_headers: int = MAX_POOL_HEADERS, max_per_author: int = MAX_POOL_HEADERS_PER_AUTHOR
    ) -> None:
        self._max_headers = max_headers
        self._max_per_author = max_per_author
        self._by_author: dict[str, deque[Announcement]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def waiting(self) -> Mapping[str, Sequence[Announcement]]:
        return self._by_author

    def add(self, announcement: Announcement) -> int:
        """Put a header in; returns how many older ones had to leave for it (0 or 1)."""
        headers = self._by_author.setdefault(announcement.author, deque())
        headers.append(announcement)
        self._size += 1
        if len(headers) > self._max_per_author:
            self._remove_oldest(announcement.author)
        elif self._size > self._max_headers:
            self._remove_oldest(max(self._by_author.values(), key=len)[0].author)
        else:
            return 0
        return 1

    def remove(self, announcement: Announcement) -> None:
        """Take out a header that is in the pool."""
        self._by_author[announcement.author].remove(announcement)
        self._shrink(announcement.author)

    def keep_only(self, is_wanted: Callable[[Announcement], bool]) -> int:
        """Drop the headers that are not wanted any more; returns how many."""
        before = self._size
        for author in tuple(self._by_author):
            kept = deque(announcement for announcement in self._by_author[author] if is_wanted(announcement))
            self._size -= len(self._by_author[author]) - len(kept)
            self._by_author[author] = kept
            if not kept:
                del self._by_author[author]
        return before - self._size

    def _remove_oldest(self, author: str) -> None:
        self._by_author[author].popleft()
        self._shrink(author)

    def _shrink(self, author: str) -> None:
        self._size -= 1
        if not self._by_author[author]:
            del self._by_author[author]


# ---- the inbox ----


class Inbox:
    """Hears messages, and admits to the pool what is sound and new."""

    def __init__(
        self,
        pool: HeaderPool,
        ledger: Ledger,
        *,
        settings: ExchangeSettings,
        tasks: Mapping[str, Task],
        arrive: Callable[[], Arrival],
        on_admitted: Callable[[Announcement], None],
        is_neighbour: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        """`arrive` stamps what comes in; `on_admitted` is called with each header that entered the pool.
        What a neighbour announces does not come from the network but to `take`."""
        self._pool = pool
        self._ledger = ledger
        self._settings = settings
        self._tasks = tasks
        self._arrive = arrive
        self._on_admitted = on_admitted
        self._is_neighbour = is_neighbour
        self._everybody = {
            proven: TokenBucket(rate_per_s=TOTAL_HEADERS_PER_S, burst=TOTAL_HEADERS_BURST)
            for proven in (False, True)
        }
        self._late = TokenBucket(rate_per_s=LATE_HEADERS_PER_S, burst=LATE_HEADERS_BURST)
        # A header stays valid for max_age_s by its author's clock, which may be ahead of ours.
        ttl_s = settings.max_age_s + MAX_CLOCK_SKEW_S
        self._heard = RecentlySeen(max_keys=MAX_SEEN, ttl_s=ttl_s)
        """Messages whose signature was checked, whatever became of them."""
        self.seen = {proven: RecentlySeen(max_keys=MAX_SEEN, ttl_s=ttl_s) for proven in (False, True)}
        """Headers that were admitted, by whether their author was proven: a flood of new names must not make
        us forget what we heard from those we know."""
        self.born_at = 0.0
        """Nothing older is taken from the network: our life before a restart may have heard it."""

    def hear(self, message: Message) -> None:
        """Take in one gossip message, or count why not."""
        if self._is_neighbour(message.sender):
            return
        self._ledger.headers_seen += 1
        self._ledger.bytes_in += len(message.data)
        try:
            self._hear(message, self._arrive())
        except Rejected as rejected:
            self._ledger.drop(rejected.reason, message.sender, str(rejected))

    def take(self, author: str, header: Header, sealed: bytes, given: Given) -> None:
        """Take in a group of another policy of this process, if it is of use to us."""
        self._ledger.headers_seen += 1
        try:
            check_fits(header, self._settings, self._tasks)
            self.admit(Announcement(author, header, sealed, self._arrive(), given))
        except Rejected as rejected:
            self._ledger.let_go(Reason(rejected.reason))

    def admit(self, announcement: Announcement) -> None:
        """Put a checked header into the pool. Raises Rejected: duplicate."""
        self._check_new(announcement)
        self.remember(announcement)
        self._ledger.headers_accepted += 1
        self._ledger.let_go(Reason.CROWDED_OUT, self._pool.add(announcement))
        self._on_admitted(announcement)

    def remember(self, announcement: Announcement) -> None:
        """Do not take this header again, from now on for as long as what it announces is remembered: its
        author may announce it once more because somebody asks, and is not to be blamed for a copy."""
        seen = self.seen[self._is_proven(announcement.author)]
        seen.renew(_identity(announcement), self._arrive().at)

    def _hear(self, message: Message, arrival: Arrival) -> None:
        sender, reputation = message.sender, self._ledger.reputation
        if reputation.is_banned(sender, arrival.at):
            raise Rejected(Reason.BANNED)
        if message.oversized:
            raise Rejected(Reason.GOSSIP_TOO_LARGE, "a gossip message over the bound of the network")
        digest = key_of(message.data)
        if digest in self._heard:
            raise Rejected(Reason.DUPLICATE)
        if not reputation.may_announce(sender, arrival.at):
            raise Rejected(Reason.RATE_LIMITED)
        if not self._everybody[self._is_proven(sender)].take(now=arrival.at):
            raise Rejected(Reason.OVER_CAPACITY)
        try:
            announcement = check_gossip(
                message.data, sender, arrival, settings=self._settings, tasks=self._tasks
            )
        except Rejected as rejected:
            reputation.announced(sender, arrival.at)
            if rejected.reason in _SIGNED:
                self._heard.add(digest, arrival.at)
            raise
        self._heard.add(digest, arrival.at)
        self._check_new(announcement)
        self._charge(announcement)
        self.admit(announcement)

    def _charge(self, announcement: Announcement) -> None:
        """Take a new header from the allowance that it belongs to. Raises Rejected."""
        now, created_s = announcement.arrival.at, announcement.header.created_s
        if created_s < self.born_at:
            raise Rejected(Reason.BEFORE_OUR_TIME, f"{self.born_at - created_s:.0f} s before we started")
        if created_s >= now - LATE_S:
            self._ledger.reputation.announced(announcement.author, now)
        elif not self._late.take(now=now):
            raise Rejected(Reason.OVER_CAPACITY, "too many old headers")

    def _check_new(self, announcement: Announcement) -> None:
        identity = _identity(announcement)
        for seen in self.seen.values():
            seen.forget(announcement.arrival.at)
        if any(identity in seen for seen in self.seen.values()):
            raise Rejected(Reason.DUPLICATE)

    def _is_proven(self, author: str) -> bool:
        return self._ledger.reputation.trust_of(author) != "newcomer"


_SIGNED = frozenset(
    {
        Reason.NOT_A_PUBLISHER,
        Reason.OTHER_PROTOCOL,
        Reason.OTHER_SWARM,
        Reason.OTHER_TASK,
        Reason.NOT_EXCHANGED,
        Reason.NO_SPREAD,
        Reason.OVERSIZED,
        Reason.EXPIRED,
    }
)
"""Reasons that are found after the signature was, and that stay true of the same bytes."""


def _identity(announcement: Announcement) -> bytes:
    return key_of(announcement.author.encode(), announcement.header.body_hash)


# ---- accepted groups that wait to be drawn ----

SNAPSHOT_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group that passed every check, with what is needed to check it again after a restart."""

    announcement: Announcement
    body: bytes
    group: RolloutGroup

    @property
    def author(self) -> str:
        return self.announcement.author


class SavedGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One group of a snapshot: wire bytes and not results, because it will be checked and scored again."""

    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER_BYTES)]
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY_BYTES)]
    arrived_at: float
    arrived_version: int

    @property
    def arrival(self) -> Arrival:
        return Arrival(self.arrived_at, self.arrived_version)


class BufferSnapshot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    policy_version: int
    """Ours at that moment: what is heard between a restart and its first round is as old as that."""
    groups: tuple[SavedGroup, ...]


class ReplayBuffer:
    """Accepted groups until they are drawn: at most `capacity`, and not too many of them by one author."""

    def __init__(self, capacity: int, *, max_age_s: float, max_age_versions: int) -> None:
        self.capacity = capacity
        self._max_per_author = min(capacity, max(MIN_AUTHOR_GROUPS, int(capacity * MAX_AUTHOR_SHARE)))
        self._max_age_s = max_age_s
        self._max_age_versions = max_age_versions
        self._groups: list[Accepted] = []
        self._by_author: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def by_author(self) -> "Counter[str]":
        """How many groups of each author wait here."""
        return self._by_author

    def add(self, accepted: Accepted) -> Reason | None:
        """Put a group in; returns why another left for it, if one did: the oldest of its author or of all."""
        self._groups.append(accepted)
        self._by_author[accepted.author] += 1
        if self._by_author[accepted.author] > self._max_per_author:
            self._let_go(next(one for one in self._groups if one.author == accepted.author))
            return Reason.OVER_SHARE
        if len(self._groups) > self.capacity:
            self._let_go(self._groups[0])
            return Reason.CROWDED_OUT
        return None

    def keep_within(self, size_bytes: int) -> int:
        """Let go of groups until their bodies take no more; returns how many. Each time the oldest one of the
        author who takes most: wide groups of one do not displace those of others."""
        before = len(self._groups)
        while (sizes := self._bytes_by_author()).total() > size_bytes:
            largest = sizes.most_common(1)[0][0]
            self._let_go(next(one for one in self._groups if one.author == largest))
        return before - len(self._groups)

    def has_room_for(self, author: str, *, coming: int = 0) -> bool:
        """Whether one more group of this author would not displace another of the same author, `coming` ones
        included."""
        return self._by_author[author] + coming < self._max_per_author

    def drop_stale(self, now: float, policy_version: int) -> int:
        """Let go of groups that are too old for this policy version; returns how many."""
        before = len(self._groups)
        self._keep([one for one in self._groups if self._is_fresh(one, now, policy_version)])
        return before - len(self._groups)

    def draw(
        self, count: int, rng: random.Random, *, trust_of: Callable[[str], Trust], known: int
    ) -> list[RolloutGroup]:
        """Take out up to `count` groups, as `selection.draw` has it."""
        authors = [accepted.author for accepted in self._groups]
        drawn = set(draw(authors, trust_of, count, known, rng))
        groups = [accepted.group for place, accepted in enumerate(self._groups) if place in drawn]
        self._keep([accepted for place, accepted in enumerate(self._groups) if place not in drawn])
        return groups

    def snapshot(self, policy_version: int) -> bytes:
        """The waiting groups as bytes, for a checkpoint."""
        saved = (
            SavedGroup(
                accepted.announcement.sealed,
                accepted.body,
                accepted.announcement.arrival.at,
                accepted.announcement.arrival.policy_version,
            )
            for accepted in self._groups
        )
        return msgspec.msgpack.encode(BufferSnapshot(SNAPSHOT_FORMAT, policy_version, tuple(saved)))

    def _bytes_by_author(self) -> "Counter[str]":
        sizes: Counter[str] = Counter()
        for accepted in self._groups:
            sizes[accepted.author] += len(accepted.body)
        return sizes

    def _let_go(self, accepted: Accepted) -> None:
        self._groups.remove(accepted)
        self._by_author -= Counter((accepted.author,))

    def _keep(self, groups: list[Accepted]) -> None:
        if len(groups) < len(self._groups):
            self._groups = groups
            self._by_author = Counter(accepted.author for accepted in groups)

    def _is_fresh(self, accepted: Accepted, now: float, policy_version: int) -> bool:
        return is_fresh(
            accepted.announcement.arrival,
            now,
            policy_version,
            max_age_s=self._max_age_s,
            max_age_versions=self._max_age_versions,
        )


def read_snapshot(data: bytes) -> BufferSnapshot:
    """What `snapshot` wrote; an empty one for no bytes. Raises CheckpointError."""
    if not data:
        return BufferSnapshot(SNAPSHOT_FORMAT, 0, ())
    try:
        snapshot = msgspec.msgpack.decode(data, type=BufferSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the saved external groups are damaged: {error}") from error
    if snapshot.format != SNAPSHOT_FORMAT:
        raise CheckpointError(
            f"the saved external groups have format {snapshot.format}, this version reads {SNAPSHOT_FORMAT}"
        )
    return snapshot
