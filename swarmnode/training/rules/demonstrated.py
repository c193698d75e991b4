"""Demonstrations on their way into the book, and out of replay as the policy improves.

node/demonstrating.py -> groups of judged texts -> [Demonstrated] -> book_rule.py -> Book -> [still_needed]

A demonstration that our own judge gave full marks becomes a book entry like our own finds: with the same
constant advantage, and our end of text behind it. This is the shape of LUFFY and SRFT without their weights
(`Lessons.shaped` has LUFFY's): own groups by their advantages and, in the same step, texts that no policy of
ours sampled.

Demonstrations fade: one that was drawn for a round is skipped with a probability equal to the share of our
own answers to its task that have full marks. All are replayed while none of our answers is right, half of
them when half are right, and hardly any in the end.
"""

import logging
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from swarmnode.training.rules.book import Entry
from swarmnode.training.rules.task_marks import TaskMarks
from swarmnode.types import RolloutGroup

logger = logging.getLogger(__name__)

AUTHOR = "demonstration"
"""Author of demonstrations in the book. No peer has such a name."""

MOST_WAITING = 1024
"""The most groups of demonstrations that wait until full marks are known."""


class Demonstrated:
    """Holds judged demonstrations until the full marks of their tasks are known."""

    def __init__(self) -> None:
        self.waiting: deque[RolloutGroup] = deque(maxlen=MOST_WAITING)
        self._logged: set[str] = set()

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        self.waiting.extend(groups)

    def take_known(self, marks: TaskMarks) -> list[RolloutGroup]:
        """Removes and returns the groups of tasks whose full marks are known. Logs once per task how many of
        its demonstrations fall short of them."""
        for task in sorted({group.example.key.task for group in self.waiting} - self._logged):
            self._log_wrong(task, marks)
        known = [one for one in self.waiting if marks.full(one.example.key.task) is not None]
        self.waiting = deque(
            (one for one in self.waiting if marks.full(one.example.key.task) is None), MOST_WAITING
        )
        return known

    def _log_wrong(self, task: str, marks: TaskMarks) -> None:
        judged = [
            (reward, completion.text, group.example.prompt)
            for group in self.waiting
            if group.example.key.task == task
            for completion, reward in zip(group.completions, group.rewards, strict=True)
        ]
        wrong = [one for one in judged if _is_wrong(task, one[0], marks)]
        if not wrong:
            return
        self._logged.add(task)
        reward, text, prompt = wrong[0]
        worth = "no reward" if reward is None else f"the reward {reward:g}"
        logger.warning(
            "skipping %d of %d demonstrations of %s that do not get full marks from the task's own judge:"
            " %.60r to %.60r, for example, has %s; others like them are skipped, too",
            *(len(wrong), len(judged), task, text, prompt, worth),
        )


def _is_wrong(task: str, reward: float | None, marks: TaskMarks) -> bool:
    """Returns True if a demonstration does not have full marks. If all rewards of a task were equal so far,
    full marks are unknown; then a reward of 0 or less counts as wrong."""
    if reward is None or marks.full(task) is None:
        return reward is None or reward <= 0
    return not marks.has_full(task, reward)


def still_needed(
    drawn: Sequence[Entry], pass_rates: Mapping[str, float], rng: random.Random
) -> Sequence[Entry]:
    """Returns the entries to replay in a round: the more of our own answers are right, the fewer
    demonstrations.

    >>> still_needed([], {}, random.Random(0))
    []
    """
    return [
        entry for entry in drawn if entry.author != AUTHOR or rng.random() >= pass_rates.get(entry.task, 0.0)
    ]
