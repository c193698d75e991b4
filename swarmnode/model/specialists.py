"""Tiny policies that know different things: what a swarm has to teach its members.

recipes -> [build_specialists, build_strangers] -> tiny.py -> one folder per node

A *specialist* was taught all tasks and then made unsure: much of most of them, little of its own. What it can
no longer say is still in it, as in a real base model that was trained on everything and asked for little. A
*stranger* was only ever taught its own tasks: of the others nothing is latent. Both are built once, and
cached.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swarmnode.model.tiny import RECIPE, Progress, Recipe, build_tiny
from swarmnode.model.warmup import TrainingPhase
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import Task

UNSURE_PERCENT = 99
"""Mismatched answers of the tasks that a specialist is made to forget. What it gets right there is chance, or
one answer in hundreds: alone it hardly finds it again."""

OWN_PERCENT = 10
"""The same of its own tasks, which it answers right about every other time."""

UNSURE_TIMES = 2
"""So many times the steps that make the tiny policy unsure. After as many as that takes, a lone specialist
found most of it again in a hundred rounds (held-out 0.60); after twice as many a third is left to it."""

OWN_TASKS = 2
"""Tasks of each specialist, and of each stranger."""


def own_tasks(number: int, tasks: Sequence[Task] = BUILTIN_TASKS) -> tuple[str, ...]:
    """What node `number` knows best. After the last task it begins with the first again.

    >>> own_tasks(0), own_tasks(5)
    (('rev', 'sort'), ('next', 'bitop'))
    """
    first = OWN_TASKS * number
    return tuple(tasks[(first + place) % len(tasks)].name for place in range(OWN_TASKS))


def specialist_recipe(number: int, recipe: Recipe = RECIPE, tasks: Sequence[Task] = BUILTIN_TASKS) -> Recipe:
    """The `recipe` of a tiny policy with another last phase: that of the specialist `number`."""
    *taught, unsure = recipe.phases
    own = tuple((name, OWN_PERCENT) for name in own_tasks(number, tasks))
    last = replace(
        unsure,
        name="becoming a specialist",
        steps=UNSURE_TIMES * unsure.steps,
        mismatched_percent=UNSURE_PERCENT,
        mismatched_by_task=own,
    )
    return replace(recipe, phases=(*taught, last), shared_phases=len(taught))


def stranger_recipe(number: int, recipe: Recipe = RECIPE, tasks: Sequence[Task] = BUILTIN_TASKS) -> Recipe:
    """A policy that never saw any but its own tasks. It has fewer to learn, so it takes fewer steps."""
    own = own_tasks(number, tasks)
    *taught, unsure = recipe.phases
    return replace(
        recipe,
        phases=(
            *(_fewer_steps(replace(phase, name="learning two small tasks", tasks=own)) for phase in taught),
            replace(unsure, name="unlearning certainty", mismatched_percent=OWN_PERCENT, tasks=own),
        ),
    )


def build_specialists(
    models_folder: Path,
    nodes: int,
    progress: Progress | None = None,
    recipe: Recipe = RECIPE,
    tasks: Sequence[Task] = BUILTIN_TASKS,
) -> list[Path]:
    """The folders of so many specialists: what all were taught takes 15 seconds, each of them two more."""
    recipes = [specialist_recipe(number, recipe, tasks) for number in range(nodes)]
    return [build_tiny(models_folder, progress=progress, recipe=one, tasks=tasks) for one in recipes]


def build_strangers(models_folder: Path, nodes: int, progress: Progress | None = None) -> list[Path]:
    """The folders of so many strangers, five seconds each."""
    return [
        build_tiny(models_folder, progress=progress, recipe=stranger_recipe(number))
        for number in range(nodes)
    ]


def _fewer_steps(phase: TrainingPhase) -> TrainingPhase:
    return replace(phase, steps=max(1, phase.steps * 3 // 8))
