"""From outcomes to what is claimed: the best learning rate of each rule, means with bounds, a table.

Outcome -> [Table] -> claims, Markdown, sapo_picture.py

Two rules are compared seed by seed, since nodes of one seed draw the same examples: the mean of the ratios
(or differences) with its 95 % interval by Student's t.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from sapo_plan import Outcome, Run

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided quantiles of Student's t, by number of values."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and how far its 95 % interval goes to either side. Infinite for a single value."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def estimate(values: Sequence[float]) -> Estimate:
    """
    >>> estimate([1.0, 2.0, 3.0]).low < 0 < estimate([1.0, 1.1, 0.9]).low
    True
    """
    if len(values) < 2:
        return Estimate(values[0], float("inf"))
    return Estimate(fmean(values), T_95[len(values)] * stdev(values) / sqrt(len(values)))


class Table:
    """The outcomes by swarm, rule and learning rate."""

    def __init__(self, outcomes: Mapping[Run, Outcome]) -> None:
        self._outcomes = dict(outcomes)

    def rates(self, swarm: str, rule: str) -> dict[float | None, float]:
        """Cumulative reward at seed 0 of each learning rate that was tried."""
        found = {run.learning_rate: out for run, out in self._of(swarm, rule) if run.seed == 0}
        return {rate: outcome.cumulative for rate, outcome in found.items()}

    def best_rate(self, swarm: str, rule: str) -> float | None:
        """The learning rate of the best of them; the preset's where that was run, since it is claimed."""
        rates = self.rates(swarm, rule)
        return None if None in rates else max(rates, key=lambda rate: rates[rate])

    def tuned(self, swarm: str, rule: str) -> dict[int, Outcome]:
        """Outcomes at the best learning rate, by seed. Empty: nothing was run."""
        if not self.rates(swarm, rule):
            return {}
        best = self.best_rate(swarm, rule)
        found = {run.seed: out for run, out in self._of(swarm, rule) if run.learning_rate == best}
        return dict(sorted(found.items()))

    def rows(self) -> Iterator[tuple[str, str]]:
        """Swarms and rules of which there is an outcome, in the order of their first run."""
        yield from dict.fromkeys((run.swarm, run.rule) for run in self._outcomes)

    def paired(
        self,
        value: Callable[[Outcome, Outcome], float],
        swarm: str,
        rule: str,
        against: str,
        against_swarm: str | None = None,
    ) -> Estimate | None:
        """Of `value(outcome, outcome of against)` over common seeds. None: there is none."""
        ours, theirs = self.tuned(swarm, rule), self.tuned(against_swarm or swarm, against)
        values = [value(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        return estimate(values) if values else None

    def as_json(self) -> list[dict[str, Any]]:
        """The rows, each seed apart."""
        return [
            {
                "swarm": swarm,
                "rule": rule,
                "tried": {_rate(rate): value for rate, value in self.rates(swarm, rule).items()},
                "learning_rate": _rate(self.best_rate(swarm, rule)),
                "seeds": [_numbers(seed, found) for seed, found in self.tuned(swarm, rule).items()],
            }
            for swarm, rule in self.rows()
        ]

    def _of(self, swarm: str, rule: str) -> Iterable[tuple[Run, Outcome]]:
        return ((r, o) for r, o in self._outcomes.items() if (r.swarm, r.rule) == (swarm, rule))


def _numbers(seed: int, outcome: Outcome) -> dict[str, float | None]:
    return {
        "seed": seed,
        "cumulative": outcome.cumulative,
        "held_out_last": outcome.last,
        "generated_tokens": outcome.generated_tokens,
        "trained_tokens": outcome.trained_tokens,
        "received_tokens": outcome.received_tokens,
        "sent_bytes": outcome.sent_bytes,
        "cpu_s": outcome.cpu_s,
    }


def ratio(one: Outcome, other: Outcome) -> float:
    """Of cumulative rewards."""
    return one.cumulative / other.cumulative


def gap(one: Outcome, other: Outcome) -> float:
    """Of held-out rewards at the end."""
    return one.last - other.last


HEAD = (
    "swarm",
    "rule",
    "learning rate (tried: cumulative)",
    "seeds",
    "cumulative",
    "vs alone",
    "held-out at the end",
    "k tokens generated",
    "trained",
    "of others",
    "kB sent",
    "CPU s",
)


def markdown(table: Table) -> str:
    """One row for each swarm and rule; tokens and seconds are those of one seed, all nodes together."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    lines += [f"| {' | '.join(_cells(table, swarm, rule))} |" for swarm, rule in table.rows()]
    return "\n".join(lines)


def _cells(table: Table, swarm: str, rule: str) -> list[str]:
    found = list(table.tuned(swarm, rule).values())
    tried = ", ".join(f"{_rate(rate)}: {value:.1f}" for rate, value in table.rates(swarm, rule).items())
    beside = table.paired(ratio, swarm, rule, "alone")
    return [
        swarm,
        rule,
        f"**{_rate(table.best_rate(swarm, rule))}** ({tried})",
        str(len(found)),
        _shown(estimate([outcome.cumulative for outcome in found]), 1),
        "" if beside is None or rule == "alone" else _shown(beside, 2),
        _shown(estimate([outcome.last for outcome in found]), 3),
        f"{fmean(outcome.generated_tokens for outcome in found) / 1000:.0f}",
        f"{fmean(outcome.trained_tokens for outcome in found) / 1000:.0f}",
        _thousands([outcome.received_tokens for outcome in found]),
        f"{fmean(outcome.sent_bytes for outcome in found) / 1000:.0f}",
        f"{fmean(outcome.cpu_s for outcome in found):.0f}",
    ]


def _thousands(counts: Sequence[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return f"{fmean(known) / 1000:.0f}" if known else "?"


def _shown(found: Estimate, digits: int) -> str:
    if found.half == float("inf"):
        return f"{found.mean:.{digits}f}"
    return f"{found.mean:.{digits}f} ± {found.half:.{digits}f}"


def _rate(rate: float | None) -> str:
    return "preset" if rate is None else f"{rate:g}"
