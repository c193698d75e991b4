"""A seed: a steady address through which others find their swarm. It connects others and trains nothing."""

from swarmnode.registry import Parts

PARTS: Parts = {"command": {"seed": "swarmnode.extensions.seed.seed_command:seed"}}
