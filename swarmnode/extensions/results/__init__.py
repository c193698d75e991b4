"""The results of a run: its adapter or the merged model, a report to hand on, the way to a hub and back."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {
        "export": "swarmnode.extensions.results.export_command:export",
        "report": "swarmnode.extensions.results.report_command:report",
        "pull": "swarmnode.extensions.results.pull_command:pull",
    },
}
