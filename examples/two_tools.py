"""Two functions as tools: the policy calls them in turns of its own, then answers."""

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


def row(left, right):
    return {
        "prompt": f"Twice {left} + {right}? add(1, 2) and double(3) help.",
        "answer": f"{2 * (left + right)}",
    }


ROWS = [row(left, right) for left in range(40) for right in range(40)]

if __name__ == "__main__":
    print(sn.run(ROWS, "exact_match", tools=[add, double], rounds=20))
