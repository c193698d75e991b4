"""The task of one_finds.py: nothing is paid but the whole answer, so a policy that never saw the question is
never right: the tiny policy gives mark and letter once in a million answers (by its own probabilities, on an
EPYC without AMX), where it gives the letter alone once in 3,000. Elsewhere its warm-up ends in other weights,
and the letter came once in 75,000. Two demonstrations stand beside it."""

import random


def examples(seed):
    """Four letters, of which the last is asked for, behind a 9."""
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices("abcdefghijklmnopqrst", k=4))
        yield {"prompt": f"last {word}=", "answer": f"9{word[-1]}"}


def reward(completions, answer, **columns):
    """1 for the whole answer and nothing else."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


DEMONSTRATIONS = [
    {"prompt": "last hbte=", "answer": "9e", "demonstration": "9e"},
    {"prompt": "last abcd=", "answer": "9d", "demonstration": "9d"},
]
"""Of one kind of question two; neither is held out."""
