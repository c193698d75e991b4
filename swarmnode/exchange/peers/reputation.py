"""The standings of peers: how much each may still say, how well it behaved, and whether it answers.

gossip, bodies -> [Reputation] -> listen or ignore, ask or wait

It is pure: times are passed in. The score falls with each invalid message (drop_reasons.py) and recovers
slowly, so that a broken peer is heard again once it is mended. A fetch that gave us nothing is not an
offence; it only makes us wait before we ask again, and ask others first. The number of peers is bounded:
those not heard of for longest are forgotten first, and strangers before peers that ever gave us a group, so
that endless names displace only each other.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Literal

from swarmnode.exchange.exchange_stats import PeerFigures
from swarmnode.exchange.limits import (
    AUTHOR_JUDGE_BURST_S,
    AUTHOR_JUDGE_S_PER_S,
    HEADERS_BURST,
    HEADERS_PER_S,
    MAX_TRACKED_PEERS,
    PACE,
    PROVEN_AFTER,
    REQUESTS_BURST,
    REQUESTS_PER_S,
    SLOW_S,
    TAKEN_PER_GIVEN,
)
from swarmnode.token_bucket import TokenBucket

Trust = Literal["neighbour", "proven", "slow", "newcomer"]
"""neighbour: a policy of this process, whose groups need not be fetched. The others: see selection.py."""

FULL_SCORE = 100.0

BAN_BELOW = 20.0
"""Five forgeries, or nine false claims, in short order."""

FORGIVE_AT = 50.0
"""A banned peer is heard again from this score on: half an hour after its last offence."""

RECOVERY_PER_S = 1.0 / 60.0

FIRST_PAUSE_S = 5.0
"""Seconds before we fetch again from a peer that gave us nothing; doubled each time it happens again."""

GIVER_PAUSE_S = 1.0
"""The first such pause for a proven author, after a mishap that anybody may have: a hiccup of its line, or of
the peer that hands on its groups, should not keep a swarm of two apart for many rounds."""

LONGEST_PAUSE_S = 300.0

MOST_SHOWN = 64
"""Most peers that are listed one by one."""


@dataclass(slots=True)
class Standing:
    """Our memory of one peer."""

    score: float = FULL_SCORE
    scored_at: float = 0.0
    banned: bool = False
    failures: int = 0
    """Fetches in a row that gave us nothing of use."""
    ask_again_at: float = 0.0
    slow: bool = False
    """True if its last group took long to come, or to be judged."""
    judge_s: float = 0.0
    """Seconds that judging one of its groups takes; recent groups count most."""
    accepted: int = 0
    dropped: int = 0
    """Things from it that were not used through its own fault, since the start."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Things from it that were not used or counted against it, by reason, whether or not it was at fault."""
    headers: TokenBucket = field(default_factory=lambda: TokenBucket(HEADERS_PER_S, HEADERS_BURST))
    requests: TokenBucket = field(default_factory=lambda: TokenBucket(REQUESTS_PER_S, REQUESTS_BURST))
    """Requests that it may still make of us."""
    asks: TokenBucket = field(
        default_factory=lambda: TokenBucket(PACE * REQUESTS_PER_S, PACE * REQUESTS_BURST)
    )
    """Requests that we may still make of it: slightly fewer than we allow it, so that it need not refuse
    us."""
    judging: TokenBucket = field(
        default_factory=lambda: TokenBucket(AUTHOR_JUDGE_S_PER_S, AUTHOR_JUDGE_BURST_S)
    )
    """Seconds that our judge may still spend on it."""
    gave_bytes: float = 0.0
    """Bytes of the bodies that came from it, its own and those that it handed on."""
    took_bytes: float = 0.0

    def pause_s(self, now: float) -> float:
        """Returns the seconds left of its pause. A pause longer than LONGEST_PAUSE_S dates from before our
        clock was set back, and is over."""
        left_s = self.ask_again_at - now
        return left_s if 0 < left_s <= LONGEST_PAUSE_S else 0.0


_UNKNOWN = Standing()
"""The standing of peers that we know nothing about."""


