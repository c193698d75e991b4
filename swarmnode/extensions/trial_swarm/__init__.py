"""A trial: several nodes on one machine, which know different things, told of beside each of them alone."""

from swarmnode.registry import Parts

PARTS: Parts = {"command": {"swarm": "swarmnode.extensions.trial_swarm.trial_command:app"}}
