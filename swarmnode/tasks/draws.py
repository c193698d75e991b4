"""One digest of what a task draws, by which two processes can tell that they draw the same.

task -> [draw, draw_digest] -> check.py, worker.py
Example -> [written_down] -> messages.py
"""

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from swarmnode.tasks.messages import Digested, DrawnExample
from swarmnode.tasks.task import Task
from swarmnode.types import Example

SEEDS = (0, 1, 2**40)
"""Seeds that are drawn: two neighbours, and one that does not fit in 32 bits."""

EXAMPLES_PER_SEED = 200


def draw(task: Task) -> Iterator[Example]:
    """The examples that a task is judged by."""
    for seed in SEEDS:
        yield from islice(task.examples(seed), EXAMPLES_PER_SEED)


def draw_digest(task: Task) -> Digested:
    """One digest of everything that is drawn: prompts, columns and their order. Of what is no data (an object
    of a class) only its type can be compared."""
    state = hashlib.blake2b(digest_size=16)
    no_data: dict[str, str] = {}
    for example in draw(task):
        columns: list[tuple[str, Any]] = []
        for name, value in sorted(example.columns.items()):
            if not is_data(value):
                value = no_data[name] = type(value).__name__
            columns.append((name, value))
        state.update(repr((example.key, example.prompt, columns)).encode())
    return Digested(state.hexdigest(), no_data)


def is_data(value: Any) -> bool:
    """Whether a column can be written down."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def written_down(example: Example) -> DrawnExample:
    """An example with those of its columns that are data."""
    columns = {name: value for name, value in example.columns.items() if is_data(value)}
    return DrawnExample(example.prompt, columns, example.conversational)
