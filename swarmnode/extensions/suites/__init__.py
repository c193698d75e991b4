"""Evaluations by command: of held-out questions, and of standard files that everybody asks alike."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "command": {"eval": "swarmnode.extensions.suites.eval_command:evaluate"},
    "reward": {"passes_tests": "swarmnode.extensions.suites.code_tests:passes_tests"},
}
