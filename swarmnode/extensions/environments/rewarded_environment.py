"""An environment judged by other rewards than its own.

rewarded_task.py -> registry.py -> [RewardedEnvironment] -> a node
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarmnode.chat import Message, Said, Turn, turns_of
from swarmnode.extensions.environments.conversation_scores import score_turns
from swarmnode.tasks.kinds.rewarded_task import RewardedTask
from swarmnode.tasks.task import holds_out
from swarmnode.types import Example


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
