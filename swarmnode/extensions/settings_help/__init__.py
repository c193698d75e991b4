"""Settings for people: `swarmnode config`, the page of them all, and advice on names that are none."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {"config": "swarmnode.extensions.settings_help.config_commands:app"},
    "advice": {"other_names": "swarmnode.extensions.settings_help.other_names:advice"},
}
