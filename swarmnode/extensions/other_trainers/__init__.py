"""What people bring along from other trainers: rewards written for them, and names that they know."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "convention": {
        "verl": "swarmnode.extensions.other_trainers.reward_conventions:VERL",
        "slime": "swarmnode.extensions.other_trainers.reward_conventions:SLIME",
        "nanochat": "swarmnode.extensions.other_trainers.reward_conventions:NANOCHAT",
        "verifiers": "swarmnode.extensions.other_trainers.reward_conventions:VERIFIERS",
        "genrl": "swarmnode.extensions.other_trainers.reward_conventions:GENRL",
    },
    "names": {"trl": "swarmnode.extensions.other_trainers.trl_names:TRL"},
}
