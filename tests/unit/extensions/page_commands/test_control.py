"""Commands that ask the running node for something."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.app import app
from swarmnode.errors import ConfigError, SwarmnodeError
from swarmnode.extensions.page_commands.control import seconds_of
from swarmnode.machine.storage import resolve_paths
from swarmnode.node.building.node_process import RunningNode, write_running
from swarmnode.node.run_control import REQUESTS, RunControl
from tests.shown_page import STATUS, shown_page

PASSWORD = "correct horse"


@pytest.fixture
def control(tmp_path: Path) -> Iterator[RunControl]:
    """That of a node whose page has a password and listens on all addresses."""
    control = RunControl(lambda: None)
    node = {"http": "0.0.0.0", "http_password": PASSWORD}
    with shown_page(lambda: STATUS, control=control, node=node) as page:
        note = RunningNode(os.getpid(), STATUS.peer_id, "0.0.0.0", page.port, (), page.token)
        write_running(resolve_paths(tmp_path).running, note)
        yield control


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_each_request_reaches_the_node_and_what_follows_is_said(control: RunControl, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path))
    assert "pausing after this round" in run("pause", "2h", *home)
    assert control.paused and " on 20" in control.until
    assert "resuming" in run("resume", *home) and not control.paused
    assert "stopping after this round" in run("finish", *home) and control.ending
    assert "stopping now" in run("stop", *home)


def test_the_status_of_a_node_with_a_password_is_read_by_its_own_machine(
    control: RunControl, tmp_path: Path
) -> None:
    assert STATUS.name in run("status", "--json", "--home", str(tmp_path))
    assert resolve_paths(tmp_path).running.stat().st_mode & 0o077 == 0, "its secret is nobody else's"


def test_a_node_that_cannot_follow_says_what_it_takes(control: RunControl, tmp_path: Path) -> None:
    control.takes = ("stop",)
    with pytest.raises(SwarmnodeError, match="the node refused: this node takes stop, not pause"):
        run("pause", "--home", str(tmp_path))


def test_without_a_node_each_command_says_so(tmp_path: Path) -> None:
    for request in REQUESTS:
        with pytest.raises(SwarmnodeError, match="no node is running here"):
            run(request, "--home", str(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "2", "h", "-1h", "2 h", "1e3s", "2w", "\u0662h", "0s", "367d", "9" * 400 + "h"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        seconds_of(text)
