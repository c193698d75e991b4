"""The Task Protocol, and the pure rules by which every node draws the same examples.

[Task.examples(seed)] -> [draw_train], [draw_held_out] -> rollout
exchange: ExampleKey  -> [redraw]                      -> score again, locally

A task is a stream of examples for each seed. A hash of the prompt (`is_held_out`), not the task, decides
which examples train and which are held out, so the two never overlap, on any node, for any task. Only a task
with its own evaluation set trains on all other examples; the set is part of its version.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, Self, TypeGuard, cast

from swarmnode.chat import Message, Prompt, Said, Turn, written_prompt
from swarmnode.errors import TaskError
from swarmnode.types import Completion, Example, ExampleKey, Scores

MAX_INDEX = 4096
"""Examples per seed. Bounds what redrawing one costs, so that a peer cannot name an expensive one."""

MOST_HELD_OUT = 256
"""If this many examples at the start of a seed are all held out, their prompts are alike."""

MAX_SEED = 2**63 - 1

HELD_OUT_SHARE = 5
"""One prompt in five is held out for evaluation, unless the task has its own evaluation set."""

EVALUATION_SEED = -1
"""The seed that draws a task's own evaluation set, complete and in its order. No peer can name it."""

DEMONSTRATED_SEED = -2
"""The seed of examples that came with their demonstrations. They cannot be redrawn: a judge has to be given
them. No peer can name it."""


class Task(Protocol):
    """A source of questions with a local judge.

    `version` must change whenever `examples` or `score` would give another result: nodes exchange rollouts
    only with the same name and version.

    Two threads use a task at the same time: the learner's, which draws and scores our own rollouts, and the
    judge's, which does the same for those of others. What `load_task` returns is safe: it lets one thread at
    a time into the code of task files, and never leaves a draw half done. A Task that you write as a class
    must be thread-safe itself, unless its calls share no state.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def examples(self, seed: int) -> Iterable[Example]:
        """Yields the examples of one seed, in order; the same for the same seed, everywhere. May be
        endless."""
        ...

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns the named rewards of each completion, in order. None: the reward does not apply. Raises
        TaskError."""
        ...


class Environment(Task, Protocol):
    """A task that answers back: it and the policy take turns until one of them has nothing more to say.

    `score` gets the turns of each episode and judges it. If `exchangeable`, what it observes and scores
    depends only on the example and on what the policy said, on every machine: a stranger's episode is
    replayed from what the policy said alone.
    """

    @property
    def exchangeable(self) -> bool: ...

    @property
    def most_turns(self) -> int:
        """The most turns that the policy may take."""
        ...

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        """Returns the named rewards of each episode, in order. A plain text, such as a judge's probe, is an
        episode of one turn (chat.turns_of)."""
        ...

    def observe(self, example: Example, turns: Sequence[Turn]) -> tuple[Message, ...] | None:
        """Returns the answer to the last of these turns, whose `observed` is still empty, as messages of role
        `tool` or `user`. None: the episode is over. May take long; several threads may ask, for several
        episodes of one example. Raises TaskError; JudgementLost if this episode cannot continue (its process
        died, and it cannot be replayed)."""
        ...


def is_environment(task: object) -> TypeGuard[Environment]:
    """Returns True if a task answers back."""
    return all(hasattr(task, name) for name in ("observe", "most_turns", "score"))


def is_task(given: object) -> TypeGuard[Task]:
    """Returns True if an object has the members of the Task Protocol."""
    return all(hasattr(given, name) for name in ("name", "version", "examples", "score"))


class TaskAround:
    """The attributes of a task that wraps another one: those of the wrapped one, unless overridden."""

    task: Any

    @property
    def name(self) -> str:
        return str(self.task.name)

    @property
    def exchangeable(self) -> bool:
        return is_exchangeable(self.task)

    @property
    def judges_groups(self) -> bool:
        return judges_groups(self.task)

    @property
    def levels(self) -> int:
        return levels_of(self.task)

    @property
    def evaluation_size(self) -> int:
        return evaluation_size_of(self.task)

    @property
    def demonstrations(self) -> Any:
        return demonstrations_of(self.task)


