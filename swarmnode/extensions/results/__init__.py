"""The results of a run: a report to hand on, and the way to a hub and back."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {
        "report": "swarmnode.extensions.results.report_command:report",
        "pull": "swarmnode.extensions.results.pull_command:pull",
    },
    "push": {"hub": "swarmnode.extensions.results.hub:pusher"},
}
