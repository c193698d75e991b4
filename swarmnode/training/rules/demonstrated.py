"""Demonstrations on their way into the book, and out of what is replayed.

node/demonstrating.py -> groups of judged texts -> [Demonstrated] -> book_rule.py -> Book -> [still_needed]

A demonstration that our own judge gave full marks is an entry of the book as our own finds are: it has the
same constant advantage, and our end of text behind it. That is LUFFY's and SRFT's shape without their weights
(`Lessons.shaped` has LUFFY's): own groups by their advantages, and beside them, in the same step, texts that
no policy of ours sampled.

The rule by which they fade: a demonstration that was drawn for a round is left out of it with the probability
that our own answers to its task have full marks. All of them are replayed while nothing of ours is right,
half of the times where half is, hardly any in the end.
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
"""Who wrote them, in the book. No peer has such a name."""

MOST_WAITING = 1024
"""Groups of demonstrations that wait until full marks are known."""


class Demonstrated:
    """Judged demonstrations until it is known what full marks are."""

    def __init__(self) -> None:
        self.waiting: deque[RolloutGroup] = deque(maxlen=MOST_WAITING)
        self._told: set[str] = set()

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        self.waiting.extend(groups)

    def known(self, marks: TaskMarks) -> list[RolloutGroup]:
        """Takes out the groups of tasks whose full marks are known, and tells once of each task how many of
        its demonstrations do not have them."""
        for task in sorted({group.example.key.task for group in self.waiting} - self._told):
            self._tell(task, marks)
        known = [one for one in self.waiting if marks.full(one.example.key.task) is not None]
        self.waiting = deque(
            (one for one in self.waiting if marks.full(one.example.key.task) is None), MOST_WAITING
        )
        return known

    def _tell(self, task: str, marks: TaskMarks) -> None:
        judged = [
            (reward, completion.text, group.example.prompt)
            for group in self.waiting
            if group.example.key.task == task
            for completion, reward in zip(group.completions, group.rewards, strict=True)
        ]
        wrong = [one for one in judged if _is_wrong(task, one[0], marks)]
        if not wrong:
            return
        self._told.add(task)
        reward, text, prompt = wrong[0]
        worth = "no reward" if reward is None else f"the reward {reward:g}"
        logger.warning(
            "skipping %d of %d demonstrations of %s that do not get full marks from the task's own judge:"
            " %.60r to %.60r, for example, has %s; others like them are skipped, too",
            *(len(wrong), len(judged), task, text, prompt, worth),
        )


def _is_wrong(task: str, reward: float | None, marks: TaskMarks) -> bool:
    """Returns True if a demonstration does not have full marks. Where all rewards of a task were equal so
    far, full marks are unknown, but nothing right has a reward of 0 or less."""
    if reward is None or marks.full(task) is None:
        return reward is None or reward <= 0
    return not marks.has_full(task, reward)


def still_needed(
    drawn: Sequence[Entry], pass_rates: Mapping[str, float], rng: random.Random
) -> Sequence[Entry]:
    """Returns the entries that are replayed in a round: of demonstrations the fewer, the more of our own
    answers are right.

    >>> still_needed([], {}, random.Random(0))
    []
    """
    return [
        entry for entry in drawn if entry.author != AUTHOR or rng.random() >= pass_rates.get(entry.task, 0.0)
    ]
