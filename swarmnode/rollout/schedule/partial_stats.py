"""Counters of the partial-rollout scheduler."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PartialStats:
    """The state of the scheduler, with counters since it was made. None: not measured yet."""

    groups_in_flight: int
    """Number of groups begun and not complete."""
    surplus_groups: int
    """Number of complete groups kept for the next round."""
    concurrency: int
    step_base_s: float | None
    step_per_request_s: float | None
    dropped_stale: int
    """Number of groups that were older than `max_lag` allows and started over."""
    dropped_not_redrawable: int
    """Number of groups of a checkpoint whose example could not be drawn again."""
    refused: int
    """Number of examples that the engine refused."""
    resumed_requests: int
    """Number of requests that went to the engine with tokens."""
    idle_share: float | None
    """Share of the wanted slots in which nothing ran, over all steps."""
    mean_tokens_produced: float | None
    mean_tokens_trained: float | None
    """Mean tokens of handed-out completions. Below `mean_tokens_produced` while long answers are still under
    way."""


@dataclass(slots=True)
class RunningMean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float, count: int = 1) -> None:
        """Adds `count` values whose sum is `value`."""
        self.total += value
        self.count += count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class PartialCounters:
    """The scheduler's counters, for its stats."""

    dropped_stale: int = 0
    dropped_not_redrawable: int = 0
    refused: int = 0
    refused_in_a_row: int = 0
    resumed: int = 0
    busy: RunningMean = field(default_factory=RunningMean)
    """Running requests per wanted slot."""
    produced: RunningMean = field(default_factory=RunningMean)
    """Tokens per completion."""
    trained: RunningMean = field(default_factory=RunningMean)
