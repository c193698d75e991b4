"""Rewards of a run over its rounds, from the file that every node writes.

metrics.jsonl (monitors.py) -> [RewardHistory] -> overview.py, routes.py -> curves
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from swarmnode.extensions.page.growing_file import GrowingFile
from swarmnode.extensions.page.rollout_log import thinned
from swarmnode.types import mean_or_none

MOST_ROUNDS = 20_000
"""Rounds kept apart; of more of them, every second one of the older rounds goes."""
MOST_POINTS = 300
"""Points of a curve."""
MOST_TASKS = 32


@dataclass(frozen=True, slots=True)
class RoundRewards:
    """Rewards after one round, or of one evaluation. None: unknown."""

    round: int
    own: float | None
    external: float | None = None
    tasks: Mapping[str, float] = field(default_factory=dict[str, float])
    engine_gap: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Times of the round by name: generate_s, train_s, round_s."""


class RewardHistory:
    """The rewards of one run of one node. `read` takes in what was written since."""

    def __init__(self, folder: Path, run: str, peer: str | None = None) -> None:
        """`peer`: None: of whoever trained the run."""
        self._run, self._peer = run, peer
        self.newest: Mapping[str, Any] | None = None
        """All of the newest line."""
        self._files = [GrowingFile(folder / name) for name in ("metrics.1.jsonl", "metrics.jsonl")]
        self.rounds: list[RoundRewards] = []
        self.evaluations: list[RoundRewards] = []
        """`own` is the mean over the tasks here."""

    def read(self) -> None:
        """Reads the lines that are new."""
        for file in self._files:
            # A file that was put aside is read again: its rounds take the place of themselves.
            file.replaced()
            for _, line in file.new_lines():
                self._take(line)
        self.rounds, self.evaluations = _bounded(self.rounds), _bounded(self.evaluations)

    def _take(self, line: bytes) -> None:
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
            number = int(values["progress.round"])
        except (msgspec.DecodeError, KeyError, ValueError):
            return
        if values.get("run") != self._run or self._peer not in (None, values.get("peer")):
            return
        self.newest = values
        is_round = values.get("event") == "round"
        # After a crash rounds are done again.
        kept = self.rounds if is_round else self.evaluations
        while kept and kept[-1].round >= number:
            kept.pop()
        kept.append(_round(number, values) if is_round else _evaluation(number, values))

    def curves(self) -> dict[str, Any]:
        """Returns the curves, each of at most MOST_POINTS points."""
        rounds = list(_means(self.rounds))
        held_out = list(_means(self.evaluations))
        return {
            "rounds": [one.round for one in rounds],
            "own": [one.own for one in rounds],
            "external": [one.external for one in rounds],
            "tasks": _by_name([one.tasks for one in rounds]),
            "seconds": _by_name([one.seconds for one in rounds]),
            "held_out_rounds": [one.round for one in held_out],
            "held_out": [one.own for one in held_out],
            "held_out_tasks": _by_name([one.tasks for one in held_out]),
        }


def _bounded(found: list[RoundRewards]) -> list[RoundRewards]:
    if len(found) <= MOST_ROUNDS:
        return found
    staying = thinned([one.round for one in found])
    return [one for one in found if one.round in staying]


def _round(number: int, values: Mapping[str, Any]) -> RoundRewards:
    tasks = _below("reward.own_tasks.", values)
    return RoundRewards(
        number, _number(values, "reward.own"), _number(values, "reward.external"), tasks,
        _number(values, "training.engine_gap"), _below("speed.", values),
    )  # fmt: skip


def _evaluation(number: int, values: Mapping[str, Any]) -> RoundRewards:
    return RoundRewards(
        number, _number(values, "reward.eval_last"), tasks=_below("reward.eval_tasks.", values)
    )


def _number(values: Mapping[str, Any], name: str) -> float | None:
    found = values.get(name)
    return float(found) if isinstance(found, int | float) else None


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    names = [name for name in values if name.startswith(prefix)][:MOST_TASKS]
    found = {name.removeprefix(prefix): _number(values, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _by_name(found: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    names = sorted({name for one in found for name in one})[:MOST_TASKS]
    return {name: [one.get(name) for one in found] for name in names}


def _means(found: Sequence[RoundRewards]) -> Iterable[RoundRewards]:
    """Yields the means of neighbours, so that there are at most MOST_POINTS of them."""
    together = -(-len(found) // MOST_POINTS)
    for begin in range(0, len(found), max(together, 1)):
        part = found[begin : begin + together]
        yield RoundRewards(
            part[-1].round,
            mean_or_none(one.own for one in part),
            mean_or_none(one.external for one in part),
            _mean_by_name([one.tasks for one in part]),
            seconds=_mean_by_name([one.seconds for one in part]),
        )


def _mean_by_name(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for one in found for name in one}
    return {name: fmean(one[name] for one in found if name in one) for name in names}
