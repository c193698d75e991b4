"""Shows demonstrations to a node's policy: the task judges each one, and the rule receives it once.

tasks/drawing/demonstrations.py -> [Demonstrating.judge_new] -> Rule.demonstrate -> book
own groups of a round ------^
"""

import logging
from collections.abc import Mapping, Sequence

from swarmnode.bounded_dict import BoundedDict
from swarmnode.errors import JudgementLost, TaskError
from swarmnode.rollout.renderer import Renderer
from swarmnode.tasks.drawing.demonstrations import Demonstrations
from swarmnode.tasks.task import Task, is_environment, judges_groups, score_strictly
from swarmnode.training.rules.demonstrated import AUTHOR
from swarmnode.types import Completion, Example, ExampleKey, RolloutGroup, one_span

logger = logging.getLogger(__name__)

MOST_KNOWN = 65_536
"""Examples that are remembered as shown."""

MOST_LOST = 16
"""Lost judgements of demonstrations that are asked for again in the next round."""


class Demonstrating:
    """Finds and judges demonstrations: those of drawn examples, and at first those given whole."""

    def __init__(
        self, given: Demonstrations, tasks: Mapping[str, Task], renderer: Renderer, max_tokens: int
    ) -> None:
        self._given = given
        self._tasks = tasks
        self._renderer = renderer
        self._max_tokens = max_tokens
        self._known = BoundedDict[ExampleKey, None](MOST_KNOWN)
        self._warned: set[str] = set()
        self._began = False
        self._again: list[Example] = []
        """Examples whose judgement was lost in the previous round."""
        self._lost = 0

    def judge_new(self, own: Sequence[RolloutGroup], version: int) -> list[RolloutGroup]:
        """Returns the judged demonstrations that are new with a round of own groups. Raises TaskError."""
        examples = [*self._again, *(group.example for group in own)]
        self._again = []
        if not self._began:
            self._began = True
            examples = [*(one for task in self._tasks.values() for one in self._given.rows(task)), *examples]
        found = (self._judge(example, version) for example in examples)
        return [group for group in found if group is not None]

    def _judge(self, example: Example, version: int) -> RolloutGroup | None:
        task = self._tasks.get(example.key.task)
        if task is None or example.key in self._known:
            return None
        texts = self._completions_of(task, self._given.of(task, example))
        if not texts:
            return None
        self._known[example.key] = None
        try:
            scores = score_strictly(task, example, [one.text for one in texts])
        except (JudgementLost, TaskError) as error:
            self._warn(task, f"could not be judged: {error.message}")
            if isinstance(error, JudgementLost) and self._lost < MOST_LOST:
                self._lost += 1
                self._again.append(example)
                del self._known[example.key]
            return None
        return RolloutGroup(example, texts, scores, AUTHOR, version)

    def _completions_of(self, task: Task, texts: Sequence[str]) -> tuple[Completion, ...]:
        if not texts:
            return ()
        if is_environment(task) or judges_groups(task):
            self._warn(
                task, "are not used: an environment or a task that compares answers needs more than a text"
            )
            return ()
        encoded = [(text, self._renderer.encode_completion(text, "stop")) for text in texts]
        if any(len(ids) > self._max_tokens for _, ids in encoded):
            self._warn(task, f"with more than rollout.max_tokens={self._max_tokens} tokens are left out")
        return tuple(
            Completion(text, ids, None, one_span(0, len(ids)), "stop")
            for text, ids in encoded
            if 1 < len(ids) <= self._max_tokens
        )

    def _warn(self, task: Task, what: str) -> None:
        if task.name not in self._warned:
            self._warned.add(task.name)
            logger.warning("demonstrations of %s %s", task.name, what)
