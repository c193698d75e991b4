"""The story of a node is in a file, and `swarmnode logs` prints it."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import StorageError
from swarmnode.extensions.results import logs_command as module
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.showing.screen import LOG_FILE, Screen
from tests.shown_page import STATUS

log = logging.getLogger("swarmnode.tests")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    """Writes lines as a node does, or without a text a round."""

    def written(*lines: str, level: int = logging.INFO) -> None:
        with Screen(resolve_paths(tmp_path).logs / LOG_FILE, terminal=False) as screen:
            for line in lines:
                log.log(level, line)
            if not lines:
                screen.start_watcher().see("round", STATUS)

    return written


def run(home: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["logs", "--home", str(home), *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_newest_entries_are_printed_with_date_and_level(
    write: Callable[..., None], tmp_path: Path
) -> None:
    write(*(f"step {number}" for number in range(9)))
    write()
    first, last = run(tmp_path, "-n", "2").splitlines()
    assert first.endswith("INFO swarmnode.tests: step 8") and first.startswith("20")
    assert len(run(tmp_path, "-n", "0").splitlines()) == 10
    assert "INFO swarmnode.rounds: round 12" in last, "rounds are part of the story"


def test_errors_alone_come_with_their_tracebacks(write: Callable[..., None], tmp_path: Path) -> None:
    write("all is well")
    with Screen(resolve_paths(tmp_path).logs / LOG_FILE, terminal=False):
        try:
            raise ValueError("no such thing")
        except ValueError:
            log.exception("a request failed")
    write("it goes on")
    found = json.loads(run(tmp_path, "--errors", "--json"))
    (entry,) = found
    assert (entry["level"], entry["logger"]) == ("ERROR", "swarmnode.tests")
    assert entry["message"].startswith("a request failed\n    Traceback")
    assert "ValueError: no such thing" in entry["message"]


def test_what_was_put_aside_is_printed_before_and_a_steering_text_steers_nothing(tmp_path: Path) -> None:
    folder = resolve_paths(tmp_path).logs
    folder.mkdir(parents=True)
    (folder / "node.log.1").write_text("12:00:00 INFO swarmnode.x: of an earlier version\n")
    (folder / LOG_FILE).write_bytes(b"12:00:01 INFO swarmnode.x: \x1b[2Jhere\xff\nhalf a li")
    assert run(tmp_path).splitlines() == [
        "12:00:00 INFO swarmnode.x: of an earlier version",
        "12:00:01 INFO swarmnode.x: \\x1b[2Jhere\ufffd",
    ]


def test_without_a_log_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no log"):
        run(tmp_path)


def test_following_prints_what_is_written_next_and_goes_on_in_another_or_an_emptied_file(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve_paths(tmp_path).logs / LOG_FILE
    write("before")

    class Steps:
        """Time that writes instead of passing, and ends."""

        def __init__(self) -> None:
            self.left: list[Callable[[], object]] = [
                lambda: write("then"),
                lambda: (
                    write("last in it"),
                    path.rename(path.with_name("node.log.1")),
                    write("in another file"),
                ),
                lambda: (path.write_bytes(b""), write("short")),
            ]

        def sleep(self, seconds: float) -> None:
            if not self.left:
                raise KeyboardInterrupt
            self.left.pop(0)()

    monkeypatch.setattr(module, "time", Steps())
    result = CliRunner().invoke(app, ["logs", "-f", "-n", "1", "--json", "--home", str(tmp_path)])
    said = [json.loads(line)["message"] for line in result.stdout.splitlines()]
    assert said == ["before", "then", "last in it", "in another file", "short"]
