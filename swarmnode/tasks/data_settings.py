"""Puts settings about data sets into the tasks' names as options, so that a checkpoint finds them again.

TasksConfig -> [specs_of] -> names with options -> loader.py
"""

from collections.abc import Mapping

from swarmnode.errors import TaskError
from swarmnode.settings.config import TasksConfig
from swarmnode.tasks.specs import OWN_KINDS, TaskSpec, parse_spec, with_defaults
from swarmnode.tasks.task_source import task_source

ABOUT_DATA: Mapping[str, str] = {
    "reward": "reward",
    "weight": "reward_weights",
    "judge": "judge",
    "system": "system_prompt",
}
"""Options of a data set's name, and the settings that stand for them."""


def specs_of(config: TasksConfig) -> tuple[str, ...]:
    """Returns the tasks' names with the options that the settings add. Raises TaskError for a setting that
    applies to none of these tasks.

    >>> specs_of(TasksConfig(names=("rev", "q.jsonl"), reward=("numeric_match",)))
    ('rev', 'q.jsonl?reward=numeric_match')
    """
    judge = config.judge.model_dump_json(exclude_defaults=True) if config.judge.url else ""
    values = {
        "reward": config.reward,
        "weight": tuple(map(str, config.reward_weights)),
        "judge": (judge,) if judge else (),
        "system": (config.system_prompt,) if config.system_prompt else (),
    }
    said = {option: value for option, value in values.items() if value}
    specs = [parse_spec(name) for name in config.names]
    taken = [_taken(spec) for spec in specs]
    for option in said:
        if not any(option in options for options in taken):
            raise TaskError(
                f"tasks.{ABOUT_DATA[option]} applies to data sets, and no task is one",
                hint="task files and packages have their own prompts and rewards",
            )
    return tuple(
        str(with_defaults(spec, {option: said[option] for option in said if option in options}))
        for spec, options in zip(specs, taken, strict=True)
    )


def _taken(spec: TaskSpec) -> frozenset[str]:
    """Returns the options that settings may give to this task."""
    return frozenset() if spec.kind in OWN_KINDS else task_source(spec.kind).options
