"""What we remember of each peer, and the ledger: the one place where a Reason has consequences.

gossip, bodies -> [Reputation] -> listen or ignore, ask or wait
gossip, bodies, exchange -> [Ledger] -> Reputation;   ExchangeStats -> status, metrics, log

A reputation is how much a peer may still say, how well it behaved, and whether it answers. It is pure: time
is handed in. The score falls with each invalid message (limits.py) and recovers slowly, so that a broken peer
is heard again once it is mended. A fetch that gave us nothing is no offence; it only makes us wait before we
ask again, and ask others first. The number of peers is bounded: whoever was not heard of for longest is
forgotten, strangers before those who ever gave us a group, so that names without end displace each other.

The ledger counts everything and lets peers feel what they did.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from swarmnode.exchange.limits import (
    AUTHOR_JUDGE_BURST_S,
    AUTHOR_JUDGE_S_PER_S,
    HEADERS_BURST,
    HEADERS_PER_S,
    JUDGE_BURST_S,
    JUDGE_S_PER_S,
    MAX_TRACKED_PEERS,
    PACE,
    PENALTIES,
    PROVEN_AFTER,
    REQUESTS_BURST,
    REQUESTS_PER_S,
    SLOW_S,
    TAKEN_PER_GIVEN,
    UNFIT_AUTHORS,
    UNFIT_S,
    UNFIT_TRIAL_S,
    Reason,
)
from swarmnode.exchange.selection import Trust
from swarmnode.identity.keys import memorable_name

logger = logging.getLogger(__name__)


# ---- reputation ----

FULL_SCORE = 100.0
BAN_BELOW = 20.0
"""Five forgeries, or nine false claims, in short order."""
FORGIVE_AT = 50.0
"""A banned peer is heard again from here on: half an hour after its last offence."""
RECOVERY_PER_S = 1.0 / 60.0

FIRST_PAUSE_S = 5.0
"""Time before we fetch again from a peer that gave us nothing; doubled each time it happens again."""
GIVER_PAUSE_S = 1.0
"""The first such time for a proven author, after what may happen to anybody: a hiccup of its line, or of who
hands on its groups, is no reason for a swarm of two to stay apart for many rounds."""
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
        if not self.has(amount, now=now):
            return False
        self._level -= amount
        return True

    def has(self, amount: float = 1.0, *, now: float) -> bool:
        """Whether `amount` could be used up now."""
        elapsed_s = 0.0 if self._updated_at is None else max(0.0, now - self._updated_at)
        self._level = min(self._burst, self._level + elapsed_s * self._rate_per_s)
        self._updated_at = now
        return amount <= self._level

    def owe(self, amount: float) -> None:
        """Use up what there may not be: the time that follows makes up for it."""
        self._level -= amount


def _header_bucket() -> TokenBucket:
    return TokenBucket(rate_per_s=HEADERS_PER_S, burst=HEADERS_BURST)


def _request_bucket() -> TokenBucket:
    return TokenBucket(rate_per_s=REQUESTS_PER_S, burst=REQUESTS_BURST)


def _ask_bucket() -> TokenBucket:
    return TokenBucket(rate_per_s=PACE * REQUESTS_PER_S, burst=PACE * REQUESTS_BURST)


def _judge_bucket() -> TokenBucket:
    return TokenBucket(rate_per_s=AUTHOR_JUDGE_S_PER_S, burst=AUTHOR_JUDGE_BURST_S)


@dataclass(slots=True)
class Standing:
    """What is remembered of one peer."""

    score: float = FULL_SCORE
    scored_at: float = 0.0
    banned: bool = False
    failures: int = 0
    """Fetches in a row that gave us nothing of use."""
    ask_again_at: float = 0.0
    slow: bool = False
    """Its last group was long in coming, or in being judged."""
    judge_s: float = 0.0
    """What judging one of its groups takes, the last ones counting most."""
    accepted: int = 0
    headers: TokenBucket = field(default_factory=_header_bucket)
    requests: TokenBucket = field(default_factory=_request_bucket)
    """What it may still ask of us."""
    asks: TokenBucket = field(default_factory=_ask_bucket)
    """What we may still ask of it, by the same rule and a little less: it need not refuse us."""
    judging: TokenBucket = field(default_factory=_judge_bucket)
    """Seconds that our judge may still spend on it."""
    gave_bytes: float = 0.0
    """Bodies that came from it, its own and those that it handed on."""
    took_bytes: float = 0.0


class Reputation:
    """The standings of at most `max_peers` peers."""

    def __init__(self, *, max_peers: int = MAX_TRACKED_PEERS) -> None:
        self._max_peers = max_peers
        self.doubted: Collection[str] = frozenset()
        """Authors that count as newcomers, whatever was accepted from them: what they teach does not go our
        way (training/rules/teachers.py)."""
        self._givers: OrderedDict[str, Standing] = OrderedDict()
        """Peers that a group was accepted from, and all others:"""
        self._strangers: OrderedDict[str, Standing] = OrderedDict()

    def __len__(self) -> int:
        return len(self._givers) + len(self._strangers)

    # ---- what a peer may do ----

    def may_announce(self, peer: str, now: float) -> bool:
        """Whether there is anything left of the peer's allowance of headers."""
        return self._of(peer).headers.has(now=now)

    def announced(self, peer: str, now: float) -> None:
        """Use up one header of the peer's allowance."""
        self._of(peer).headers.take(now=now)

    def may_request(self, peer: str, now: float) -> bool:
        """Use up one body request of the peer's allowance."""
        return self._of(peer).requests.take(now=now)

    # ---- how it behaves ----

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

    def score(self, peer: str, now: float) -> float:
        """What is left of a peer's score."""
        return self._recover(self._of(peer), now)

    def banned_for_s(self, peer: str, now: float) -> float:
        """How long a ban will last if nothing more happens; 0 for who is not banned."""
        standing = self._of(peer)
        return (FORGIVE_AT - self._recover(standing, now)) / RECOVERY_PER_S if standing.banned else 0.0

    def banned_peers(self) -> tuple[str, ...]:
        return tuple(peer for peer, standing in self.standings() if standing.banned)

    # ---- what it gives and takes ----

    def gave(self, peer: str, size_bytes: int) -> None:
        """Take note of a body that came from this peer, whoever made it."""
        self._of(peer).gave_bytes += size_bytes

    def took(self, peer: str, size_bytes: int) -> None:
        """Take note of a body that this peer had from us."""
        self._of(peer).took_bytes += size_bytes

    def gives(self, peer: str) -> bool:
        """Return True if something came from the peer, and it did not take much more from us."""
        standing = self._of(peer)
        return standing.took_bytes < TAKEN_PER_GIVEN * standing.gave_bytes

    # ---- what it is worth to us ----

    def trust_of(self, peer: str) -> Trust:
        """What the peer has shown of itself as an author; asking does not count as hearing of it."""
        standing = self._known(peer)
        if standing is None or standing.accepted < PROVEN_AFTER or peer in self.doubted:
            return "newcomer"
        return "slow" if standing.slow or standing.failures else "proven"

    def failures(self, peer: str) -> int:
        """Fetches in a row from this author that gave us nothing."""
        standing = self._known(peer)
        return 0 if standing is None else standing.failures

    def accepted(self, peer: str) -> int:
        """Groups that were accepted from this author."""
        standing = self._known(peer)
        return 0 if standing is None else standing.accepted

    @property
    def givers(self) -> Collection[str]:
        """Authors of whom a group was accepted."""
        return self._givers.keys()

    def may_be_asked(self, peer: str, now: float) -> bool:
        """Whether the pause after its last failure is over, and it would not have to refuse us."""
        standing = self._known(peer)
        return standing is None or (now >= standing.ask_again_at and standing.asks.has(now=now))

    def has_judge_time(self, author: str, now: float) -> bool:
        """Whether our judge has time left for this author."""
        standing = self._known(author)
        return standing is None or standing.judging.has(0.0, now=now)

    def was_judged(self, author: str, took_s: float, now: float) -> None:
        """Judging a group of this author took so long, whatever came of it."""
        standing = self._of(author)
        standing.judging.has(0.0, now=now)  # The time until now is made up for first.
        standing.judging.owe(took_s)
        standing.judge_s = (standing.judge_s + took_s) / 2 if standing.judge_s else took_s

    def judge_s(self, author: str) -> float:
        """What judging one of this author's groups takes. 0: none was judged yet."""
        standing = self._known(author)
        return 0.0 if standing is None else standing.judge_s

    def ask(self, peer: str, now: float) -> bool:
        """Use up one of the requests that we may make of this peer; False when there is none left."""
        return self._of(peer).asks.take(now=now)

    def did_not_deliver(self, author: str, now: float, *, mishap: bool = False) -> None:
        """A fetch from this author gave us nothing of use, whosever fault it was. `mishap`: it may happen to
        anybody."""
        standing = self._of(author)
        if now < standing.ask_again_at:
            return  # It was asked before the pause began, for several at once: that is one mishap.
        first_s = GIVER_PAUSE_S if mishap and standing.accepted >= PROVEN_AFTER else FIRST_PAUSE_S
        pause_s = min(LONGEST_PAUSE_S, first_s * 2.0 ** min(standing.failures, 16))
        standing.failures += 1
        standing.ask_again_at = now + pause_s

    def did_deliver(self, author: str, took_s: float) -> None:
        """A fetch from this author gave us a group, after so long."""
        standing = self._of(author)
        standing.failures = 0
        standing.ask_again_at = 0.0
        standing.slow = took_s > SLOW_S

    def was_accepted(self, peer: str) -> None:
        standing = self._of(peer)
        standing.accepted += 1
        if peer in self._strangers:
            self._givers[peer] = self._strangers.pop(peer)
            if len(self._givers) > self._max_peers // 2:
                self._givers.popitem(last=False)

    def accepted_by_peer(self) -> dict[str, int]:
        """Groups accepted from each peer that is still remembered."""
        return {peer: standing.accepted for peer, standing in self._givers.items()}

    # ---- memory ----

    def standings(self) -> Iterator[tuple[str, Standing]]:
        """All of them; those heard of last come last."""
        yield from self._strangers.items()
        yield from self._givers.items()

    def restore(self, peer: str, standing: Standing) -> None:
        """Take up what was remembered of a peer before a restart."""
        kind = self._givers if standing.accepted else self._strangers
        if len(self) < self._max_peers:
            kind[peer] = standing

    def _known(self, peer: str) -> Standing | None:
        return self._givers.get(peer) or self._strangers.get(peer)

    def _of(self, peer: str) -> Standing:
        if peer in self._givers:
            self._givers.move_to_end(peer)
            return self._givers[peer]
        standing = self._strangers.setdefault(peer, Standing())
        self._strangers.move_to_end(peer)
        if len(self) > self._max_peers:
            self._strangers.popitem(last=False)
        return standing

    def _recover(self, standing: Standing, now: float) -> float:
        """Bring the score up to now."""
        elapsed_s = max(0.0, now - standing.scored_at)
        standing.score = min(FULL_SCORE, standing.score + elapsed_s * RECOVERY_PER_S)
        standing.scored_at = now
        return standing.score