class Isolated(TaskAround, ABC):
    """A task whose code runs in separate processes, which end at a deadline and on demand. The only
    implementation is in isolated_task.py, which is imported only for such a task. `task` is what its process
    reported about it."""

    version: str

    @property
    @abstractmethod
    def spec(self) -> str:
        """Spec of the task in any folder: the whole path of its file, an import path, or a built-in task's
        name."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """The most requests that are answered at the same time, each in its own process."""

    @abstractmethod
    def examples(self, seed: int) -> Iterator[Example]: ...

    @abstractmethod
    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]: ...

    @abstractmethod
    def for_strangers(self, timeout_s: float, turn_timeout_s: float | None = None) -> "Isolated":
        """Returns this task in another process, which starts with the first request and yields to all others.
        `turn_timeout_s`: deadline of an environment's answer to one turn; None: `timeout_s`."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ends the work of the process at once; requests waiting for it raise JudgementLost."""

    @abstractmethod
    def close(self) -> None:
        """Ends the process for good."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_exchangeable(task: object) -> bool:
    """Returns True if rollouts of a task may leave this node. The default is True for a task that judges each
    answer by itself: its version promises that every node with the same one draws and scores alike."""
    return bool(getattr(task, "exchangeable", not judges_groups(task)))


def judges_groups(task: object) -> bool:
    """Returns True if a task states that it must see all answers of a group at once."""
    return bool(getattr(task, "judges_groups", False))


def levels_of(task: object) -> int:
    """Returns the number of levels of a task with a curriculum, whose seeds may name one (curriculum.py);
    else 1."""
    return int(getattr(task, "levels", 1))


def evaluation_size_of(task: object) -> int:
    """Returns the number of examples in a task's own evaluation set; 0 if a share of its prompts is held
    out."""
    return int(getattr(task, "evaluation_size", 0))


def demonstrations_of(task: object) -> Any:
    """Returns the demonstrations (drawing/demonstrations.py) that a task brings besides those in its
    columns."""
    return getattr(task, "demonstrations", {})


def may_be_exchanged(task: object) -> bool:
    """Returns True if rollouts of a task may leave this node and come to it. Strangers' episodes are played
    in a process that can be ended: in the node's own process they could stall the node."""
    return is_exchangeable(task) and (isinstance(task, Isolated) or not is_environment(task))


MAX_ABS_REWARD = 1e6
"""The largest absolute reward, ours or claimed. It also excludes NaN, the infinities and
numbers whose squares would overflow."""


def is_held_out(prompt: Prompt) -> bool:
    """Returns True if a prompt is held out for evaluation. Depends on its text alone."""
    return hashlib.blake2b(written_prompt(prompt).encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0


def holds_out(task: Task, example: Example) -> bool:
    """Returns True if no node trains on an example of this task: it belongs to the task's own evaluation set
    or, without one, its prompt is held out."""
    if evaluation_size_of(task):
        return example.key.seed == EVALUATION_SEED
    return is_held_out(example.prompt)


def draw_train(task: Task, seed: int) -> Iterator[Example]:
    """Yields training examples of one seed: those within MAX_INDEX that are not held out. Stops early if
    the first MOST_HELD_OUT all are, as with prompts that are all alike."""
    trains = False
    for number, example in enumerate(islice(task.examples(seed), MAX_INDEX), 1):
        if not holds_out(task, example):
            trains = True
            yield example
        elif not trains and number == MOST_HELD_OUT:
            return


def draw_held_out(task: Task, seed: int) -> Iterator[Example]:
    """Yields evaluation examples of one seed, or the task's whole own evaluation set. No node trains on
    them."""
    if evaluation_size_of(task):
        return iter(task.examples(EVALUATION_SEED))
    return (e for e in islice(task.examples(seed), MAX_INDEX) if is_held_out(e.prompt))


def redraw(task: Task, key: ExampleKey) -> Example:
    """Draws the example that `key` names from our own copy of the task.

    Raises TaskError when the key is out of bounds, names nothing, or names a held-out example.
    """
    if (key.task, key.version) != (task.name, task.version):
        raise TaskError(f"task {key.task} {key.version} is not {task.name} {task.version}")
    if not (0 <= key.seed <= MAX_SEED and 0 <= key.index < MAX_INDEX):
        raise TaskError(f"seed {key.seed} or index {key.index} is out of bounds")
    example = next(islice(task.examples(key.seed), key.index, None), None)
    if example is None:
        raise TaskError(f"{task.name} has no example {key.index} for seed {key.seed}")
    if holds_out(task, example):
        raise TaskError(f"{task.name} example {key.index} of seed {key.seed} is held out for evaluation")
    return example


def score_strictly(task: Task, example: Example, completions: Sequence[Said]) -> tuple[Scores, ...]:
    """Returns `task.score` as plain numbers, checked together with their count: a broken judge is an error,
    not a zero."""
    # Only an environment's completions are turns, and its `score` takes them.
    scores = task.score(example, cast(Sequence[str], completions))
    if len(scores) != len(completions):
        raise TaskError(
            f"{task.name}.score returned {len(scores)} results for {len(completions)} completions"
        )
    for named in scores:
        for name, value in named.items():
            if value is not None and not abs(value) <= MAX_ABS_REWARD:
                raise TaskError(
                    f"{task.name}.score: reward {name!r} is {value}, not a number up to {MAX_ABS_REWARD:g}",
                    hint="scale it: advantages do not depend on the scale",
                )
    return tuple(
        {name: None if value is None else float(value) for name, value in named.items()} for named in scores
    )


def score_completions(task: Task, example: Example, completions: Sequence[Completion]) -> tuple[Scores, ...]:
    """Returns the checked scores of these completions. Interrupted ones have none."""
    whole = [completion.said for completion in completions if not completion.broken_off]
    scores = iter(score_strictly(task, example, whole) if whole else ())
    return tuple({} if completion.broken_off else next(scores) for completion in completions)
