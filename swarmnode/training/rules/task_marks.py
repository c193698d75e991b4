"""Full marks, task by task: the least reward that counts as right, from our own judge's past rewards.

own and external groups -> [TaskMarks] -> book_rule.py; [needs_of] -> node.py -> exchange

Tasks do not declare their best reward. With rewards of 0 and 1 it is 1; with partial credit it is what the
best answers got, or the best so far if no answer gets all of it. We take the best reward given on two
different examples, so that one stroke of luck, or one answer that fools a judge, does not devalue all others.
An answer has full marks if its reward comes within FULL_MARGIN of that, as a share of the distance from our
own mean. So full marks are never below our own mean, and with continuous rewards the best few percent
qualify, not a single answer. While all rewards of a task are equal, we know neither full marks nor a pass
rate.
No torch here.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from swarmnode.types import FULL_MARGIN, MIN_REWARD_SPREAD, ExampleKey, RolloutGroup

MEMORY_ANSWERS = 64
"""Approximate number of answers that running means span: two rounds of the demonstration policy."""

MAX_TASKS = 1024
"""The most tasks in a saved state."""


class Marks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rewards given on one task so far. None: no reward yet."""

    worst: float
    best: float
    best_on: tuple[int, int]
    """Seed and index of the example that got `best`."""
    confirmed: float | None = None
    """The best reward on any other example."""
    mean: float | None = None
    """Running mean of our own rewards."""
    passed: float | None = None
    """Running share of our own answers that have full marks."""

    @property
    def level(self) -> float:
        return self.best if self.confirmed is None else self.confirmed

    @property
    def full(self) -> float | None:
        """The least reward that is full marks. None: not known.

        >>> Marks(0.0, 1.0, (7, 1), confirmed=1.0, mean=0.4).full
        0.97
        """
        if self.best - self.worst < MIN_REWARD_SPREAD:
            return None
        if self.level - self.worst < MIN_REWARD_SPREAD:
            # Only one example was ever answered better than the worst.
            return self.level + MIN_REWARD_SPREAD
        mean = self.worst if self.mean is None else self.mean
        return self.level - FULL_MARGIN * max(0.0, self.level - mean)

    def has_full(self, reward: float | None) -> bool:
        full = self.full
        return reward is not None and full is not None and reward >= full


Saved = Annotated[dict[str, Marks], msgspec.Meta(max_length=MAX_TASKS)]
"""Marks by task, as saved in a state."""


class TaskMarks:
    """The marks of all tasks."""

    def __init__(self) -> None:
        self.by_task: dict[str, Marks] = {}

    def record(self, own: Sequence[RolloutGroup], external: Sequence[RolloutGroup]) -> None:
        """Records the rewards of a round. Full marks follow from everybody's answers, as our judge scored
        them; running means cover only our own."""
        before = {task: marks.level for task, marks in self.by_task.items()}
        for group in (*own, *external):
            self._record_rewards(group.example.key, _scored(group))
        by_task: dict[str, list[float]] = {}
        for group in own:
            by_task.setdefault(group.example.key.task, []).extend(_scored(group))
        for task, rewards in by_task.items():
            if rewards:
                self._update_means(task, rewards, before.get(task))

    def has_full(self, task: str, reward: float | None) -> bool:
        """Returns True if the reward is full marks on the task."""
        marks = self.by_task.get(task)
        return marks is not None and marks.has_full(reward)

    def full(self, task: str) -> float | None:
        """Returns the least reward that is full marks on a task. None: not known."""
        marks = self.by_task.get(task)
        return None if marks is None else marks.full

    @property
    def pass_rates(self) -> dict[str, float]:
        """Running share of our own answers that have full marks, by task, where known."""
        return {task: marks.passed for task, marks in self.by_task.items() if marks.passed is not None}

    def keep_only(self, tasks: Mapping[str, str]) -> None:
        self.by_task = {task: marks for task, marks in self.by_task.items() if task in tasks}

    def _record_rewards(self, key: ExampleKey, rewards: Sequence[float]) -> None:
        if not rewards:
            return
        place, top, low = (key.seed, key.index), max(rewards), min(rewards)
        marks = self.by_task.get(key.task)
        if marks is None:
            self.by_task[key.task] = Marks(low, top, place)
            return
        best, best_on, confirmed = marks.best, marks.best_on, marks.confirmed
        if place == best_on:
            best = max(best, top)
        elif top > best:
            best, best_on, confirmed = top, place, best
        else:
            confirmed = top if confirmed is None else max(confirmed, top)
        self.by_task[key.task] = msgspec.structs.replace(
            marks, worst=min(marks.worst, low), best=best, best_on=best_on, confirmed=confirmed
        )

    def _update_means(self, task: str, rewards: Sequence[float], level_before: float | None) -> None:
        marks, count = self.by_task[task], len(rewards)
        marks = msgspec.structs.replace(marks, mean=_running_mean(marks.mean, sum(rewards) / count, count))
        full, passed = marks.full, marks.passed
        if level_before is not None and marks.level - level_before > FULL_MARGIN * (
            marks.level - marks.worst
        ):
            passed = None  # Earlier passes no longer count as full marks.
        if full is not None:
            passed = _running_mean(passed, sum(reward >= full for reward in rewards) / count, count)
        self.by_task[task] = msgspec.structs.replace(marks, passed=passed)


def needs_of(pass_rates: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of our answers that fail, by task.

    >>> needs_of({"rev": 0.25})
    {'rev': 0.75}
    """
    return {task: 1.0 - rate for task, rate in pass_rates.items()}


def _running_mean(mean: float | None, observed: float, count: int) -> float:
    """Returns a running mean after `count` more observations whose mean is `observed`."""
    return observed if mean is None else mean + (observed - mean) * count / (count + MEMORY_ANSWERS)


def _scored(group: RolloutGroup) -> list[float]:
    return [reward for reward in group.rewards if reward is not None]
