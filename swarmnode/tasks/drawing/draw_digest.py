"""One digest of a task's draws, by which two processes can tell that they draw the same.

task -> [draw, draw_digest] -> worker.py, extensions/workbench/check.py
Example -> [written_down] -> worker_messages.py
"""

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from swarmnode.chat import written_prompt
from swarmnode.tasks.processes.worker_messages import Digested, DrawnExample
from swarmnode.tasks.task import Task
from swarmnode.types import Example

SEEDS = (0, 1, 2**40)
"""Seeds of the digest: two adjacent ones, and one that does not fit into 32 bits."""

EXAMPLES_PER_SEED = 200


def draw(task: Task) -> Iterator[Example]:
    """Yields the examples that the digest is made of."""
    for seed in SEEDS:
        yield from islice(task.examples(seed), EXAMPLES_PER_SEED)


def draw_digest(task: Task) -> Digested:
    """Returns one digest of everything drawn: prompts, columns and their order. A column that is not data (an
    object of a class) counts by its type only."""
    state = hashlib.blake2b(digest_size=16)
    no_data: dict[str, str] = {}
    for example in draw(task):
        columns: list[tuple[str, Any]] = []
        for name, value in sorted(example.columns.items()):
            if not is_data(value):
                value = no_data[name] = type(value).__name__
            columns.append((name, value))
        state.update(repr((example.key, written_prompt(example.prompt), columns)).encode())
    return Digested(state.hexdigest(), no_data)


def is_data(value: Any) -> bool:
    """Returns True if a column's value can be written as msgpack."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def written_down(example: Example) -> DrawnExample:
    """Returns an example with those of its columns that are data."""
    columns = {name: value for name, value in example.columns.items() if is_data(value)}
    return DrawnExample(written_prompt(example.prompt), columns, example.conversational)
