"""The last letter, paid for in full or not at all: what the demonstration policy never says by itself."""

import random


def examples(seed):
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices("abcdefghijklmnopqrst", k=4))
        yield {"prompt": f"last {word}=", "answer": word[-1]}


def reward(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
