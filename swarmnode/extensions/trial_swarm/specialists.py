"""Tiny policies that know different tasks, so that the members of a swarm can teach each other."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swarmnode.extensions.demonstration.tiny import RECIPE, Recipe, build_tiny
from swarmnode.model.built_model import Progress
from swarmnode.tasks.builtin import BUILTIN_TASKS
from swarmnode.tasks.task import Task

UNSURE_PERCENT = 99
"""Mismatched answers, in percent, of the tasks that a specialist is made to forget. It is right there by
chance, or once in hundreds of answers: alone it hardly finds the task again."""

OWN_PERCENT = 10
"""Mismatched answers, in percent, of its own tasks, which it answers right about every other time."""

UNSURE_TIMES = 2
"""Multiple of the steps that make the tiny policy unsure. With the same number, a lone specialist found most
of it again in a hundred rounds (held-out 0.60); with twice as many, a third is left."""

OWN_TASKS = 2
"""Number of tasks of each specialist."""


def own_tasks(number: int, tasks: Sequence[Task] = BUILTIN_TASKS) -> tuple[str, ...]:
    """Returns the tasks that node `number` knows best. After the last task it begins with the first again.

    >>> own_tasks(0), own_tasks(5)
    (('rev', 'sort'), ('next', 'bitop'))
    """
    first = OWN_TASKS * number
    return tuple(tasks[(first + place) % len(tasks)].name for place in range(OWN_TASKS))


def specialist_recipe(number: int, recipe: Recipe = RECIPE, tasks: Sequence[Task] = BUILTIN_TASKS) -> Recipe:
    """Returns `recipe` with another last phase: that of specialist `number`."""
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


def build_specialists(
    models_folder: Path,
    nodes: int,
    progress: Progress | None = None,
    recipe: Recipe = RECIPE,
    tasks: Sequence[Task] = BUILTIN_TASKS,
) -> list[Path]:
    """Builds `nodes` specialists and returns their folders: 15 seconds for the common part, two more for
    each."""
    recipes = [specialist_recipe(number, recipe, tasks) for number in range(nodes)]
    return [build_tiny(models_folder, progress=progress, recipe=one, tasks=tasks) for one in recipes]
