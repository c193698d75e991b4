"""Tasks and rewards that are objects of a running script rather than files: functions, rows, Task objects.

script -> [as_task] -> Task -> api.py -> a node

Their code has to run in the node's own process: a function of a notebook has no file that another process
could load. Only objects that the script itself passes arrive here, nothing from the wire.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from swarmnode.errors import TaskError
from swarmnode.tasks.digests import digest_of_texts, judged_version, source_of
from swarmnode.tasks.environment_maker import environments, listed
from swarmnode.tasks.file_task import Draw, FileTask, require_seed
from swarmnode.tasks.judging.rewards import Reward, load_reward, named_rewards, with_weights
from swarmnode.tasks.kinds.data import PROMPT_COLUMNS, digest_of, drawn, packed_rows, prompts_of, without
from swarmnode.tasks.kinds.rewarded_task import rewarded
from swarmnode.tasks.kinds.rows_in_memory import TRAINING_SPLIT, rows_of, split
from swarmnode.tasks.loader import TASK_NAME
from swarmnode.tasks.rows import columns_of
from swarmnode.tasks.specs import TaskKind, TaskSpec, names_a_task
from swarmnode.tasks.task import EVALUATION_SEED, Task, is_task

Rows = Iterable[Any]
"""Examples as plain data, in the forms that `examples(seed)` may yield: a list, a set of `datasets`, a data
frame, a generator; or several splits by name."""

RewardSpec = Reward | str
"""A function on TRL's contract, or the name of one: `exact_match`, `file.py:function`, `module:function`."""

NAMELESS = frozenset({"examples", "<lambda>"})
"""Function names that do not serve as the name of a task."""


def as_task(
    given: Task | Draw | Rows | Path | None,
    rewards: Sequence[RewardSpec] = (),
    *,
    tools: Sequence[object] | None = None,
    environment: object = None,
    weights: Sequence[float] = (),
    evaluation: Rows | None = None,
) -> Task:
    """Returns an object of a script as a task.

    `given`: a Task; a function `examples(seed)`, as in a task file; or the examples themselves, in anything
    that holds rows (rows_in_memory.py), which each seed draws in another order. `rewards`: its judges,
    instead of the task's own judge or, without one, exact match; `weights`: the weight of each. `tools` and
    `environment`: as in a task file; an environment may bring its own questions (`given` None). `evaluation`:
    rows to measure it on, all of them; None: one of the splits if `given` has several, else the share of
    prompts that every node holds out. Name and version follow from the source, so nodes that run the same
    script exchange rollouts. Raises TaskError for anything but a task.

    >>> task = as_task([("1+1=", "2"), ("2+2=", "4")])
    >>> sorted(example.prompt for example in task.examples(0))
    ['1+1=', '2+2=']
    """
    own = with_weights(named_rewards(rewards), weights)
    if is_task(given):
        if tools is not None or environment is not None or evaluation is not None:
            raise TaskError(
                f"{given.name} is already a task", hint="pass its examples as a list or a function"
            )
        return rewarded(given, own) if own else given
    trained, measured = split(given)
    source = _source(trained, own, environment, measured if evaluation is None else evaluation)
    if tools is None and environment is None:
        return source
    used = [] if tools is None else [*listed(tools)]
    used += [] if environment is None else _factories(environment)
    digest = digest_of_texts([source.version, *map(source_of, filter(callable, used))])
    return environments().around(replace(source, version=digest), tools, environment, {}, own=own)


def task_names(given: object) -> tuple[str, ...]:
    """Returns the names of tasks that a script passes: one, or a list in which every text is a name. Empty:
    it is not a name.

    >>> task_names("rev"), task_names(["rev", "sort"]), task_names(["rev", "Say it twice."])
    (('rev',), ('rev', 'sort'), ())
    """
    if isinstance(given, str | Path):
        return (str(given),)
    several = cast(Sequence[object], given) if isinstance(given, list | tuple) else ()
    named = all(isinstance(one, str | Path) and names_a_task(str(one)) for one in several)
    return tuple(map(str, several)) if named else ()


