"""Tasks of other people's libraries: reasoning-gym, tasksets of verifiers, and tools of MCP servers."""

PARTS = {
    "task": {
        "reasoning-gym": "swarmnode.extensions.environments.gym_task:REASONING_GYM",
        "verifiers": "swarmnode.extensions.environments.taskset_task:VERIFIERS",
    },
}
"""Parts that this folder registers (swarmnode/registry.py)."""
