"""What stands in examples/ runs as it stands, in a home of its own, and stays short."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode.storage import resolve_paths

FOLDER = Path(__file__).parent.parent / "examples"
MOST_LINES = 20
"""What a user has to write: lines of code, without docstrings, comments and empty ones."""

QUICKLY = {"SWARMNODE_TASKS__EVAL_EXAMPLES": "4", "SWARMNODE_NETWORK__MDNS": "false"}


def lines_of_code(source: str) -> int:
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docs = {node.lineno for node in texts if isinstance(node.value, ast.Constant)}
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in docs for number, line in lines)


def test_docstrings_comments_and_empty_lines_are_no_code() -> None:
    assert lines_of_code('"""Doc."""\n\n# why\nx = 1  # so\n') == 1


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_and_is_short(path: Path, tiny_model: Path, tmp_path: Path) -> None:
    source = path.read_text()
    assert lines_of_code(source) <= MOST_LINES
    models = resolve_paths(tmp_path, {}).models
    models.parent.mkdir(parents=True)
    models.symlink_to(tiny_model.parent)
    quick = tmp_path / path.name
    quick.write_text(re.sub(r"rounds=\d+", "rounds=2", source))
    environment = {**os.environ, **QUICKLY, "SWARMNODE_HOME": str(tmp_path)}
    command = [sys.executable, str(quick)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
