"""Two right answers, written down: a policy that never finds one by itself learns from them first."""

import random

import swarmnode as sn

SHOWN = [
    {"prompt": "last abcd=", "answer": "d", "demonstration": "d"},
    {"prompt": "last kqrt=", "answer": "t", "demonstration": "t"},
]


def examples(seed):
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices("abcdefghijklmnopqrst", k=4))
        yield {"prompt": f"last {word}=", "answer": word[-1]}


def reward(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    print(sn.run(examples, reward, rounds=120, demonstrations=SHOWN))
