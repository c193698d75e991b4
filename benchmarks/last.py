"""The task of one_finds.py: nothing is paid but the whole answer, so a policy that never saw the question is
never right, or once in several hundred thousand answers. Two demonstrations stand beside it."""

import random


def examples(seed):
    """Four letters, of which the last is asked for."""
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices("abcdefghijklmnopqrst", k=4))
        yield {"prompt": f"last {word}=", "answer": word[-1]}


def reward(completions, answer, **columns):
    """1 for the letter and nothing else."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


DEMONSTRATIONS = [
    {"prompt": "last hbte=", "answer": "e", "demonstration": "e"},
    {"prompt": "last abcd=", "answer": "d", "demonstration": "d"},
]
"""Of one kind of question two; neither is held out."""
