"""How good the policy is on questions that no node ever trains on.

tasks (held-out draws) -> engine -> score -> [evaluation] -> node, `swarmnode eval`
"""

from collections.abc import Callable, Mapping
from itertools import islice

from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.collector import collect
from swarmnode.tasks.task import Task, draw_held_out, score_strictly
from swarmnode.training.records import Evaluation
from swarmnode.types import mean_or_none, total_reward

EVAL_SEED = 7_654_321
"""Every node evaluates on the same held-out draw, so that rewards can be compared."""


def evaluate(
    engine: Engine,
    renderer: Renderer,
    tasks: Mapping[str, Task],
    sampling: SamplingParams,
    *,
    examples: int,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Sample one completion for each held-out example of each task and score it. None when stopped early."""
    drawn = [
        example for task in tasks.values() for example in islice(draw_held_out(task, EVAL_SEED), examples)
    ]
    rewards: dict[str, list[float]] = {name: [] for name in tasks}
    for answered in collect(engine, renderer, drawn, 1, sampling, seed=seed, should_stop=should_stop):
        example, completion = answered.example, answered.completions[0]
        scores = score_strictly(tasks[example.key.task], example, [completion.text])
        reward = total_reward(scores[0])
        if reward is not None:
            rewards[example.key.task].append(reward)
    if should_stop():
        return None
    per_task = {name: mean_or_none(values) for name, values in rewards.items()}
    return Evaluation(per_task, mean_or_none([mean for mean in per_task.values() if mean is not None]))