def refuse_untrained(given: object) -> None:
    """Raises TaskError for splits without one to train on; only an evaluation could use them."""
    if isinstance(given, Mapping) and TRAINING_SPLIT not in given:
        given = cast(Mapping[Any, object], given)
        hint = (
            "pass one split: splits[NAME]; a fifth of its prompts is held out, unless you pass eval_dataset"
        )
        if any(name in given for name in PROMPT_COLUMNS):
            hint = "a dictionary is read as splits; for columns pass datasets.Dataset.from_dict(...), or rows"
        names = ", ".join(map(str, given))
        raise TaskError(f"no split {TRAINING_SPLIT!r} among {names}"[:200], hint=hint)


def measured_rows(given: object) -> Any:
    """Returns the rows to measure a policy on if `given` is rows: all of them, or the evaluation split of
    several. None: it is a task, a function or nothing."""
    if given is None or task_names(given) or callable(given) or is_task(given):
        return None
    trained, measured = split(given)
    return trained if measured is None else measured


def _factories(environment: Any) -> list[Any]:
    return [*environment.values()] if isinstance(environment, Mapping) else [environment]


def _source(given: Any, own: Mapping[str, Reward], environment: object, evaluation: object) -> FileTask:
    """Returns the task that draws the examples. Raises TaskError."""
    judges = own or {"correct": load_reward("exact_match")}
    # An environment may judge by itself; then no row needs an answer.
    exact = not own and environment is None
    measured = () if evaluation is None else _packed(evaluation, exact=exact)
    if evaluation is not None and not measured:
        raise TaskError(
            "eval_dataset is empty",
            hint="leave it out to hold out a fifth of the prompts instead",
        )
    if given is None and environment is not None:
        names = [getattr(one, "__name__", "") for one in _factories(environment)]
        name = names[0] if TASK_NAME.fullmatch(names[0]) else "environment"
        return FileTask(name, judged_version("", judges), Path("<script>"), None, judges)
    if callable(given):
        given = cast(Draw, given)
        name = getattr(given, "__name__", "task")
        require_seed(given, name)
        name = "task" if name in NAMELESS or not TASK_NAME.fullmatch(name) else name
        source = source_of(given)
        version = judged_version(f"{source}\n{digest_of((), measured)}" if measured else source, judges)
        draw = partial(_either, given, measured) if measured else given
        asked = frozenset(prompts_of(measured))
        return FileTask(name, version, _place_of(given), draw, judges, evaluated=asked)
    passed = _packed(given, exact=exact)
    rows = without(passed, measured)
    if passed and not rows:
        raise TaskError(
            "every training row is also in the evaluation set, so none is left to train on",
            hint="measure on other rows, or leave out eval_dataset to hold out a fifth of the prompts",
        )
    if not rows and not measured:
        raise TaskError("the task has no rows", hint="pass at least a few hundred")
    version = judged_version(digest_of(rows, measured), judges)
    draw = partial(drawn, rows, measured, f"rows/{version}")
    return FileTask("rows", version, Path("<rows>"), draw, judges, evaluated=frozenset(prompts_of(measured)))


def _packed(given: object, *, exact: bool) -> Sequence[bytes]:
    """Returns the rows in an object, each checked and packed. Raises TaskError if it holds none."""
    rows = rows_of(given)
    if rows is None:
        raise TaskError(
            f"not a task: {given!r:.80}",
            hint="pass a name, a file, a function examples(seed), rows (a list, a Dataset, a DataFrame, a"
            " generator), or an object with name, version, examples and score",
        )
    placed = ((f"row {number}", columns_of(row, f"row {number}")) for number, row in enumerate(rows, 1))
    return packed_rows(placed, TaskSpec(TaskKind.DATA, "rows"), exact=exact)


def _either(draw: Draw, evaluation: Sequence[bytes], seed: int) -> Iterable[Any]:
    """Draws from a function, or for EVALUATION_SEED from the evaluation set beside it."""
    return drawn((), evaluation, "", seed) if seed == EVALUATION_SEED else draw(seed)


def _place_of(function: Callable[..., Any]) -> Path:
    """Returns the file in which a function is written, for messages."""
    try:
        return Path(inspect.getsourcefile(function) or "<script>")
    except TypeError:
        return Path("<script>")
