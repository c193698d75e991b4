"""What we remember of each peer: how much it may still say, how well it behaved, whether it answers.

gossip, bodies -> [Reputation] -> listen or ignore, ask or wait

Pure: time is handed in. The score falls with each invalid message (reasons.py) and recovers slowly, so that a
broken peer is heard again once it is mended. Not answering is no offence; it only makes us wait before we ask
again. The number of peers is bounded: whoever was not heard of for longest is forgotten.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from swarmnode.exchange.limits import (
    HEADERS_BURST,
    HEADERS_PER_S,
    MAX_TRACKED_PEERS,
    REQUESTS_BURST,
    REQUESTS_PER_S,
)

FULL_SCORE = 100.0
BAN_BELOW = 20.0
"""Four forgeries, or eight false claims, in short order."""
FORGIVE_AT = 50.0
"""A banned peer is heard again from here on: half an hour after its last offence."""
RECOVERY_PER_S = 1.0 / 60.0

FIRST_PAUSE_S = 5.0
"""Before we ask a peer again that did not answer; doubled each time it happens again."""
LONGEST_PAUSE_S = 300.0


class TokenBucket:
    """Allows `rate_per_s` on average and `burst` at once.

    >>> bucket = TokenBucket(rate_per_s=1.0, burst=2.0)
    >>> [bucket.take(now=0.0), bucket.take(now=0.0), bucket.take(now=0.0), bucket.take(now=1.0)]
    [True, True, False, True]
    """

    def __init__(self, *, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._updated_at: float | None = None

    def take(self, amount: float = 1.0, *, now: float) -> bool:
        """Use up `amount`, or nothing and False when there is not enough."""
        elapsed_s = 0.0 if self._updated_at is None else max(0.0, now - self._updated_at)
        self._level = min(self._burst, self._level + elapsed_s * self._rate_per_s)
        self._updated_at = now
        if amount > self._level:
            return False
        self._level -= amount
        return True


def _header_bucket() -> TokenBucket:
    return TokenBucket(rate_per_s=HEADERS_PER_S, burst=HEADERS_BURST)


def _request_bucket() -> TokenBucket:
    return TokenBucket(rate_per_s=REQUESTS_PER_S, burst=REQUESTS_BURST)


@dataclass(slots=True)
class Standing:
    """What is remembered of one peer."""

    score: float = FULL_SCORE
    scored_at: float = 0.0
    banned: bool = False
    silences: int = 0
    """Requests in a row that it did not answer."""
    ask_again_at: float = 0.0
    accepted: int = 0
    headers: TokenBucket = field(default_factory=_header_bucket)
    requests: TokenBucket = field(default_factory=_request_bucket)


class Reputation:
    """The standings of at most `max_peers` peers."""

    def __init__(self, *, max_peers: int = MAX_TRACKED_PEERS) -> None:
        self._max_peers = max_peers
        self._standings: OrderedDict[str, Standing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._standings)

    def may_announce(self, peer: str, now: float) -> bool:
        """Use up one header of the peer's allowance."""
        return self._of(peer).headers.take(now=now)

    def may_request(self, peer: str, now: float) -> bool:
        """Use up one body request of the peer's allowance."""
        return self._of(peer).requests.take(now=now)

    def is_banned(self, peer: str, now: float) -> bool:
        standing = self._of(peer)
        if standing.banned:
            standing.banned = self._recover(standing, now) < FORGIVE_AT
        return standing.banned

    def punish(self, peer: str, penalty: float, now: float) -> bool:
        """Lower a peer's score; True when this one gets it banned."""
        standing = self._of(peer)
        standing.score = max(0.0, self._recover(standing, now) - penalty)
        newly_banned = not standing.banned and standing.score < BAN_BELOW
        standing.banned = standing.banned or newly_banned
        return newly_banned

    def did_not_answer(self, peer: str, now: float) -> None:
        standing = self._of(peer)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(standing.silences, 16))
        standing.silences += 1
        standing.ask_again_at = now + pause_s

    def did_answer(self, peer: str) -> None:
        standing = self._of(peer)
        standing.silences = 0
        standing.ask_again_at = 0.0

    def may_be_asked(self, peer: str, now: float) -> bool:
        """Whether the pause after its last silence is over."""
        return now >= self._of(peer).ask_again_at

    def was_accepted(self, peer: str) -> None:
        self._of(peer).accepted += 1

    def accepted_by_peer(self) -> dict[str, int]:
        """Groups accepted from each peer that is still remembered."""
        return {peer: standing.accepted for peer, standing in self._standings.items() if standing.accepted}

    def score(self, peer: str, now: float) -> float:
        """What is left of a peer's score."""
        return self._recover(self._of(peer), now)

    def banned_peers(self) -> tuple[str, ...]:
        return tuple(peer for peer, standing in self._standings.items() if standing.banned)

    def _of(self, peer: str) -> Standing:
        standing = self._standings.setdefault(peer, Standing())
        self._standings.move_to_end(peer)
        if len(self._standings) > self._max_peers:
            self._standings.popitem(last=False)
        return standing

    def _recover(self, standing: Standing, now: float) -> float:
        """Bring the score up to now."""
        elapsed_s = max(0.0, now - standing.scored_at)
        standing.score = min(FULL_SCORE, standing.score + elapsed_s * RECOVERY_PER_S)
        standing.scored_at = now
        return standing.score
