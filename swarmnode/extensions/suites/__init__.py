"""Standard evaluations: files of questions that are asked as everybody asks them, and never trained on."""

from swarmnode.registry import Parts

PARTS: Parts = {
    "evaluation": {"suites": "swarmnode.extensions.suites.suite_evaluation:evaluate_suites"},
    "reward": {"passes_tests": "swarmnode.extensions.suites.code_tests:passes_tests"},
}
