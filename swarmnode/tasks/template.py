"""A task file to begin with, as `swarmnode task new FILE.py` writes it.

[write_template] -> FILE.py -> `swarmnode task check` -> `swarmnode join --task`
"""

from pathlib import Path

from swarmnode.errors import StorageError, TaskError
from swarmnode.tasks.loader import TASK_NAME

TEMPLATE = '''\
"""Sums of two numbers. The task is called after this file; peers who have the same file exchange rollouts."""
import random

# The same seed must give the same examples on every machine: whoever hears of an answer draws its question
# again. So draw from random.Random(seed), never from a clock, a global random or hash().
def examples(seed):
    rng = random.Random(seed)
    for _ in range(1000):
        left, right = rng.randrange(100), rng.randrange(100)
        # The policy sees "prompt". Every other column goes to the rewards, by its name.
        yield {"prompt": f"{left} + {right} =", "answer": str(left + right)}

# One number per completion, or None where the reward does not apply; the same for the same text, everywhere.
# Read all of the answer: whatever a reward lets through, strangers can teach.
def reward(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]

# Functions called reward_... are added to it. This one gives a little for any number:
# def reward_number(completions, **columns):
#     return [0.1 * text.strip().isdecimal() for text in completions]
'''


def write_template(path: Path) -> None:
    """Write the file, unless there is one. Raises TaskError, StorageError."""
    if path.suffix != ".py" or not TASK_NAME.fullmatch(path.stem):
        raise TaskError(
            f"{path.name} is no name for a task file",
            hint="letters, digits, dots, - and _, then .py",
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE)
    except FileExistsError as error:
        raise StorageError(f"{path} exists already", hint="name a file that does not") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint="is the path right?") from error
