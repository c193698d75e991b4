"""A data set of reasoning-gym at levels that follow the policy: `pip install -e ".[tasks]"`."""

import swarmnode as sn

SETTINGS = {
    "rollout.max_prompt_tokens": 256,  # the tiny policy of a machine without a GPU would have 64
    "tasks.system_prompt": "Think, then write your answer between <answer> and </answer>.",
}

if __name__ == "__main__":
    print(sn.run("reasoning-gym:chain_sum?curriculum=true", rounds=20, settings=SETTINGS))
