"""Examples that you have as a list, judged by exact match and by a reward of your own."""

import swarmnode as sn

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Peru": "Lima", "Cuba": "Havana"}
ROWS = [{"prompt": f"The capital of {land} is", "answer": city} for land, city in CAPITALS.items()]


def short(completions, **columns):
    return [-0.01 * len(text) for text in completions]


if __name__ == "__main__":
    print(sn.run(ROWS, ["exact_match", short], rounds=20))
