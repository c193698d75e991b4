"""The contribution of a machine: hours, energy and groups by day, and thanks, kept over restarts."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "contribution": {"days": "swarmnode.extensions.contribution.contribution_days:open_days"},
    "receipts": {"signed": "swarmnode.extensions.contribution.receipts:Receipts"},
}
