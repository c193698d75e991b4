"""Tasks and judges that a swarm of sapo.py has.

[tasks_of] -> sapo_models.py (what policies are taught), sapo_node.py (what they are asked)

builtin: the eight built-in tasks, whose judge takes the answer and nothing else. lax: the same under a judge
that takes anything before the answer. step: eight tasks in two steps, answered as `step>final`, whose judge
reads what follows the last `>`, as judges of numbers and boxes do; the policy needs the step to get there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.tasks.builtin import BUILTIN_TASKS, BuiltinTask
from swarmnode.tasks.task import Task
from swarmnode.testing.attackers import Solved
from swarmnode.types import Example, ExampleKey

MAX_TOKENS = {"builtin": 10, "lax": 26, "step": 36}
"""Longest answer in each world: room for an advertisement, where one may pass."""

SEPARATOR = ">"

_NEXT = {**{chr(c): chr(c + 1) for c in range(ord("a"), ord("z"))}, "z": "a"} | {
    str(digit): str((digit + 1) % 10) for digit in range(10)
}


def tasks_of(world: str) -> dict[str, Task]:
    """The tasks of a world by name."""
    tasks: Sequence[Task] = BUILTIN_TASKS
    if world == "lax":
        tasks = [LaxTask(task) for task in BUILTIN_TASKS]
    if world == "step":
        tasks = [StepTask(task) for task in BUILTIN_TASKS]
    return {task.name: task for task in tasks}


@dataclass(frozen=True, slots=True)
class LaxTask:
    """A built-in task under a judge that looks at the end of an answer only."""

    task: BuiltinTask

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def version(self) -> str:
        return f"{self.task.version}-lax"

    def examples(self, seed: int) -> Iterator[Example]:
        """The same examples, under this version."""
        return (_renamed(example, self.version, {}) for example in self.task.examples(seed))

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """1.0 for whatever ends in the answer."""
        right = str(example.columns["answer"])
        return [{"correct": float(text.rstrip().endswith(right))} for text in completions]


@dataclass(frozen=True, slots=True)
class StepTask:
    """A built-in task whose answer is one step on the way: each of its characters is moved on by one.

    >>> example = next(StepTask(BUILTIN_TASKS[0]).examples(0))
    >>> example.prompt, example.columns["answer"]
    ('rev gbp=', 'pbg>qch')
    """

    task: BuiltinTask

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def version(self) -> str:
        return f"{self.task.version}-step"

    def examples(self, seed: int) -> Iterator[Example]:
        """The same prompts, with an answer in two steps."""
        for example in self.task.examples(seed):
            step = str(example.columns["answer"])
            final = "".join(_NEXT[character] for character in step)
            yield _renamed(example, self.version, {"answer": f"{step}{SEPARATOR}{final}", "final": final})

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """1.0 where what follows the last separator is the final answer."""
        return [{"correct": float(_final(text) == example.columns["final"])} for text in completions]


def solved(example: Example) -> Solved:
    """The right answer to an example of any world."""
    steps, joint, final = str(example.columns["answer"]).rpartition(SEPARATOR)
    return Solved(steps, joint, final)


def _final(text: str) -> str | None:
    _, separator, final = text.rpartition(SEPARATOR)
    return final.strip() if separator else None


def _renamed(example: Example, version: str, columns: Mapping[str, str]) -> Example:
    key = example.key
    return Example(
        ExampleKey(key.task, version, key.seed, key.index), example.prompt, {**example.columns, **columns}
    )
