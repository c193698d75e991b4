"""What the data nodes of a run wrote down, as curves; and how far one run is from the spread of others.

metrics.jsonl of each data node -> [read_steps] -> Run -> [compared] -> Comparison -> pipeline_churn.py

Iterations are compared, and tokens: a pipeline with fewer data nodes learns from fewer tokens a step.
"""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from pipeline_swarm import Member


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration, as one data node wrote it down."""

    iteration: int
    """Steps taken, this one included."""
    at_s: float
    """Seconds since the epoch."""
    loss: float
    """A token."""
    tokens: float
    peer: str


@dataclass(slots=True)
class Run:
    """What came of one."""

    steps: list[Step] = field(default_factory=list[Step])
    strikes: list[str] = field(default_factory=list[str])
    """Of every death and freeze: who and how."""
    struck_in: list[int] = field(default_factory=list[int])
    """The iteration that each fell into."""
    struck: Counter[str] = field(default_factory=Counter[str])
    """By kind of member, and by killed or frozen."""
    ended: list[str] = field(default_factory=list[str])
    """Survivors that ended."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """Of the members' status pages."""

    @property
    def iterations(self) -> int:
        return max((step.iteration for step in self.steps), default=0)

    def losses(self) -> list[float]:
        """By iteration, over the data nodes; that of the one before where none lived to tell."""
        found: list[float] = []
        for steps in self._by_iteration():
            tokens = sum(step.tokens for step in steps)
            found.append(sum(step.loss * step.tokens for step in steps) / tokens if tokens else found[-1])
        return found

    def tokens(self) -> list[float]:
        """By iteration: of all data nodes that lived to tell."""
        return [sum(step.tokens for step in steps) for steps in self._by_iteration()]

    def data_nodes(self) -> list[int]:
        """By iteration."""
        return [len(steps) for steps in self._by_iteration()]

    def durations(self) -> list[float]:
        """From one step to the next, by iteration; the first iteration has none."""
        ends = [min(step.at_s for step in steps) for steps in self._by_iteration() if steps]
        return [after - before for before, after in pairwise(ends)]

    def repeated(self) -> int:
        """Iterations that a data node has taken part in twice."""
        twice = Counter((step.iteration, step.peer) for step in self.steps)
        return sum(count - 1 for count in twice.values())

    def untold(self) -> int:
        """Iterations that no data node wrote down: the only one was struck before it could."""
        return sum(not steps for steps in self._by_iteration())

    def _by_iteration(self) -> list[list[Step]]:
        found: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            found[step.iteration].append(step)
        return [found[iteration] for iteration in range(1, self.iterations + 1)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the last loss of a run is from others, in standard deviations of theirs; more is worse."""

    by_iteration: float
    by_tokens: float
    """Against theirs after as many tokens."""
    farthest: float
    """Of the whole curve, by iteration, without regard to sign; the deviation is that of all iterations."""


def read_steps(member: Member) -> Iterator[Step]:
    """What was written down since the last time."""
    if not member.records.exists():
        return
    with member.records.open("rb") as records:
        records.seek(member.offset)
        for line in records:
            if not line.endswith(b"\n"):
                break
            member.offset += len(line)
            record = json.loads(line)
            if record["event"] == "round" and "training.loss" in record:
                yield Step(
                    round(record["progress.policy_version"]),
                    record["time"],
                    record["training.loss"],
                    record["training.tokens"],
                    record["peer"],
                )


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Means over the last `width` values, fewer at the start.

    >>> smoothed([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    return [statistics.mean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def compared(run: Run, others: Sequence[Run], width: int) -> Comparison | None:
    """Of losses smoothed over `width` iterations. None: fewer than two others have no spread."""
    curve, curves = smoothed(run.losses(), width), [smoothed(each.losses(), width) for each in others]
    if len(curves) < 2:
        return None
    spent = sum(run.tokens())
    last = [each[-1] for each in curves]
    alike = [loss_after(spent, each, width) for each in others]
    return Comparison(
        (curve[-1] - statistics.mean(last)) / statistics.stdev(last),
        (curve[-1] - statistics.mean(alike)) / statistics.stdev(alike),
        _farthest(curve[width - 1 :], [each[width - 1 :] for each in curves]),
    )


def loss_after(tokens: float, run: Run, width: int) -> float:
    """The smoothed loss once a run has seen so many tokens; that of its end where it never has."""
    for spent, loss in zip(accumulate(run.tokens()), smoothed(run.losses(), width), strict=True):
        if spent >= tokens:
            return loss
    return smoothed(run.losses(), width)[-1]


def _farthest(curve: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    rows = list(zip(curve, *others, strict=False))
    spread = math.sqrt(statistics.mean(statistics.variance(theirs) for _, *theirs in rows))
    return max(abs(ours - statistics.mean(theirs)) for ours, *theirs in rows) / spread
