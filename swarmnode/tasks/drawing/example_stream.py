"""The examples of a node's rounds, drawn anew for each round.

tasks -> [draw_round] -> one round of examples -> [ExampleStream], round after round -> rollout

A round trains on a fair share of every task, fresh each round and cheap to redraw. The draw is pure: the same
node seed and round give the same examples, so a node that resumes continues where it was. Every round has its
own seed and takes examples from its beginning, so that a stranger redraws one with a handful of draws rather
than thousands.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice

from swarmnode.errors import TaskError
from swarmnode.tasks.drawing.curriculum import at_level
from swarmnode.tasks.task import MAX_SEED, Task, draw_train
from swarmnode.types import Example

# ---- the examples of a round ----

MAX_SEEDS_PER_ROUND = 64
"""Most seeds of a finite task read for one round before the task counts as too small."""


def round_seed(node_seed: int, round_index: int, attempt: int = 0) -> int:
    """Returns the seed of one round of one node. Two seeds are equal with a chance of one in 2**63.

    >>> round_seed(0, 1) != round_seed(1, 0)
    True
    """
    name = f"{node_seed}/{round_index}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") & MAX_SEED


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """The place of an `ExampleStream`: `taken` of the round's `per_round` examples are gone."""

    round: int = 1
    taken: int = 0
    per_round: int = 0
    levels: Mapping[str, int] = field(default_factory=dict[str, int])
    """Levels at which this round was drawn, by task with a curriculum (curriculum.py)."""


class ExampleStream(Iterator[Example]):
    """The examples of round 1, 2, 3, ... without end. A restart only needs `place`.

    Generation takes from it what it needs: a round that asks for more than its share (as partial rollouts do)
    begins the next draw earlier. If the size of a round has changed since, it continues with the next round,
    so no example comes twice.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        node_seed: int,
        per_round: int,
        place: StreamPlace | None = None,
        levels: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`levels`: returns the levels for the next drawn round."""
        self._levels = levels
        self._tasks = tasks
        self._node_seed = node_seed
        self._drawn: list[Example] = []
        self.place = StreamPlace(per_round=per_round)
        if place is not None:
            same = place.per_round == per_round
            self.place = place if same else StreamPlace(place.round + 1, 0, per_round)

    def __next__(self) -> Example:
        place = self.place
        if not self._drawn:
            if not place.taken:
                place = self.place = replace(place, levels=dict(self._levels()))
            self._drawn = draw_round(self._tasks, self._node_seed, place.round, place.per_round, place.levels)
        example = self._drawn[place.taken]
        if place.taken + 1 < place.per_round:
            self.place = replace(place, taken=place.taken + 1)
        else:
            self.place, self._drawn = StreamPlace(place.round + 1, 0, place.per_round), []
        return example


def draw_round(
    tasks: Sequence[Task],
    node_seed: int,
    round_index: int,
    count: int,
    levels: Mapping[str, int] | None = None,
) -> list[Example]:
    """Returns training examples of one round: `count` of them, the tasks taking turns, at these levels.

    Each round begins with another task, so that few examples per round still reach all tasks. Raises
    TaskError if a task has too few training examples.
    """
    first = round_index * count % len(tasks)
    turns = [task.name for task in islice(cycle(tasks), first, first + count)]
    shares = Counter(turns)
    # Draw one task after another, although they take turns: two tasks may draw from one source.
    drawn = {
        task.name: iter(_take(task, _seeds(task, node_seed, round_index, levels or {}), shares[task.name]))
        for task in tasks
    }
    return [next(drawn[name]) for name in turns]


def _take(task: Task, seeds: Iterator[int], count: int) -> list[Example]:
    """Returns training examples of the first of these seeds, and of the next ones if the task's seeds are
    finite."""
    examples = list(islice(chain.from_iterable(draw_train(task, seed) for seed in seeds), count))
    if len(examples) < count:
        raise TaskError(
            f"{task.name} has too few training examples for one round",
            hint="a fifth of the prompts is held out for evaluation by a hash of the text, and perhaps all if"
            " they are alike: add more different questions (in an environment: what reset() returns), or"
            " measure on others (eval_dataset=, or FILE?evaluation=FILE)",
        )
    return examples


def _seeds(task: Task, node_seed: int, round_index: int, levels: Mapping[str, int]) -> Iterator[int]:
    """Yields the round's seeds, at the task's level if it has one."""
    seeds = (round_seed(node_seed, round_index, attempt) for attempt in range(MAX_SEEDS_PER_ROUND))
    if task.name not in levels:
        return seeds
    return (at_level(seed, levels[task.name]) for seed in seeds)
