"""A task of your own: questions and a reward as two functions, trained, asked and measured in one script."""

import random

import swarmnode as sn


def examples(seed):
    rng = random.Random(seed)
    while True:
        word = "".join(rng.choices("abcdefghijklmnopqrst", k=4))
        yield {"prompt": f"last {word}=", "answer": word[-1]}


def reward(completions, answer, **columns):
    return [
        text.startswith(right) / max(len(text), 1) for text, right in zip(completions, answer, strict=True)
    ]


if __name__ == "__main__":
    node = sn.Node(examples, reward, rounds=100)
    print(node.run().reward_last, node.policy.generate("last abcd="))
