"""The Task Protocol, and the pure rules by which every node draws the same examples.

[Task.examples(seed)] -> [draw_train], [draw_held_out] -> rollout
exchange: ExampleKey  -> [redraw]                      -> score again, locally

A task is a stream of examples for each seed. Which examples train and which are held out is not the task's
choice: a hash of the prompt decides (`is_held_out`), so the two can never overlap, on any node, for any task.
Only a task with an evaluation set of its own trains on all the rest; the set is part of its version.
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
"""Examples at the beginning of a seed that cannot all be held out unless their prompts are alike."""

MAX_SEED = 2**63 - 1

HELD_OUT_SHARE = 5
"""One prompt in five is held out for evaluation, of a task that has no evaluation set of its own."""

EVALUATION_SEED = -1
"""The seed that draws the evaluation set of a task that has one, whole and in its order. No peer can name
it."""

DEMONSTRATED_SEED = -2
"""The seed of examples that were given with their demonstrations. They stand in no draw: whoever judges them
has to be given them. No peer can name it."""


class Task(Protocol):
    """A source of questions with a local judge.

    `version` must change whenever `examples` or `score` would give another result: nodes exchange rollouts
    only when both name and version agree.

    Two threads use a task at the same time: the learner's, which draws and scores our own rollouts, and the
    judge's, which does it for those of others. What `load_task` returns can be used so: it lets one thread at
    a time into the code of task files, and never leaves a draw of them half done. A Task that you write as a
    class has to see to that by itself, unless its calls share no state.
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
    """A task that answers back: a policy and it take turns, until one of them has nothing more to say.

    `score` gets the turns of each episode, and judges how it went. Where `exchangeable`, what it observes and
    scores is a function of the example and of what the policy said, on every machine: a stranger's episode is
    played again from what the policy said alone.
    """

    @property
    def exchangeable(self) -> bool: ...

    @property
    def most_turns(self) -> int:
        """Turns that the policy has at most."""
        ...

    def score(self, example: Example, completions: Sequence[Said]) -> list[Mapping[str, float | None]]:
        """Returns the named rewards of each episode, in order. One text, such as a judge's probe, is one of a
        single turn (chat.turns_of)."""
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
    """What a task says of itself where it stands around another one: the same, but for what it overrides."""

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
    """A task whose code runs in processes of its own, which end at a deadline and on demand. The one
    implementation is in isolated_task.py, which is imported only for such a task. `task` is what its process
    says of it."""

    version: str

    @property
    @abstractmethod
    def spec(self) -> str:
        """Spec of the task in any folder: the whole path of its file, an import path, or a built-in task's
        name."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """Most requests that are answered at the same time, each in a process of its own."""

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
        """Ends the work of the process at once; requests that wait for it raise JudgementLost."""

    @abstractmethod
    def close(self) -> None:
        """Ends the process for good."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_exchangeable(task: object) -> bool:
    """Returns True if rollouts of a task may leave this node. Unless it says otherwise, they may where it
    judges each answer by itself: its version promises that every node draws and scores alike."""
    return bool(getattr(task, "exchangeable", not judges_groups(task)))


def judges_groups(task: object) -> bool:
    """Returns True if a task says that it has to see all answers of a group at once."""
    return bool(getattr(task, "judges_groups", False))


def levels_of(task: object) -> int:
    """Returns the number of levels of a task with a curriculum, whose seeds may name one (curriculum.py); 1
    without."""
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
    in a process that can be ended: an environment in the node's own process would be theirs to stop."""
    return is_exchangeable(task) and (isinstance(task, Isolated) or not is_environment(task))


MAX_ABS_REWARD = 1e6
"""The largest absolute reward, ours or claimed. NaN and the infinities fall outside of any bound, and so do
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
    """Yields training examples of one seed: those within MAX_INDEX that are not held out. None where all of a
    beginning is, as prompts that are all alike may be."""
    trains = False
    for number, example in enumerate(islice(task.examples(seed), MAX_INDEX), 1):
        if not holds_out(task, example):
            trains = True
            yield example
        elif not trains and number == MOST_HELD_OUT:
            return


def draw_held_out(task: Task, seed: int) -> Iterator[Example]:
    """Yields evaluation examples of one seed, or all of the task's own evaluation set. No node trains on
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
    """`task.score` as plain numbers, they and their count checked: a broken judge is an error and not a
    zero."""
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
                    f"{task.name}.score: reward {name!r} is {value}, not a number within {MAX_ABS_REWARD:g}",
                    hint="scale it: advantages do not depend on its unit",
                )
    return tuple(
        {name: None if value is None else float(value) for name, value in named.items()} for named in scores
    )


def score_completions(task: Task, example: Example, completions: Sequence[Completion]) -> tuple[Scores, ...]:
    """Returns the checked scores of these completions. Those that were broken off have none."""
    whole = [completion.said for completion in completions if not completion.broken_off]
    scores = iter(score_strictly(task, example, whole) if whole else ())
    return tuple({} if completion.broken_off else next(scores) for completion in completions)
