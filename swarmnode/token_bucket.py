"""Allowances: an average rate, and a burst at once.

[TokenBucket] -> Inbox, Reputation, JudgeTime, BodyTransfer, Holder, Helping, SharedEngine
"""


class TokenBucket:
    """Allows `rate_per_s` on average and `burst` at once.

    >>> bucket = TokenBucket(rate_per_s=1.0, burst=2.0)
    >>> [bucket.take(now=0.0), bucket.take(now=0.0), bucket.take(now=0.0), bucket.take(now=1.0)]
    [True, True, False, True]
    """

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._level = burst
        self._updated_at: float | None = None

    def take(self, amount: float = 1.0, *, now: float) -> bool:
        """Uses up `amount` and returns True, or nothing and returns False if there is not enough."""
        if not self.has(amount, now=now):
            return False
        self._level -= amount
        return True

    def has(self, amount: float = 1.0, *, now: float) -> bool:
        """Returns True if `amount` could be used up now."""
        elapsed_s = 0.0 if self._updated_at is None else max(0.0, now - self._updated_at)
        self._level = min(self._burst, self._level + elapsed_s * self._rate_per_s)
        self._updated_at = now
        return amount <= self._level

    def owe(self, amount: float) -> None:
        """Uses up `amount` even if there is less; the time that follows makes up for it."""
        self._level -= amount
