"""Environments as people have them (tools, `step`, `reset`), made into tasks that answer back
(task.Environment).

environment_maker.py -> [environment_around] -> EnvironmentTask -> episodes.py, live_episodes.py -> scores
                                ^-- environment_parts.py
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnode.bounded_dict import BoundedDict
from swarmnode.chat import Message, Said, Turn, messages_of, prompt_of, turns_of
from swarmnode.errors import JudgementLost, TaskError
from swarmnode.extensions.environments.conversation_scores import final_answers, score_turns
from swarmnode.extensions.environments.environment_parts import (
    EnvironmentParts,
    blank_rows,
    judge_themselves,
    parts_of,
)
from swarmnode.extensions.environments.episodes import (
    Episode,
    StepEpisode,
    ToolEpisode,
    begin,
    called,
    close,
    own_tools,
)
from swarmnode.extensions.environments.live_episodes import EpisodeKey, LiveEpisodes, place_of
from swarmnode.extensions.environments.rewarded_environment import RewardedEnvironment
from swarmnode.extensions.environments.tools import tools_from
from swarmnode.tasks.deadlines.task_lock import TASK_LOCK
from swarmnode.tasks.environment_maker import EnvironmentMaker
from swarmnode.tasks.file_task import FileTask
from swarmnode.tasks.judging.rewards import Reward, are_exchangeable
from swarmnode.tasks.kinds.rewarded_task import RewardedTask
from swarmnode.tasks.task import Task, holds_out
from swarmnode.types import Example

MAX_SCORED = 4096
"""Episodes with remembered scores: a group may be judged again with more answers beside them."""

OWN_REWARD = "environment"
"""The name of the reward that an environment gives by itself."""


@dataclass(frozen=True, slots=True)
class EnvironmentTask(RewardedTask):
    """A task file, or functions of a script, with an environment around its questions. `task` draws the
    examples before the environment has added to them."""

    parts: EnvironmentParts
    live: LiveEpisodes = field(default_factory=LiveEpisodes)
    scored: BoundedDict[EpisodeKey, Mapping[str, float | None]] = field(
        default_factory=lambda: BoundedDict[EpisodeKey, Mapping[str, float | None]](MAX_SCORED)
    )
    """Scores of finished episodes, for judging them again."""

    @property
    def exchangeable(self) -> bool:
        """True if other nodes can replay the episodes and would get the same scores."""
        return self.parts.exchangeable and are_exchangeable(self.rewards)

    @property
    def most_turns(self) -> int:
        return self.parts.most_turns

    def keep_one_example(self) -> None:
        """Ends all episodes of an example as soon as one of another begins: nobody comes back to a
        stranger's."""
        self.live.of_one_example = True

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the questions, each with the text of `reset` at its end and the tools that may be called."""
        for example in self.task.examples(seed):
            yield self._asked(replace(example, key=replace(example.key, version=self.version)))

    def observe(self, example: Example, turns: Sequence[Turn]) -> tuple[Message, ...] | None:
        """Returns the environment's answer to the last of these turns. Raises TaskError, JudgementLost."""
        with TASK_LOCK.taken():
            episode = self._episode(example, turns[:-1])
            if episode is None:
                raise JudgementLost(f"an episode of {self.name} is gone and cannot be replayed")
            observed = _heard(episode, turns[-1].said)
            if self.parts.factories:
                self.live.put(_place(example, turns), observed or (), episode)
            return observed

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        """Returns the rewards' scores of these episodes, and none for one that is gone."""
        with TASK_LOCK.taken():
            return self._scores(example, [turns_of(said) for said in completions])

    def _scores(self, example: Example, told: Sequence[tuple[Turn, ...]]) -> list[Mapping[str, float | None]]:
        with ExitStack() as closing:
            episodes = [self._played(example, turns, closing) for turns in told]
            alive = [number for number, episode in enumerate(episodes) if episode is not None]
            environments = [episode.environment for episode in episodes if episode is not None]
            given = {"environments": environments} if self.parts.factories else {}
            alive_told = [told[number] for number in alive]
            held_out = holds_out(self, example)
            found = iter(score_turns(self.rewards, example, alive_told, given, held_out=held_out))
            scores: list[Mapping[str, float | None]] = []
            for episode, turns in zip(episodes, told, strict=True):
                place = place_of(example.key, turns)
                if episode is None:
                    scores.append(self.scored.get(place, {}))
                    continue
                own = episode.reward()
                scores.append({**next(found), **({} if own is None else {OWN_REWARD: own})})
                self.scored[place] = scores[-1]
        if self.live.of_one_example:
            self.live.end_all()
        return scores

    # ---- episodes ----

    def _asked(self, example: Example) -> Example:
        with TASK_LOCK.taken():
            episode = self._begun(example)
        close(episode.environment)
        messages = [] if self.parts.asks_by_reset else messages_of(example.prompt)
        if episode.opening:
            *before, last = messages or [{"role": "user", "content": ""}]
            messages = [*before, {**last, "content": last["content"] + episode.opening}]
        if not messages:
            raise TaskError(
                f"{self.name} has no question: reset() of its environment returned no text",
                hint="return the question from reset(), or write examples(seed)",
            )
        tools = [tool.schema for tool in own_tools(episode)]
        return replace(example, prompt=prompt_of(messages, tools), conversational=True)

    def _begun(self, example: Example) -> Episode:
        if not self.parts.factories:
            return ToolEpisode(self.parts.tools)
        name = example.columns.get("environment", "") if "" not in self.parts.factories else ""
        factory = self.parts.factories.get(name)
        if factory is None:
            raise TaskError(
                f"an example of {self.name} names the environment {name!r:.40}",
                hint=f"choose one of {', '.join(self.parts.factories)}",
            )
        episode = begin(called(f"{self.name}: making", factory), example.columns, self.parts.action)
        if isinstance(episode, ToolEpisode) and self.parts.tools:
            episode.tools = tools_from([*episode.tools.values(), *self.parts.tools.values()])
        return episode

    def _begun_as_asked(self, example: Example) -> Episode:
        """Returns a new episode of a drawn question. Raises TaskError if `reset` gives another text than when
        the question was drawn: the policy would be asked about another game than it plays."""
        episode = self._begun(example)
        if not messages_of(example.prompt)[-1]["content"].endswith(episode.opening):
            close(episode.environment)
            raise TaskError(
                f"reset() of the environment of {self.name} returns something different each time",
                hint="derive it from the example's columns: seed a generator with one of them",
            )
        return episode

    def _episode(self, example: Example, past: Sequence[Turn]) -> Episode | None:
        """Returns the episode with exactly these turns and observations, or None if it is gone."""
        if not self.parts.factories:
            return ToolEpisode(self.parts.tools)
        if not past:
            return self._begun_as_asked(example)
        episode = self.live.take(_place(example, past), past[-1].observed)
        if episode is not None or not self.parts.exchangeable:
            return episode
        episode = self._begun_as_asked(example)
        for turn in past:
            if (_heard(episode, turn.said) or ()) != turn.observed:
                close(episode.environment)
                return None
        return episode

    def _played(self, example: Example, turns: Sequence[Turn], closing: ExitStack) -> Episode | None:
        """Returns the episode with all these turns played, ready to be scored; `closing` closes it. An action
        that no step has taken yet is taken now; a tool that was not called during the episode is not called
        for its score."""
        last = turns[-1]
        whole = self.live.take(_place(example, turns), last.observed) if self.parts.factories else None
        episode = whole or self._episode(example, turns[:-1])
        if episode is None:
            return None
        closing.callback(close, episode.environment)
        if whole is None and self.parts.factories and (last.observed or isinstance(episode, StepEpisode)):
            heard = episode.hear(last.said)
            return None if last.observed and heard != last.observed else episode
        return episode


