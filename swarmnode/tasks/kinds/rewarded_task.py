"""Tasks judged by other rewards than their own.

script_objects.py, offline evaluation -> [rewarded] -> RewardedTask, RewardedEnvironment -> a node
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarmnode.chat import Message, Said, Turn, turns_of
from swarmnode.tasks.digests import judged_version
from swarmnode.tasks.drawing.demonstrations import GivenDemonstrations, demonstrations_of
from swarmnode.tasks.judging.rewards import Reward, are_exchangeable, judge_groups, score_with
from swarmnode.tasks.play.conversation_scores import score_turns
from swarmnode.tasks.task import (
    Task,
    evaluation_size_of,
    holds_out,
    is_environment,
    is_exchangeable,
    levels_of,
)
from swarmnode.types import Example


@dataclass(frozen=True, slots=True)
class RewardedTask:
    """The examples of one task, judged by other rewards. Its version differs, so it exchanges nothing with
    nodes that have only the original."""

    task: Task
    rewards: Mapping[str, Reward]
    version: str

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def exchangeable(self) -> bool:
        """True if the wrapped task is exchangeable and these rewards score single answers alike on every
        node."""
        return is_exchangeable(self.task) and are_exchangeable(self.rewards)

    @property
    def levels(self) -> int:
        """Number of levels of the wrapped task."""
        return levels_of(self.task)

    @property
    def evaluation_size(self) -> int:
        """Number of examples in the wrapped task's own evaluation set."""
        return evaluation_size_of(self.task)

    @property
    def demonstrations(self) -> GivenDemonstrations:
        """The other task's, which these rewards judge, too."""
        return demonstrations_of(self.task)

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


class RewardedEnvironment(RewardedTask):
    """An environment's questions and answers, judged by other rewards, which see the conversation alone."""

    task: Any

    @property
    def most_turns(self) -> int:
        return self.task.most_turns

    def observe(self, example: Example, turns: Sequence[Turn]) -> tuple[Message, ...] | None:
        """Returns the wrapped environment's answer."""
        key = replace(example.key, version=self.task.version)
        return self.task.observe(replace(example, key=key), turns)

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        """Returns the scores of these rewards. Raises TaskError."""
        told = [turns_of(said) for said in completions]
        return score_turns(self.rewards, example, told, {}, held_out=holds_out(self, example))


def rewarded(task: Task, rewards: Mapping[str, Reward]) -> Task:
    """Returns `task` judged by these rewards instead of its own."""
    version = judged_version(task.version, rewards)
    kind = RewardedEnvironment if is_environment(task) else RewardedTask
    return kind(task, rewards, version)