# ---- what judging takes ----


class JudgeTime:
    """What the judge may still work for strangers: for proven authors together, for all others together, and
    for each alone. Time is handed in, by a clock that nobody sets."""

    def __init__(self, reputation: Reputation) -> None:
        self.reputation = reputation
        self._left = {
            proven: TokenBucket(rate_per_s=JUDGE_S_PER_S, burst=JUDGE_BURST_S) for proven in (False, True)
        }

    def is_left(self, trust: Trust, now: float) -> bool:
        """Whether authors of this kind may have a group judged now."""
        return trust == "neighbour" or self._left[trust == "proven"].has(0.0, now=now)

    def took(self, author: str, trust: Trust, seconds: float, now: float) -> None:
        """A judgement of this author's took so long, whatever came of it."""
        self.is_left(trust, now)  # The time until now is made up for first.
        self._left[trust == "proven"].owe(seconds)
        self.reputation.was_judged(author, seconds, now)


class Unfit:
    """Tasks whose episodes our own environment does not play in time, whoever sends them.

    Identities are free, so newcomers shut a task to newcomers alone: an author who gave us groups is heard
    until several of its kind overran. While a task is shut, one group is tried now and then; one that fits,
    whoever sent it, opens the task to all.
    """

    def __init__(self) -> None:
        self._overran: dict[tuple[str, bool], set[str]] = {}
        """Authors, by task and whether they are known."""
        self._fitted_at: dict[str, float] = {}
        self._until: dict[tuple[str, bool], float] = {}
        self._try_at: dict[tuple[str, bool], float] = {}

    def overran(self, task: str, author: str, now: float, *, known: bool) -> bool:
        """An author's episodes took too long; True: so the task is given up for a while. Not one of which
        others' episodes fitted lately. `known`: the author gave us groups before."""
        kind = task, known
        authors = self._overran.setdefault(kind, set())
        if len(authors) < UNFIT_AUTHORS:
            authors.add(author)
        if len(authors) < UNFIT_AUTHORS or now < self._fitted_at.get(task, -UNFIT_S) + UNFIT_S:
            return False
        was_open = now >= self._until.get(kind, now)
        self._until[kind], self._try_at[kind] = now + UNFIT_S, now + UNFIT_TRIAL_S
        del self._overran[kind]
        return was_open

    def fitted(self, task: str, now: float) -> None:
        """A group of the task was judged in time."""
        self._fitted_at[task] = now
        for known in (False, True):
            self._overran.pop((task, known), None)
            self._until.pop((task, known), None)

    def tried(self, task: str, now: float, *, known: bool) -> None:
        """A group of the task is fetched from an author of this kind."""
        self._try_at[task, known] = now + UNFIT_TRIAL_S

    def tasks(self, now: float, *, known: bool) -> frozenset[str]:
        """Those that nothing of such authors is fetched of now."""
        return frozenset(
            task
            for (task, of), until in self._until.items()
            if of == known and now < until and now < self._try_at[task, of]
        )


