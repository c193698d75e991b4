"""With --json a command prints one JSON document on stdout, whatever becomes of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(*arguments: str) -> tuple[int, Any, str]:
    """Returns the exit code, stdout as JSON, and stderr."""
    command = [sys.executable, "-m", "swarmnode", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("status",), 1, "no node is running here"),
        (("pause", "never"), 2, "'never' is not a duration"),
        (("runs", "remove", "gone"), 9, "no run gone in this home"),
        (("eval", "--samples", "many"), 2, "Invalid value for '--samples'"),
        (("status", "--colour"), 2, "No such option: --colour"),
        (("runs", "remove"), 2, "Missing argument 'name'"),
    ],
)
def test_an_error_is_a_document_too(
    arguments: tuple[str, ...], code: int, error: str, tmp_path: Path
) -> None:
    found, told, elsewhere = run(*arguments, "--json", "--home", str(tmp_path))
    assert (found, told["exit_code"], elsewhere) == (code, code, "")
    assert error in told["error"]


def test_what_went_well_is_one_document(tmp_path: Path) -> None:
    where = ("--json", "--home", str(tmp_path))
    code, key, _ = run("identity", "show", *where)
    assert code == 0 and Path(key["path"]).is_file()
    _, founded, warned = run("swarm", "create", "friends", "--private", *where)
    assert founded["invitation"].startswith("sn1:") and "give it only to those you invite" in warned
    _, changed, _ = run("swarm", "publishers", key["peer_id"], *where)
    assert changed == {
        "swarm": "friends", "members": [key["peer_id"]], "publishers": [key["peer_id"]], "removed": [],
    }  # fmt: skip
