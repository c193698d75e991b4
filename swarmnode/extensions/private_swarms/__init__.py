"""Private swarms: the key of a swarm, its record, and sealed streams between its members."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "admission": {"key": "swarmnode.extensions.private_swarms.private_admission:PrivateAdmission"},
    "command": {"swarm": "swarmnode.extensions.private_swarms.swarm_commands:app"},
}