def _heard(episode: Episode, said: str) -> tuple[Message, ...] | None:
    """Returns the answer to the next turn. Closes an episode that raises."""
    try:
        return episode.hear(said)
    except BaseException:
        close(episode.environment)
        raise


def environment_around(
    source: FileTask,
    tools: Sequence[object] | None,
    environment: object,
    said: Mapping[str, Any],
    *,
    own: Mapping[str, Reward],
) -> Task:
    """Returns a task with an environment around its questions; without `draw` they are the texts of
    `reset`. `own`: the user's rewards; without any, an environment that gives one is its own judge. Raises
    TaskError."""
    parts = parts_of(tools, environment, said, asks_by_reset=source.draw is None)
    if source.draw is None:
        source = replace(source, draw=blank_rows)
    with TASK_LOCK.taken():
        rewards = own if judge_themselves(parts) else source.rewards
    return EnvironmentTask(source, rewards, version_with_environment(source.version), parts)


def version_with_environment(version: str) -> str:
    """Returns a version that no node shares which takes the file for a task without turns."""
    return hashlib.blake2b(f"{version}/environment".encode(), digest_size=8).hexdigest()


def _place(example: Example, turns: Sequence[Turn]) -> EpisodeKey:
    """Returns the key of an episode. The environment's last answer is not part of it: it may be missing."""
    return place_of(example.key, [*turns[:-1], Turn(turns[-1].said)])


TURNS = EnvironmentMaker(environment_around, RewardedEnvironment, final_answers)
"""The part that this extension registers (registry.py)."""
