"""Evaluates the policy on questions that no node ever trains on.

tasks (held-out draws) -> [evaluate] -> [collect] -> partial_rollouts.py -> engine
                             |
                             +-> scores -> Evaluation -> node, `swarmnode eval`

`collect` is one synchronous round for one-off requests (api.py samples with it, too): it takes examples,
yields each of their groups as soon as it is complete, and leaves nothing under way. For tasks that may answer
back, pass `conversation_rules`.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import comb

from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.conversations import NO_CONVERSATIONS, ConversationRules
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.rollout.schedule.partial_rollouts import PartialRollouts
from swarmnode.rollout.schedule.partial_settings import PartialSettings
from swarmnode.settings.config import Config
from swarmnode.tasks.environment_maker import environments
from swarmnode.tasks.task import (
    Task,
    draw_held_out,
    evaluation_size_of,
    is_environment,
    score_completions,
)
from swarmnode.training.records import Evaluation, PassAt
from swarmnode.types import Example, Scores, mean_or_none, total_reward

EVAL_SEED = 7_654_321
"""Seed of the held-out draw. All nodes share it, so that rewards can be compared."""

PASSING_REWARD = 1.0
"""Reward of a right answer in most tasks: an answer with at least this reward passes."""


def evaluate(
    engine: Engine,
    renderer: Renderer,
    tasks: Mapping[str, Task],
    sampling: SamplingParams,
    *,
    examples: int,
    samples: int = 1,
    passing_reward: float = PASSING_REWARD,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    conversations: ConversationRules = NO_CONVERSATIONS,
) -> Evaluation | None:
    """Samples `samples` completions for each held-out example of each task and scores them: `examples` per
    task, or all of a task's own evaluation set. Returns None if stopped early. `conversations`: needed if a
    task answers back."""
    drawn = [example for task in tasks.values() for example in measured_with(task, examples)]
    rewards: dict[str, list[list[float]]] = {name: [] for name in tasks}
    judged_by: dict[str, set[str]] = {name: set() for name in tasks}
    ks = powers_of_two(samples)
    majorities: dict[str, list[dict[int, float | None]]] = {name: [] for name in tasks}
    for answered in collect(
        engine,
        renderer,
        drawn,
        samples,
        sampling,
        seed=seed,
        should_stop=should_stop,
        conversations=conversations,
    ):
        example = answered.example
        scores = score_completions(tasks[example.key.task], example, answered.completions)
        totals = [total_reward(named) for named in scores]
        name = example.key.task
        rewards[name].append([reward for reward in totals if reward is not None])
        judged_by[name].update(*scores)
        if samples > 1:
            texts = _answers(tasks[name], answered)
            passes = [None if reward is None else reward >= passing_reward for reward in totals]
            majorities[name].append(_majorities(texts, passes, ks, scores))
    if should_stop():
        return None
    per_task = {name: mean_or_none([r for row in rows for r in row]) for name, rows in rewards.items()}
    passed = {
        name: [(len(row), sum(reward >= passing_reward for reward in row)) for row in rows]
        for name, rows in rewards.items()
    }
    majority_at = {
        name: {k: mean_or_none(row.get(k) for row in rows) for k in ks} for name, rows in majorities.items()
    }
    pass_at: dict[str, PassAt] = {
        name: {k: mean_or_none([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in ks}
        for name, counts in passed.items()
    }
    return Evaluation(
        per_task,
        mean_or_none(per_task.values()),
        pass_at,
        {k: mean_or_none([of_task[k] for of_task in pass_at.values()]) for k in ks},
        majority_at,
        {name: tuple(sorted(names)) for name, names in judged_by.items()},
        {name: len(rows) for name, rows in rewards.items()},
    )


def _answers(task: Task, answered: Answered) -> list[str]:
    """Returns the texts that vote; for conversations, the last words of each."""
    if not is_environment(task):
        return [completion.text for completion in answered.completions]
    return environments().final_answers(
        answered.example, [completion.said for completion in answered.completions]
    )


def measured_with(task: Task, examples: int) -> Iterator[Example]:
    """Returns the examples of a task that an evaluation asks."""
    return islice(draw_held_out(task, EVAL_SEED), None if evaluation_size_of(task) else examples)


def _majorities(
    texts: Sequence[str], passed: Sequence[bool | None], ks: Iterable[int], scores: Sequence[Scores]
) -> dict[int, float | None]:
    from swarmnode.tasks.judging.votes import VOTED, majority_at_k

    known = not any(VOTED in named for named in scores)
    return {k: majority_at_k(texts, passed, k) for k in ks} if known else {}


def collect(
    engine: Engine,
    renderer: Renderer,
    examples: Sequence[Example],
    group_size: int,
    sampling: SamplingParams,
    *,
    seed: int | None,
    should_stop: Callable[[], bool] = lambda: False,
    conversations: ConversationRules = NO_CONVERSATIONS,
) -> Generator[Answered, None, None]:
    """Samples `group_size` completions of each example; yields each group when its last one has finished.

    When `should_stop` returns True, or the caller closes the iterator, unfinished groups are aborted and not
    yielded. An example that the engine refuses (too long a prompt) is logged and left out. `sampling.seed` is
    replaced by one per completion, made from `seed`: the same seed requests the same samples.
    """
    if not examples:
        return
    settings = PartialSettings("sync", groups=len(examples), group_size=group_size, max_lag=0)
    rollouts = PartialRollouts(engine, renderer, settings, sampling, seed=seed, conversations=conversations)
    yield from rollouts.round(iter(examples), should_stop=should_stop)


def conversation_rules(tasks: Mapping[str, Task], config: Config) -> ConversationRules:
    """Returns the rules for conversations with the tasks that answer back."""
    environments = {name: task for name, task in tasks.items() if is_environment(task)}
    return ConversationRules(environments, config.tasks.turn_timeout_s)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Returns the chance that at least one of k answers passes if `passed` of `samples` did.

    This is 1 - C(n-c, k) / C(n, k), the mean over all ways to take k of the n (Chen et al. 2021, section
    2.1). Using the passing share p in 1 - (1 - p)^k would be too low on average.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def powers_of_two(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to `most`.

    >>> powers_of_two(10)
    [1, 2, 4, 8]
    """
    return [1 << power for power in range(most.bit_length())]
