"""Curricula: the level at which a task asks follows the policy's success at that level.

groups of a round -> [Curriculum] -> ExampleStream -> [at_level] -> Task.examples(seed) -> [level_of]

The seed contains the level, so the level is part of an example: a peer draws it again at the level at which
it was asked, whatever its own policy's level. A seed without a level, such as that of an evaluation, asks at
all levels in turn.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from swarmnode.tasks.task import Task, levels_of
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

_LEVEL_SHIFT = 56
"""A seed has 63 bits; the upper seven are the level plus one, or zero."""

MAX_LEVELS = (1 << 63 >> _LEVEL_SHIFT) - 1

ENOUGH_ANSWERS = 64
"""Fewest answers at one level before the level may change."""

UP, DOWN = 0.75, 0.1
"""Shares of passed answers: at UP or more the level rises, at DOWN or less it falls."""

PASSING_REWARD = 1.0


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The level of a policy in one task, counted from 0, and its recent success there."""

    level: int = 0
    passes: float = 0.0
    answers: float = 0.0

    def after(self, rewards: Sequence[float], levels: int) -> "Level":
        """Returns the level after these answers, in a task of `levels` levels.

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
    """Returns the seed that draws at this level.

    >>> level_of(at_level(2**63 - 1, 4), index=0, levels=10), level_of(7, index=3, levels=10)
    (4, 3)
    """
    return (seed & ((1 << _LEVEL_SHIFT) - 1)) | (level + 1) << _LEVEL_SHIFT


def level_of(seed: int, index: int, levels: int) -> int:
    """Returns the level of an example in a task of `levels` levels: the seed's own, or else every level in
    turn."""
    said = seed >> _LEVEL_SHIFT
    return (said - 1 if said else index) % levels


class Curriculum:
    """The levels of one policy in all tasks with a curriculum."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self._tasks = tasks
        self._levels = {name: Level() for name, task in tasks.items() if levels_of(task) > 1}
        self._before: dict[int, Mapping[str, Level]] = {}
        """Levels at the start of the newest rounds: a run that resumes counts their answers again."""

    @property
    def levels(self) -> dict[str, int]:
        """Returns the level at which each task asks now."""
        return {name: level.level for name, level in self._levels.items()}

    def begin(self, number: int) -> None:
        """Begins a round; all rounds before the last one are trained on."""
        self._before = {n: levels for n, levels in self._before.items() if n >= number - 1}
        self._before[number] = self._levels

    def end(self, groups: Sequence[RolloutGroup]) -> None:
        """Updates the levels after a round's groups."""
        after = levels_after(self._levels, self._tasks, groups)
        for name, level in after.items():
            if level.level != self._levels[name].level:
                logger.info("task %s moves to level %d", name, level.level)
        self._levels = after

    def state(self, number: int | None) -> bytes:
        """Returns the levels as of the beginning of a round, for a checkpoint. `number` None: the levels
        now."""
        levels = self._levels if number is None else self._before.get(number, self._levels)
        return msgspec.msgpack.encode(levels)

    def restore(self, saved: bytes) -> None:
        """Restores the levels of a `state`. Raises msgspec.DecodeError."""
        found = msgspec.msgpack.decode(saved, type=dict[str, Level])
        self._levels = {name: found.get(name, level) for name, level in self._levels.items()}


def levels_after(
    before: Mapping[str, Level], tasks: Mapping[str, Task], groups: Iterable[RolloutGroup]
) -> dict[str, Level]:
    """Returns the levels after a round. Groups at another level than the policy's own do not count."""
    rewards: dict[str, list[float]] = {name: [] for name in before}
    for group in groups:
        key = group.example.key
        level = before.get(key.task)
        if level is not None and key.seed == at_level(key.seed, level.level):
            rewards[key.task] += [reward for reward in group.rewards if reward is not None]
    return {name: level.after(rewards[name], levels_of(tasks[name])) for name, level in before.items()}
