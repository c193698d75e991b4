"""The runs and the key of a home, looked after while no node runs."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {
        "runs": "swarmnode.extensions.home.runs_command:app",
        "identity": "swarmnode.extensions.home.identity_command:app",
    }
}
