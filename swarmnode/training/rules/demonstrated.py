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
        """Takes out the groups of tasks whose full marks are known, and tells once of each task where a
        demonstration of it does not have them."""
        known = [one for one in self.waiting if marks.full(one.example.key.task) is not None]
        self.waiting = deque(
            (one for one in self.waiting if marks.full(one.example.key.task) is None), MOST_WAITING
        )
        for group in known:
            self._tell(group, marks)
        return known

    def _tell(self, group: RolloutGroup, marks: TaskMarks) -> None:
        task = group.example.key.task
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            if not marks.has_full(task, reward) and task not in self._told:
                self._told.add(task)
                worth = "no reward" if reward is None else f"the reward {reward:g}"
                logger.warning(
                    "a demonstration of %s has %s by the task's own judge and is not learnt from: %.60r to"
                    " %.60r. others of this task that have no full marks are left out, too",
                    *(task, worth, completion.text, group.example.prompt),
                )


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