class Reputation:
    """The standings of at most `max_peers` peers."""

    def __init__(self, *, max_peers: int = MAX_TRACKED_PEERS) -> None:
        self._max_peers = max_peers
        self.doubted: Collection[str] = frozenset()
        """Authors that count as newcomers, however many groups of theirs were accepted: what they teach does
        not go our way (training/rules/teachers.py)."""
        self._givers: OrderedDict[str, Standing] = OrderedDict()
        """Peers from which a group was accepted; `_strangers` holds all others."""
        self._strangers: OrderedDict[str, Standing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._givers) + len(self._strangers)

    # ---- what a peer may do ----

    def may_announce(self, peer: str, now: float) -> bool:
        """Returns True if some of the peer's allowance of headers is left."""
        return self._remember(peer).headers.has(now=now)

    def count_header(self, peer: str, now: float) -> None:
        """Uses up one header of the peer's allowance."""
        self._remember(peer).headers.take(now=now)

    def take_request(self, peer: str, now: float) -> bool:
        """Uses up one body request of the peer's allowance. Returns False if none is left."""
        return self._remember(peer).requests.take(now=now)

    # ---- how it behaves ----

    def is_banned(self, peer: str, now: float) -> bool:
        if not self.standing_of(peer).banned:
            return False  # Anybody can name any peer, so being asked about is not remembered.
        return self._is_still_banned(self._remember(peer), now)

    def punish(self, peer: str, penalty: float, now: float) -> bool:
        """Lowers a peer's score. Returns True if this gets the peer banned."""
        standing = self._remember(peer)
        standing.dropped += 1
        was_banned = self._is_still_banned(standing, now)
        standing.score = max(0.0, self._recover(standing, now) - penalty)
        newly_banned = not was_banned and standing.score < BAN_BELOW
        standing.banned = standing.banned or newly_banned
        return newly_banned

    def note_refused(self, peer: str, reason: str) -> None:
        """Notes why something of a peer was not used. This alone does not make us remember a peer."""
        standing = self._givers.get(peer) or self._strangers.get(peer)
        if standing is not None:
            standing.refused[reason] += 1

    def score(self, peer: str, now: float) -> float:
        """Returns a peer's present score."""
        return self._recover(self.standing_of(peer), now)

    def banned_for_s(self, peer: str, now: float) -> float:
        """Returns the seconds that a ban will last if nothing more happens; 0 for a peer that is not
        banned."""
        standing = self._remember(peer)
        return (FORGIVE_AT - self._recover(standing, now)) / RECOVERY_PER_S if standing.banned else 0.0

    def banned_peers(self, now: float) -> tuple[str, ...]:
        """Returns the peers whose ban has not ended."""
        return tuple(peer for peer, standing in self.standings() if self._is_still_banned(standing, now))

    # ---- what it gives and takes ----

    def note_given(self, peer: str, size_bytes: int) -> None:
        """Notes a body that came from this peer, regardless of its author."""
        self._remember(peer).gave_bytes += size_bytes

    def note_taken(self, peer: str, size_bytes: int) -> None:
        """Notes a body that this peer got from us."""
        self._remember(peer).took_bytes += size_bytes

    def gives_enough(self, peer: str) -> bool:
        """Returns True if something came from the peer, and it did not take much more from us."""
        standing = self._remember(peer)
        return standing.took_bytes < TAKEN_PER_GIVEN * standing.gave_bytes

    # ---- what it is worth to us ----

    def trust_of(self, peer: str) -> Trust:
        """Returns the trust that the peer has earned as an author; asking does not count as hearing of it."""
        standing = self.standing_of(peer)
        if standing.accepted < PROVEN_AFTER or peer in self.doubted:
            return "newcomer"
        return "slow" if standing.slow or standing.failures else "proven"

    def standing_of(self, peer: str) -> Standing:
        """Returns our memory of a peer, to be read only; asking does not count as hearing of it."""
        return self._givers.get(peer) or self._strangers.get(peer, _UNKNOWN)

    @property
    def givers(self) -> Collection[str]:
        """Authors from which a group was accepted."""
        return self._givers.keys()

    def may_be_asked(self, peer: str, now: float) -> bool:
        """Returns True if the pause after the peer's last failure is over, and it would not have to refuse
        us."""
        standing = self.standing_of(peer)
        return not standing.pause_s(now) and standing.asks.has(now=now)

    def has_judge_time(self, author: str, now: float) -> bool:
        """Returns True if our judge has time left for this author."""
        return self.standing_of(author).judging.has(0.0, now=now)

    def charge_judge(self, author: str, took_s: float, now: float) -> None:
        """Charges the seconds that judging a group of this author took, whatever came of it."""
        standing = self._remember(author)
        standing.judging.has(0.0, now=now)  # The time until now is credited first.
        standing.judging.owe(took_s)
        standing.judge_s = (standing.judge_s + took_s) / 2 if standing.judge_s else took_s

    def take_ask(self, peer: str, now: float) -> bool:
        """Uses up one of the requests that we may make of this peer. Returns False if none is left."""
        return self._remember(peer).asks.take(now=now)

    def note_failure(self, author: str, now: float, *, mishap: bool = False) -> None:
        """Notes that a fetch from this author gave us nothing of use, regardless of fault. `mishap`: it may
        happen to anybody."""
        standing = self._remember(author)
        if standing.pause_s(now):
            return  # It was asked for several groups before the pause: that is one mishap.
        first_s = GIVER_PAUSE_S if mishap and standing.accepted >= PROVEN_AFTER else FIRST_PAUSE_S
        pause_s = min(LONGEST_PAUSE_S, first_s * 2.0 ** min(standing.failures, 16))
        standing.failures += 1
        standing.ask_again_at = now + pause_s

    def note_delivery(self, author: str, took_s: float) -> None:
        """Notes that a fetch from this author gave us a group after `took_s` seconds."""
        standing = self._remember(author)
        standing.failures = 0
        standing.ask_again_at = 0.0
        standing.slow = took_s > SLOW_S

    def note_accepted(self, peer: str) -> None:
        standing = self._remember(peer)
        standing.accepted += 1
        if peer in self._strangers:
            self._givers[peer] = self._strangers.pop(peer)
            if len(self._givers) > self._max_peers // 2:
                self._givers.popitem(last=False)

    def figures(self, now: float) -> tuple[PeerFigures, ...]:
        """Returns figures of the peers that we know most about, at most MOST_SHOWN."""
        found = nlargest(MOST_SHOWN, self.standings(), key=lambda one: (one[1].accepted, one[1].dropped))
        return tuple(
            PeerFigures(
                *(peer, one.accepted, one.dropped, self._recover(one, now), one.banned, self.trust_of(peer)),
                dict(one.refused),
                one.pause_s(now),
            )
            for peer, one in found
            if one.accepted or one.dropped or one.refused
        )

    # ---- memory ----

    def standings(self) -> Iterator[tuple[str, Standing]]:
        """Yields all standings: strangers, then givers, in each case those heard of last at the end."""
        yield from self._strangers.items()
        yield from self._givers.items()

    def restore(self, peer: str, standing: Standing) -> None:
        """Restores what was remembered of a peer before a restart."""
        kind = self._givers if standing.accepted else self._strangers
        if len(self) < self._max_peers:
            kind[peer] = standing

    def _remember(self, peer: str) -> Standing:
        if peer in self._givers:
            self._givers.move_to_end(peer)
            return self._givers[peer]
        standing = self._strangers.setdefault(peer, Standing())
        self._strangers.move_to_end(peer)
        if len(self) > self._max_peers:
            self._strangers.popitem(last=False)
        return standing

    def _is_still_banned(self, standing: Standing, now: float) -> bool:
        standing.banned = standing.banned and self._recover(standing, now) < FORGIVE_AT
        return standing.banned

    def _recover(self, standing: Standing, now: float) -> float:
        """Brings the score up to date, and returns it."""
        elapsed_s = max(0.0, now - standing.scored_at)
        standing.score = min(FULL_SCORE, standing.score + elapsed_s * RECOVERY_PER_S)
        standing.scored_at = now
        return standing.score
