"""HumanEval's tests, run where a program can do no harm.

formats.py -> [pass_tests] -> tasks/code_tests.py -> tasks/sandbox.py

Every answer is a stranger's program, for a model wrote it: without the sandbox nothing is run, and a suite of
programs is refused before a model is loaded for it.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from swarmnode.errors import TaskError
from swarmnode.tasks.suites.rows import Columns

RUNNER = "swarmnode.tasks.code_tests"


def pass_tests(columns: Columns, completions: Sequence[str]) -> list[float | None]:
    """1.0 for a program that passes every test of the row, 0.0 for one that does not. None: there is no test.
    Raises TaskError where this version has no sandbox, SandboxError where this machine has none."""
    if find_spec(RUNNER) is None:
        raise TaskError(
            "answers to HumanEval are programs, and this version of swarmnode has no sandbox to run them in",
            hint="measure on the other suites",
        )
    runner: Any = import_module(RUNNER)
    count = len(completions)
    shares: list[float | None] = runner.passes_tests(
        [columns["prompt"]] * count,
        list(completions),
        test=[columns["test"]] * count,
        entry_point=[columns["entry_point"]] * count,
    )
    return [None if share is None else float(share == 1.0) for share in shares]
