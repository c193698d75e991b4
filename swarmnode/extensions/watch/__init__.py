"""Several machines on one screen."""

from swarmnode.registry import Parts

PARTS: Parts = {"command": {"watch": "swarmnode.extensions.watch.watch_command:watch"}}
