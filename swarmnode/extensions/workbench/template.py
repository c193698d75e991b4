"""A task file to begin with, as `swarmnode task new FILE.py` writes it.

[write_template] -> FILE.py -> `swarmnode task check` -> `swarmnode join --task`
"""

from pathlib import Path

from swarmnode.errors import StorageError, TaskError
from swarmnode.tasks.loader import TASK_NAME

TEMPLATE = '''\
"""Sums of two numbers. The task is called after this file; peers who have the same file exchange rollouts."""
import random

# The same seed must give the same examples on every machine: a peer that hears of an answer draws its
# question again. So draw from random.Random(seed), never from a clock, a global random or hash().
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


ENVIRONMENT_TEMPLATE = '''\
"""Guess a number in a few turns. The environment is called after this file, as any task is."""
import random

class Guessing:
    exchangeable = True  # Its answers follow from reset() and from what is said, so peers can replay it.
    most_turns = 6  # Turns of the policy.

    # Gets the columns of the example by name. What it returns is appended to the prompt.
    def reset(self, answer, **columns):
        self.answer, self.found = int(answer), False
        return " Then say the number."

    # Public methods with types and a docstring are tools. The policy may write <tool_call>{"name": "guess",
    # "arguments": {"number": 3}}</tool_call>, {"name": ..., "arguments": ...}, guess(3) or guess: 3.
    def guess(self, number: int) -> str:
        """Compares a number with the one that is looked for.

        Args:
            number: What you guess.
        """
        self.found = self.found or number == self.answer
        return "yes" if number == self.answer else "higher" if number < self.answer else "lower"

    # The reward of the episode, once a turn calls no tool or no turns are left. reward(completions,
    # environments, **columns) may be added to it, or replace it.
    def get_reward(self):
        return float(self.found)

environment = Guessing  # Or, for functions that keep nothing between two calls: tools = [add, look_up]

# As in any task file: the same examples for the same seed, on every machine.
def examples(seed):
    rng = random.Random(seed)
    for _ in range(1000):
        top = rng.randrange(8, 1000)
        yield {"prompt": f"Find a number below {top} by guessing.", "answer": str(rng.randrange(top))}
'''


def write_template(path: Path, *, environment: bool = False) -> None:
    """Writes the file, unless there is one. Raises TaskError, StorageError."""
    if path.suffix != ".py" or not TASK_NAME.fullmatch(path.stem):
        raise TaskError(
            f"{path.name} is not a valid name for a task file",
            hint="use letters, digits, dots, - and _, then .py",
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(ENVIRONMENT_TEMPLATE if environment else TEMPLATE)
    except FileExistsError as error:
        raise StorageError(f"{path} exists already", hint="name a file that does not exist yet") from error
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint="check the path") from error
