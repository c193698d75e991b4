"""Programs of others, run with no way out: what a policy writes as code is executed here and nowhere else."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "check": {"sandbox": "swarmnode.extensions.sandbox.sandbox_check:sandbox_findings"},
}
