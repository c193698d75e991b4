"""The settings of a round of partial rollouts."""

from dataclasses import dataclass
from typing import Literal

from swarmnode.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PartialSettings:
    """The settings of a round.

    >>> PartialSettings("refill", groups=4, group_size=8, max_lag=8).round_requests
    32
    """

    mode: Literal["refill", "april", "sync"]
    groups: int
    """N: the number of groups that a round hands out."""
    group_size: int
    max_lag: int
    """K: the greatest age in versions of a token that may be handed out, counted back from the newest
    policy."""
    over_provision: float = 2.0
    """r: the number of groups that a round of "april" starts, in units of N."""
    concurrency: int | None = None
    """C: the number of requests that "refill" keeps in the engine. None: chosen from the cost of a step
    (concurrency_control.py)."""
    in_turn: bool = True
    """True if "refill" begins with groups in the order in which they were drawn (departure_order.py). Without
    it, its first rounds consist of short answers: for comparison."""

    def __post_init__(self) -> None:
        if min(self.groups, self.group_size, 1 if self.concurrency is None else self.concurrency) < 1:
            raise ConfigError(
                "a round needs at least one group, of one completion, and one request at a time"
            )
        if self.max_lag < 0 or not 1 <= self.over_provision < float("inf"):
            raise ConfigError(
                f"max_lag {self.max_lag} with over_provision {self.over_provision} is not possible",
                hint="max_lag is at least 0, over_provision at least 1",
            )

    @property
    def groups_ahead(self) -> int:
        """The most groups that may be open beyond those that the round still has to hand out
        (departure_order.py)."""
        if self.mode == "refill":
            return self.max_lag * self.groups
        return round((self.over_provision - 1) * self.groups) if self.mode == "april" else 0

    @property
    def round_requests(self) -> int:
        """Number of completions that a round hands out."""
        return self.groups * self.group_size
