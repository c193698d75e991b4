"""A task played against a model: what it asks, what the policy answers, what the rewards say.

`swarmnode task try` -> [open_policy] -> offline.py; [try_tasks] -> training/evaluation.py -> TriedExample

Nothing is trained and nothing is kept. An error of a reward ends the game instead of being counted: it is
what whoever writes a task wants to see.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from swarmnode.machine.storage import Paths
from swarmnode.node.building.assemble import LocalPolicy, Progress, longest_sequence
from swarmnode.node.commands.offline import load_checkpoint, of_round
from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.settings.config import Config
from swarmnode.tasks.task import Task, holds_out, is_environment, score_completions
from swarmnode.training.checkpoints.run_folders import is_trained, runs_in
from swarmnode.training.evaluation import collect, conversation_rules
from swarmnode.types import Completion, FinishReason, Scores, total_reward


@dataclass(frozen=True, slots=True)
class TriedAnswer:
    """One answer of the policy. `reward` None: no reward applied."""

    text: str
    """All that was said in it, where an environment answered."""
    finish: FinishReason
    scores: Scores
    reward: float | None


@dataclass(frozen=True, slots=True)
class TriedExample:
    """One question with its answers."""

    task: str
    prompt: str
    columns: Mapping[str, Any]
    held_out: bool
    answers: tuple[TriedAnswer, ...]


def open_policy(
    config: Config, model: str, paths: Paths, *, base: bool, best: bool, progress: Progress
) -> tuple[LocalPolicy, str]:
    """The policy of the newest (or the best) checkpoint and what to call it; the base model where `base` says
    so, or where nothing was trained yet. Raises CheckpointError, ModelError."""
    untrained = not best and not is_trained(runs_in(paths.checkpoints), model, named=config.node.run)
    local, checkpoint = load_checkpoint(
        config, model, paths, base=base or untrained, best=best, progress=progress
    )
    longest_sequence(config, local.base.name, local.base.max_positions)
    if checkpoint is not None:
        return local, f"checkpoint {of_round(checkpoint)}"
    return local, "base model" if base else "base model, for there is no checkpoint in this home"


def try_tasks(
    engine: Engine,
    renderer: Renderer,
    tasks: Mapping[str, Task],
    sampling: SamplingParams,
    config: Config,
    *,
    examples: int,
    samples: int,
    seed: int,
) -> Iterator[TriedExample]:
    """Ask the first `examples` of each task that `seed` draws, `samples` times each; yield them as they are
    answered. Raises TaskError, JudgementLost."""
    drawn = [example for task in tasks.values() for example in islice(task.examples(seed), examples)]
    rules = conversation_rules(tasks, config)
    for answered in collect(engine, renderer, drawn, samples, sampling, seed=seed, conversations=rules):
        yield _judged(tasks[answered.example.key.task], answered)


def _judged(task: Task, answered: Answered) -> TriedExample:
    example, completions = answered.example, answered.completions
    scores = score_completions(task, example, completions)
    return TriedExample(
        example.key.task,
        example.prompt,
        example.columns,
        holds_out(task, example),
        tuple(
            TriedAnswer(_shown(task, completion), completion.finish, named, total_reward(named))
            for completion, named in zip(completions, scores, strict=True)
        ),
    )


def _shown(task: Task, completion: Completion) -> str:
    """What the policy wrote; of a conversation, all that was said, in lines."""
    if not is_environment(task):
        return completion.text
    from swarmnode.chat import turns_of

    lines: list[str] = []
    for turn in turns_of(completion.text):
        lines += [turn.said, *(f"[{heard['role']}] {heard['content']}" for heard in turn.observed)]
    return "\n".join(lines)
