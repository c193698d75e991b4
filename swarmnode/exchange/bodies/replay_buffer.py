"""The replay buffer: accepted groups wait here until the trainer draws them.

Fetcher -> [ReplayBuffer] -> Exchange.collect -> trainer

A group enters once, ages by our policy version and by time, and leaves when it is drawn, stale or displaced.
The methods return how many left and why, so that no group leaves silently.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.exchange.bodies.selection import draw, is_fresh
from swarmnode.exchange.drop_reasons import Reason
from swarmnode.exchange.exchange_settings import ExchangeSettings
from swarmnode.exchange.limits import MAX_AUTHOR_SHARE, MIN_AUTHOR_GROUPS
from swarmnode.exchange.messages import Announcement, Arrival
from swarmnode.exchange.peers.reputation import Trust
from swarmnode.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class Accepted:
    """A group that passed every check."""

    announcement: Announcement
    group: RolloutGroup

    @property
    def author(self) -> str:
        return self.announcement.author


class ReplayBuffer:
    """Holds accepted groups until they are drawn: at most `capacity`, and not too many by one author."""

    def __init__(self, settings: ExchangeSettings) -> None:
        self.capacity = capacity = settings.buffer_groups
        self._max_per_author = min(capacity, max(MIN_AUTHOR_GROUPS, int(capacity * MAX_AUTHOR_SHARE)))
        self._settings = settings
        self._groups: list[Accepted] = []
        self._by_author: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def by_author(self) -> "Counter[str]":
        """Number of waiting groups of each author."""
        return self._by_author

    def add(self, accepted: Accepted) -> Reason | None:
        """Adds a group. If another one had to leave for it (the oldest of its author, or of all), returns
        why."""
        self._groups.append(accepted)
        self._by_author[accepted.author] += 1
        if self._by_author[accepted.author] > self._max_per_author:
            self._remove(next(one for one in self._groups if one.author == accepted.author))
            return Reason.OVER_SHARE
        if len(self._groups) > self.capacity:
            self._remove(self._groups[0])
            return Reason.CROWDED_OUT
        return None

    def has_room_for(self, author: str, *, coming: int = 0) -> bool:
        """Returns True if one more group of this author, after `coming` ones, would not displace another of
        its own."""
        return self._by_author[author] + coming < self._max_per_author

    def drop_stale(self, now: Arrival) -> int:
        """Drops the groups that are too old by now. Returns how many."""
        before = len(self._groups)
        self._keep([one for one in self._groups if is_fresh(one.announcement.arrival, now, self._settings)])
        return before - len(self._groups)

    def draw(
        self, count: int, rng: random.Random, *, trust_of: Callable[[str], Trust], known: int
    ) -> list[RolloutGroup]:
        """Takes out up to `count` groups, as `selection.draw` chooses them."""
        authors = [accepted.author for accepted in self._groups]
        drawn = set(draw(authors, trust_of, count, known, rng))
        groups = [accepted.group for place, accepted in enumerate(self._groups) if place in drawn]
        self._keep([accepted for place, accepted in enumerate(self._groups) if place not in drawn])
        return groups

    def _remove(self, accepted: Accepted) -> None:
        self._groups.remove(accepted)
        self._by_author -= Counter((accepted.author,))

    def _keep(self, groups: list[Accepted]) -> None:
        if len(groups) < len(self._groups):
            self._groups = groups
            self._by_author = Counter(accepted.author for accepted in groups)
