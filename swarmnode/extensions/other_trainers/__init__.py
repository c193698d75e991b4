"""Coming from another trainer: rewards that were written for it, and its names of settings."""

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
