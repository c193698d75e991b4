"""Settings for people: `swarmnode config`."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {"config": "swarmnode.extensions.settings_help.config_commands:app"},
}
