"""Each measure of benchmarks/house.py finds what it is there to find."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.house_counts import (
    code_lines,
    count_words,
    file_names_twice,
    files_by_folder,
    imports_of,
    lonely_tests,
    own_late_imports,
    riddles,
)

Write = Callable[[dict[str, str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a function that writes files, by path, and returns the folder `house` among them."""

    def written(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "house"

    return written


def test_comments_docstrings_and_blank_lines_are_no_code(write: Write) -> None:
    text = '"""What it is."""\n\n# why\nLIMIT = 3\n"""Most\nof them."""\n\n\ndef f():\n    """Docs."""\n'
    text += '    return """\ntext\n"""\n'
    folder = write({"house/a.py": text})
    assert code_lines(folder / "a.py") == 5


def test_a_file_name_in_two_folders_is_found_and_that_of_packages_is_not(write: Write) -> None:
    names = ("a/__init__.py", "b/__init__.py", "a/run.py", "b/run.py", "b/seed.py")
    folder = write({f"house/{name}": "" for name in names})
    assert file_names_twice(folder) == {"run.py": ["a/run.py", "b/run.py"]}
    assert files_by_folder(folder) == {"house/b": 2, "house/a": 1}


def test_a_test_stands_beside_its_module_and_may_name_one_topic_of_it(write: Write) -> None:
    folder = write({"house/a/run.py": "", "house/run_away.py": ""})
    tests = ("a/test_run.py", "a/test_run_twice.py", "test_run_away_far.py", "test_run.py", "a/test_walk.py")
    write({f"tests/{name}": "" for name in tests})
    assert lonely_tests(folder.parent / "tests", folder) == ["a/test_walk.py", "test_run.py"]


def test_imports_of_a_package_are_found_wherever_they_stand_outside_of_it(write: Write) -> None:
    folder = write(
        {
            "house/a.py": "from house.extensions import b\n",
            "house/c.py": "def f():\n    import house.extensions.b\n",
            "house/d.py": "from house.extensions_of_mine import b\n",
            "house/extensions/b.py": "import house.extensions.c\n",
        }
    )
    found = imports_of(folder, "house.extensions", folder / "extensions")
    assert [line.rpartition(": ")[0] for line in found] == ["house/a.py:1", "house/a.py:1", "house/c.py:2"]


def test_an_import_in_a_function_is_late_where_it_is_of_ours_and_not_for_the_type_checker(
    write: Write,
) -> None:
    text = "if TYPE_CHECKING:\n    def g():\n        import house.b\n"
    text += "def f():\n    import torch\n    from house import b\n"
    assert own_late_imports(write({"house/a.py": text})) == ["house/a.py:6: house"]


def test_a_docstring_that_leaves_its_reader_to_guess_is_found_wherever_it_stands(write: Write) -> None:
    text = '''"""Whether it is."""

LIMIT = 3
"""How many there may be."""


class Seat:
    """A member's position."""

    number: int = 0
    """Those before it."""

    def held(self):
        """What holds it."""
        "What stands below no name."
'''
    found = riddles(write({"house/a.py": text}))
    assert sorted(found) == sorted(
        f"house/a.py:{line}"
        for line in (
            "1: Whether it is.",
            "4: How many there may be.",
            "11: Those before it.",
            "14: What holds it.",
        )
    )


def test_words_of_a_page_are_those_of_its_code_blocks_too() -> None:
    assert count_words("# Two words\n\n```\nmake join\n```\n") == 7


def test_the_repository_is_counted_by_the_file_that_claims_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[1] / "benchmarks")])
    house = importlib.import_module("benchmarks.house")
    claims, material = house.counted()
    assert set(claims) == set(house.GOALS)
    assert claims["riddles"] == len(material["riddles"])
    assert claims["file_names_twice"] == 0
