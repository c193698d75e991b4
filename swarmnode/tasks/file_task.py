"""A task whose examples and rewards are functions of a Python file or of a script, or the rows of a data set.

loader.py, data.py, script_objects.py -> [FileTask] -> draw_round, score
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from swarmnode.chat import Prompt
from swarmnode.errors import TaskError, where
from swarmnode.tasks.deadlines.task_lock import TASK_LOCK
from swarmnode.tasks.judging.rewards import Reward, are_exchangeable, judge_groups, score_with
from swarmnode.tasks.rows import read_row
from swarmnode.tasks.task import EVALUATION_SEED, holds_out
from swarmnode.types import Example, ExampleKey

Draw = Callable[[int], Iterable[Any]]
"""Signature of `examples(seed)` in a task file, which yields prompts, (prompt, answer) pairs, or dictionaries
with a "prompt"."""

FIRST_DRAW = 16
"""Examples drawn at once, enough for a round's share of a task or for the example that a stranger names."""

DRAW_GROWTH = 4
"""Growth of a draw that was too short: this many times more are drawn, again from the start, which for a
whole seed is a third more work."""


def require_seed(draw: object, told_as: object) -> None:
    """Raises TaskError unless an object is a function that takes a seed. `told_as`: its name or file, for the
    error."""
    try:
        takes_seed = callable(draw) and bool(inspect.signature(draw).parameters)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{told_as} cannot be called: {error}") from error
    if not takes_seed:
        raise TaskError(
            f"{told_as}: no function examples(seed)",
            hint="write: def examples(seed): yield prompt, answer",
        )


@dataclass(frozen=True, slots=True)
class FileTask:
    """A task in a Python file of the user. Two files with the same name but different text never exchange:
    the version is a digest of the source."""

    name: str
    version: str
    path: Path
    draw: Draw | None
    """Function that draws the examples. None: the environment brings the questions."""
    rewards: Mapping[str, Reward]
    may_leave: bool = True
    evaluated: frozenset[Prompt] = frozenset()
    """Questions of its own evaluation set, which `draw` yields for EVALUATION_SEED."""

    @property
    def evaluation_size(self) -> int:
        return len(self.evaluated)

    @property
    def exchangeable(self) -> bool:
        """True if other nodes can judge single answers alike and the file does not forbid it."""
        return self.may_leave and are_exchangeable(self.rewards)

    @property
    def judges_groups(self) -> bool:
        """True if a reward compares the answers of a group."""
        return judge_groups(self.rewards)

    def examples(self, seed: int) -> Iterator[Example]:
        """Yields the file's own examples. It may be read slowly, and alongside other draws. Raises TaskError
        if the file fails or yields something else."""
        index = 0
        for row in self._rows(seed):
            example = read_row(row, ExampleKey(self.name, self.version, seed, index), self.path)
            if seed == EVALUATION_SEED or example.prompt not in self.evaluated:
                index += 1
                yield example

    def score(self, example: Example, completions: Sequence[str]) -> list[Mapping[str, float | None]]:
        """Returns the scores of the file's own rewards."""
        with TASK_LOCK.taken():
            return score_with(self.rewards, example, completions, held_out=holds_out(self, example))

    def _rows(self, seed: int) -> Iterator[Any]:
        # A generator of the file never waits between two rows: others would use its source of numbers (such
        # as the global `random`) meanwhile. More rows are drawn again from the start.
        known, count = 0, FIRST_DRAW
        while True:
            rows, failure = self._draw_at_once(seed, count)
            yield from rows[known:]
            if failure is not None:
                complaint = f"{self.path}: examples({seed}) failed: {failure!r}"
                raise TaskError(complaint, hint=where(failure)) from failure
            if len(rows) < count:
                return
            known, count = count, count * DRAW_GROWTH

    def _draw_at_once(self, seed: int, count: int) -> tuple[list[Any], BaseException | None]:
        """Returns the first `count` rows, or those before the first failure together with the failure."""
        rows: list[Any] = []
        assert self.draw is not None
        with TASK_LOCK.taken():
            try:
                rows.extend(islice(self.draw(seed), count))
            except (Exception, SystemExit) as error:  # noqa: BLE001  raised once the rows before it have been used
                return rows, error
        return rows, None
