"""Results of a run: its log, a report, its adapter or the merged model, and the way to a hub."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {
        "export": "swarmnode.extensions.results.export_command:export",
        "logs": "swarmnode.extensions.results.logs_command:logs",
        "report": "swarmnode.extensions.results.report_command:report",
        "pull": "swarmnode.extensions.results.pull_command:pull",
    },
}
