"""Curricula: the level that a task asks at moves with how often the policy passes there.

groups of a round -> [Level.after] -> ExampleStream -> [at_level] -> Task.examples(seed) -> [level_of]

The level stands in the seed, so it is part of what an example is: whoever hears of one draws it again at the
level that it was asked at, wherever its own policy has got to. A seed without a level, such as that of an
evaluation, asks at all levels in turn.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from swarmnode.tasks.task import Task, levels_of
from swarmnode.types import RolloutGroup

_LEVEL_SHIFT = 56
"""A seed has 63 bits; the upper seven are the level and one, or nothing."""

MAX_LEVELS = (1 << 63 >> _LEVEL_SHIFT) - 1

ENOUGH_ANSWERS = 64
"""Before so many at one level nothing is decided."""

UP, DOWN = 0.75, 0.1
"""The share of passed answers from which the next level is asked, and up to which the one before."""

PASSING_REWARD = 1.0


class Level(NamedTuple):
    """Where a policy stands in one task, counted from 0, and how its answers there did lately."""

    level: int = 0
    passes: float = 0.0
    answers: float = 0.0

    def after(self, rewards: Sequence[float], levels: int) -> "Level":
        """The level once these answers are counted, of a task that has so many.

        >>> Level().after([1.0] * 64, levels=3).level, Level(2).after([0.0] * 64, levels=3).level
        (1, 1)
        """
        answers = self.answers + len(rewards)
        passes = self.passes + sum(reward >= PASSING_REWARD for reward in rewards)
        if answers < ENOUGH_ANSWERS:
            return Level(self.level, passes, answers)
        if passes >= UP * answers and self.level + 1 < levels:
            return Level(self.level + 1)
        if passes <= DOWN * answers and self.level > 0:
            return Level(self.level - 1)
        return Level(self.level, passes / 2, answers / 2)


def at_level(seed: int, level: int) -> int:
    """The seed that draws at a level.

    >>> level_of(at_level(2**63 - 1, 4), index=0, levels=10), level_of(7, index=3, levels=10)
    (4, 3)
    """
    return (seed & ((1 << _LEVEL_SHIFT) - 1)) | (level + 1) << _LEVEL_SHIFT


def level_of(seed: int, index: int, levels: int) -> int:
    """The level of an example of a task that has so many: what the seed says, or all in turn."""
    said = seed >> _LEVEL_SHIFT
    return (said - 1 if said else index) % levels


def first_levels(tasks: Mapping[str, Task]) -> dict[str, Level]:
    """Where a policy begins, in each task that has levels."""
    return {name: Level() for name, task in tasks.items() if levels_of(task) > 1}


def levels_after(
    before: Mapping[str, Level], tasks: Mapping[str, Task], groups: Iterable[RolloutGroup]
) -> dict[str, Level]:
    """Where it stands after a round. Groups that were asked at another level do not count."""
    rewards: dict[str, list[float]] = {name: [] for name in before}
    for group in groups:
        key = group.example.key
        level = before.get(key.task)
        if level is not None and key.seed == at_level(key.seed, level.level):
            rewards[key.task] += [reward for reward in group.rewards if reward is not None]
    return {name: level.after(rewards[name], levels_of(tasks[name])) for name, level in before.items()}