# ---- the ledger ----

_KNOWN = frozenset(Reason)


class HelpStats(msgspec.Struct, frozen=True):
    """What became of asking for help (helping.py), since the start."""

    asked: int = 0
    """Requests for help that we sent: no answer of ours was right."""
    heard: int = 0
    """Requests of others that were heard."""
    answered: int = 0
    """Own groups that were announced again because somebody had asked."""
    tried: int = 0
    """Examples that others could not answer and that we took on."""
    dropped: int = 0
    """Requests of others that were not heard: too many, too old, or not of our swarm or tasks."""


@dataclass(frozen=True, slots=True)
class ExchangeStats:
    """What the exchange did since it was made, and what it holds now."""

    headers_seen: int
    """Gossip messages that reached us, whatever became of them."""
    headers_accepted: int
    headers_waiting: int
    headers_overflowed: int
    """Lost because we read too slowly."""
    fetched: int
    """Bodies received from peers."""
    accepted: int
    """Groups that passed every check here."""
    drawn: int
    """Groups handed to the trainer."""
    buffered: int
    dropped: Mapping[str, int]
    """Dropped messages, counted by reason (limits.py)."""
    accepted_by_peer: Mapping[str, int]
    banned_peers: tuple[str, ...]
    published: int
    """Own groups announced."""
    unpublished: Mapping[str, int]
    """Own groups not announced, by reason."""
    served: int
    """Bodies given to peers."""
    pulled: int
    """Bodies of others that we fetched because somebody asked us for them."""
    through_holders: int
    """Bodies received from a peer other than their author."""
    bytes_in: int
    """Headers and bodies received, as their authors sent them (without gossip's own overhead)."""
    bytes_out: int
    upload_bytes_per_s: float
    """Most that bodies may take of the upload, as it is set."""
    judgements_stuck: int
    help: HelpStats


