"""Tasks that answer back: tools and environments, and those of other libraries: reasoning-gym, tasksets of
verifiers, MCP servers."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "task": {
        "reasoning-gym": "swarmnode.extensions.environments.gym_task:REASONING_GYM",
        "verifiers": "swarmnode.extensions.environments.taskset_task:VERIFIERS",
    },
    "environment": {"turns": "swarmnode.extensions.environments.environment_task:TURNS"},
}
