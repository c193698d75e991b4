"""One digest of what a task draws, by which two processes can tell that they draw the same.

task -> [draw, draw_digest] -> check.py, worker.py
"""

import hashlib
from collections.abc import Iterator
from itertools import islice

from swarmnode.tasks.task import Task
from swarmnode.types import Example

SEEDS = (0, 1, 2**40)
"""Seeds that are drawn: two neighbours, and one that does not fit in 32 bits."""

EXAMPLES_PER_SEED = 200


def draw(task: Task) -> Iterator[Example]:
    """The examples that a task is judged by."""
    for seed in SEEDS:
        yield from islice(task.examples(seed), EXAMPLES_PER_SEED)


def draw_digest(task: Task) -> str:
    """One digest of everything that is drawn: prompts, columns and their order."""
    state = hashlib.blake2b(digest_size=16)
    for example in draw(task):
        state.update(repr((example.key, example.prompt, sorted(example.columns.items()))).encode())
    return state.hexdigest()
