"""Learning curves of runs through a pipeline, and when one overtakes another. For pipeline_training.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """Of a learning curve."""

    tokens: int
    simulated_s: float
    cpu_s: float
    perplexity: float
    """At full depth."""


@dataclass(slots=True)
class Outcome:
    """Of one run."""

    name: str
    seed: int
    stages: int
    curve: list[Point] = field(default_factory=list)
    depths: dict[int, float] = field(default_factory=dict)
    """Perplexity by number of stages, the mean over all choices."""

    @property
    def perplexity(self) -> float:
        return self.depths[self.stages]

    @property
    def half_depth_ratio(self) -> float:
        return self.depths[self.stages // 2] / self.depths[self.stages]


def overtaken_at_share(skip: Outcome, full: Outcome) -> float:
    """From when on the full pipeline's curve stays below the skipping one's on the clock, as a share of the
    time that it trains; 1 where it never does. Past its end the skipping run keeps what it has reached."""
    behind_s = [
        point.simulated_s
        for point in full.curve
        if point.perplexity > perplexity_at(skip.curve, point.simulated_s)
    ]
    return behind_s[-1] / full.curve[-1].simulated_s if behind_s else 0.0


def perplexity_at(curve: Sequence[Point], simulated_s: float) -> float:
    """Between two points linear; before the first that of the first, behind the last that of the last."""
    before = curve[0]
    for point in curve:
        if point.simulated_s >= simulated_s:
            width_s = point.simulated_s - before.simulated_s
            share = (simulated_s - before.simulated_s) / width_s if width_s > 0 else 1.0
            return before.perplexity + max(0.0, share) * (point.perplexity - before.perplexity)
        before = point
    return before.perplexity


def as_figures(outcome: Outcome) -> dict[str, Any]:
    """What the curves show, for plotting."""
    return {
        "name": outcome.name,
        "seed": outcome.seed,
        "perplexity_by_stages": {str(count): round(value, 4) for count, value in outcome.depths.items()},
        "curve": [
            [point.tokens, round(point.simulated_s, 1), round(point.cpu_s, 2), round(point.perplexity, 4)]
            for point in outcome.curve
        ],
    }
