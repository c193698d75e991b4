"""Two functions as tools: the policy calls them in turns of its own, then answers."""

import random

import swarmnode as sn


def add(left: int, right: int) -> int:
    """Adds two numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left + right


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def examples(seed):
    rng = random.Random(seed)
    while True:
        left, right = rng.randrange(100), rng.randrange(100)
        yield {
            "prompt": f"Twice {left} + {right}? Use add(1, 2) and double(3).",
            "answer": str(2 * (left + right)),
        }


if __name__ == "__main__":
    print(sn.run(examples, "exact_match", tools=[add, double], rounds=20))
