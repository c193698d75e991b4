"""Tasks judged by rewards other than their own.

script_objects.py, offline evaluation -> [rewarded] -> RewardedTask -> a node
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swarmnode.tasks.digests import judged_version
from swarmnode.tasks.environment_maker import environments
from swarmnode.tasks.judging.rewards import Reward, are_exchangeable, judge_groups, score_with
from swarmnode.tasks.task import Task, TaskAround, holds_out, is_environment, is_exchangeable
from swarmnode.types import Example


@dataclass(frozen=True, slots=True)
class RewardedTask(TaskAround):
    """The examples of one task, judged by other rewards. Its version differs, so it exchanges nothing with
    nodes that have only the original."""

    task: Task
    rewards: Mapping[str, Reward]
    version: str

    @property
    def exchangeable(self) -> bool:
        """True if the wrapped task is exchangeable and these rewards score single answers alike on every
        node."""
        return is_exchangeable(self.task) and are_exchangeable(self.rewards)

    @property
    def judges_groups(self) -> bool:
        """True if a reward compares the answers of a group."""
        return judge_groups(self.rewards)

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the other task's examples, under this task's version."""
        for example in self.task.examples(seed):
            yield replace(example, key=replace(example.key, version=self.version))

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns the scores of these rewards. Raises TaskError."""
        return score_with(self.rewards, example, completions, held_out=holds_out(self, example))


def rewarded(task: Task, rewards: Mapping[str, Reward]) -> Task:
    """Returns `task` judged by these rewards instead of its own."""
    version = judged_version(task.version, rewards)
    make = environments().rewarded if is_environment(task) else RewardedTask
    return make(task, rewards, version)
