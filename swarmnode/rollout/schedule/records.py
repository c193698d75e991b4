"""What the partial-rollout scheduler is told, and what it tells.

config -> [PartialSettings] -> partial.py -> [PartialStats] -> status, metrics
"""

from dataclasses import dataclass, field
from typing import Literal

from swarmnode.errors import ConfigError
from swarmnode.rollout.engine import InFlight


@dataclass(frozen=True, slots=True)
class PartialSettings:
    """What a round is.

    >>> PartialSettings("refill", groups=4, group_size=8, max_lag=8).round_requests
    32
    """

    mode: Literal["refill", "april", "sync"]
    groups: int
    """N: groups that a round hands out."""
    group_size: int
    max_lag: int
    """K: oldest policy version a handed-out token may have, counted back from the newest."""
    over_provision: float = 2.0
    """r: groups that a round of "april" starts, in units of N."""
    concurrency: int | None = None
    """C: requests that "refill" keeps in the engine. None: chosen from what a step costs (concurrency.py)."""
    inflight: InFlight = "keep"
    """What a new policy does to requests in flight, where the engine can; else the nearest thing it can."""
    in_turn: bool = True
    """Whether "refill" begins with groups in the order in which they were drawn (turns.py). Without it, its
    first rounds are of short answers: for comparison."""

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
        """Groups that may be open beyond those that the round still has to hand out (staleness.py)."""
        if self.mode == "refill":
            return self.max_lag * self.groups
        return round((self.over_provision - 1) * self.groups) if self.mode == "april" else 0

    @property
    def round_requests(self) -> int:
        """Completions that a round hands out."""
        return self.groups * self.group_size


@dataclass(frozen=True, slots=True)
class PartialStats:
    """Where the scheduler stands; counters since it was made. None: not measured yet."""

    groups_in_flight: int
    """Begun, and not complete."""
    groups_not_begun: int
    """Drawn, and nothing asked yet."""
    surplus_groups: int
    """Complete, and kept for the next round."""
    concurrency: int
    step_base_s: float | None
    step_per_request_s: float | None
    dropped_stale: int
    """Groups that were older than `max_lag` allows and began again from scratch."""
    dropped_not_redrawable: int
    """Groups of a checkpoint whose example could not be drawn again."""
    refused: int
    """Examples that the engine did not take."""
    resumed_requests: int
    """Requests that went to the engine with tokens."""
    idle_share: float | None
    """Share of the wanted slots in which nothing ran, over all steps."""
    mean_tokens_produced: float | None
    mean_tokens_trained: float | None
    """Mean tokens of handed-out completions. Below `mean_tokens_produced`: long answers are still under
    way."""


@dataclass(slots=True)
class Mean:
    """A mean under way."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, count: int = 1) -> None:
        """`value` is the sum over `count` of them."""
        self.total += value
        self.count += count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Tally:
    """What the scheduler only counts, for its stats."""

    dropped_stale: int = 0
    dropped_not_redrawable: int = 0
    refused: int = 0
    refused_in_a_row: int = 0
    resumed: int = 0
    busy: Mean = field(default_factory=Mean)
    """Requests per wanted slot."""
    produced: Mean = field(default_factory=Mean)
    """Tokens per completion."""
    trained: Mean = field(default_factory=Mean)