class Ledger:
    """Counters and reputations, brought together."""

    def __init__(
        self,
        reputation: Reputation,
        clock: Callable[[], float],
        *,
        on_ban: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """`on_ban` is called with each peer that gets banned."""
        self.reputation = reputation
        self._on_ban = on_ban
        self._clock = clock
        self.dropped: Counter[str] = Counter()
        self.unpublished: Counter[str] = Counter()
        self.headers_seen = 0
        self.headers_accepted = 0
        self.fetched = 0
        self.accepted = 0
        self.drawn = 0
        self.published = 0
        self.served = 0
        self.through_holders = 0
        self.bytes_in = 0
        self.bytes_out = 0

    def drop(self, reason: str, peer: str, detail: str = "") -> None:
        """Count something that was not used, and take its price from the peer it came from."""
        # A task may raise Rejected with words of its own.
        known = Reason(reason) if reason in _KNOWN else Reason.INTERNAL
        self.dropped[known] += 1
        penalty = PENALTIES.get(known)
        if penalty is None:
            return
        now = self._clock()
        newly_banned = self.reputation.punish(peer, penalty, now)
        logger.debug("%s from %s (score %.0f): %s", known, peer, self.reputation.score(peer, now), detail)
        if newly_banned:
            logger.warning(
                "%s (%s) is banned for now: its score fell below %.0f, at last for %s",
                memorable_name(peer),
                peer,
                BAN_BELOW,
                known,
            )
            self._on_ban(peer)

    def let_go(self, reason: Reason, count: int = 1) -> None:
        """Count what left the pool or the buffer without being used; nobody is to blame."""
        if count:
            self.dropped[reason] += count

    def accept(self, peer: str) -> None:
        self.accepted += 1
        self.reputation.was_accepted(peer)
