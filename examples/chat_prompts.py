"""Prompts as messages, with a system prompt; the node writes them in its model's own chat template."""

import swarmnode as sn


def examples(seed):
    for number in range(1, 1000):
        question = {"role": "user", "content": f"What is {number} plus {seed % 100}?"}
        yield {
            "prompt": [{"role": "system", "content": "Answer in \\boxed{}."}, question],
            "answer": str(number + seed % 100),
        }


def polite(completions, **columns):
    return [0.1 * ("please" in messages[-1]["content"]) for messages in completions]


if __name__ == "__main__":
    print(sn.run(examples, ["boxed_match", polite], rounds=20))
