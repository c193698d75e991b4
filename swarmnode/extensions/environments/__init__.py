"""Tasks of other people's libraries: reasoning-gym, tasksets of verifiers, and tools of MCP servers."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "task": {
        "reasoning-gym": "swarmnode.extensions.environments.gym_task:REASONING_GYM",
        "verifiers": "swarmnode.extensions.environments.taskset_task:VERIFIERS",
    },
}
