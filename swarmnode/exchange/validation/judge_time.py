"""The time that our judge may still work for strangers.

Fetcher -> [JudgeTime] -> Reputation
"""

from swarmnode.exchange.limits import JUDGE_BURST_S, JUDGE_S_PER_S
from swarmnode.exchange.peers.reputation import Reputation, Trust
from swarmnode.token_bucket import TokenBucket


class JudgeTime:
    """Seconds that the judge may still work for strangers: for proven authors together, for all others
    together, and for each author alone. Times are passed in, from a clock that nobody sets."""

    def __init__(self, reputation: Reputation) -> None:
        self.reputation = reputation
        self._left = {proven: TokenBucket(JUDGE_S_PER_S, JUDGE_BURST_S) for proven in (False, True)}

    def is_left(self, trust: Trust, now: float) -> bool:
        """Returns True if authors of this kind may have a group judged now."""
        return trust == "neighbour" or self._left[trust == "proven"].has(0.0, now=now)

    def charge(self, author: str, trust: Trust, seconds: float, now: float) -> None:
        """Charges the seconds of a judgement to its author and to authors of its kind, whatever came of
        it."""
        self.is_left(trust, now)  # The time until now is credited first.
        self._left[trust == "proven"].owe(seconds)
        self.reputation.charge_judge(author, seconds, now)
