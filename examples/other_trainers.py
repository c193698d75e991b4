"""Rewards of verl, slime and genrl as they are. The first two are known by their arguments."""

import swarmnode as sn

ROWS = [{"prompt": f"Half of {2 * n}?", "answer": str(n)} for n in range(100)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth)}


async def custom_rm(args, sample):
    return -0.01 * len(sample.response)


def reward_fn(completions, answer, metadata):
    return [0.1 * (answer in text) for text in completions]


if __name__ == "__main__":
    print(sn.run(ROWS, [compute_score, custom_rm, f"genrl:{__file__}:reward_fn"], rounds=20))
