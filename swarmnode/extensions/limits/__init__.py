"""The machine stays yours: a node that gives way to whoever else needs it."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "guard": {"limits": "swarmnode.extensions.limits.machine_guard:guard_machine"},
    "command": {"service": "swarmnode.extensions.limits.service_command:app"},
}
