"""Rewards of TRL, by name or as they are: `pip install trl`."""

import swarmnode as sn


def rows():
    for number in range(2, 200):
        yield {"prompt": f"Halve {2 * number}. Think between <think> tags first.", "answer": str(number)}


if __name__ == "__main__":
    print(sn.run(list(rows()), ["numeric_match", "trl.rewards:think_format_reward"], rounds=20))
