"""Digests of functions are equal wherever the function lies."""

from pathlib import Path

from swarmnode.extensions.suites import code_tests
from swarmnode.tasks.digests import source_of


def test_a_function_that_reads_a_file_beside_it_is_one_in_every_folder() -> None:
    text = source_of(code_tests.passes_tests)
    assert "code_tests._source" in text and str(Path(code_tests.__file__).parent) not in text
