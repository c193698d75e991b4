"""A task played against a model: what it asks, what the policy answers, what the rewards say.

`swarmnode task try`, `task check --samples` -> [playing] -> offline.py (the policy)
                                                    -> [try_tasks] -> training/evaluation.py -> TriedExample

Nothing is trained and nothing is kept. An error of a reward ends the game instead of being counted: it is
what whoever writes a task wants to see.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from swarmnode.chat import Prompt, said_in_lines
from swarmnode.node.building.machine_memory import longest_sequence
from swarmnode.node.building.task_processes import start_tasks
from swarmnode.node.commands.offline import as_trained, load_checkpoint, of_round, with_room
from swarmnode.rollout.engine import Engine, SamplingParams
from swarmnode.rollout.renderer import Renderer
from swarmnode.rollout.schedule.open_group import Answered
from swarmnode.settings.config import Config
from swarmnode.settings.config_layers import Settings
from swarmnode.tasks.task import Task, holds_out, score_completions
from swarmnode.training.checkpoints.run_folders import is_trained, runs_in
from swarmnode.training.evaluation import collect, conversation_rules
from swarmnode.types import FinishReason, Scores, total_reward

if TYPE_CHECKING:
    from swarmnode.node.building.local_policy import LocalPolicy


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
    prompt: Prompt
    columns: Mapping[str, Any]
    held_out: bool
    answers: tuple[TriedAnswer, ...]


@contextmanager
def playing(
    settings: Settings,
    *,
    base: bool,
    best: bool = False,
    greedy: bool = False,
    examples: int,
    samples: int,
    seed: int = 0,
) -> Generator[tuple[str, Iterator[TriedExample]]]:
    """Plays the tasks of these settings against their policy. Gives the policy's name, and the examples as
    they are answered. Raises CheckpointError, ModelError, TaskError."""
    with ExitStack() as stack:
        tasks = start_tasks(stack, settings.config.tasks, settings.paths.home)
        local, name, config = _open_policy(stack, settings, base=base, best=best)
        rollout = config.rollout
        sampling = SamplingParams(rollout.max_tokens, 0.0 if greedy else rollout.temperature, rollout.top_p)
        tried = try_tasks(
            local.engine, local.renderer, tasks, sampling, config,
            examples=examples, samples=samples, seed=seed,
        )  # fmt: skip
        yield name, tried


def _open_policy(
    stack: ExitStack, settings: Settings, *, base: bool, best: bool
) -> "tuple[LocalPolicy, str, Config]":
    """Returns the policy of the newest (or the best) checkpoint, its name, and settings with room for a
    prompt; the base model where `base` says so, or where nothing was trained yet."""
    runs = runs_in(settings.paths.checkpoints)
    untrained = not best and not is_trained(runs, settings.model, named=settings.config.node.run)
    settings = as_trained(settings)
    local, checkpoint = stack.enter_context(load_checkpoint(settings, base=base or untrained, best=best))
    config = with_room(settings.config, local)
    longest_sequence(config, local.base.name, local.base.max_positions)
    if checkpoint is not None:
        return local, f"checkpoint {of_round(checkpoint)}", config
    name = "base model" if base else "base model, since this home has no checkpoint"
    return local, name, config


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
            TriedAnswer(said_in_lines(completion.said), completion.finish, named, total_reward(named))
            for completion, named in zip(completions, scores, strict=True)
        ),
    )
