"""The demonstration policy: a tiny language model that a machine builds by itself, for want of a download."""

from swarmnode.registry import Parts

PARTS: Parts = {"model": {"tiny": "swarmnode.extensions.demonstration.tiny:build_tiny"}}
