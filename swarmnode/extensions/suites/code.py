"""HumanEval's tests, run where a program can do no harm.

formats.py -> [pass_tests] -> extensions/suites/code_tests.py -> extensions/sandbox/sandbox.py

Every answer is a stranger's program, for a model wrote it: without the sandbox nothing is run, and a suite of
programs is refused before a model is loaded for it.
"""

from collections.abc import Sequence

from swarmnode.extensions.suites.code_tests import passes_tests
from swarmnode.extensions.suites.suite_rows import Columns


def pass_tests(columns: Columns, completions: Sequence[str]) -> list[float | None]:
    """Returns 1.0 for a program that passes every test of the row, else 0.0. None: there is no test. Raises
    SandboxError if this machine has no sandbox."""
    count = len(completions)
    shares = passes_tests(
        [columns["prompt"]] * count,
        list(completions),
        test=[columns["test"]] * count,
        entry_point=[columns["entry_point"]] * count,
    )
    return [None if share is None else float(share == 1.0) for share in shares]
