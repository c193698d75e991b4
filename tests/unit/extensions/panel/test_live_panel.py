"""The panel in its place on a terminal, and the command that others join with."""

import logging
import re
from io import StringIO

from msgspec.structs import replace
from rich.console import ConsoleDimensions

from swarmnode.extensions.panel.live_panel import LivePanel
from swarmnode.node.showing.board import RoundLines
from swarmnode.node.showing.node_status import Network
from swarmnode.node.showing.screen import Screen
from tests.unit.extensions.panel.test_node_panel import ADDRESS, BUSY, terminal


def test_the_command_to_join_is_printed_once_in_one_piece_outside_the_frame() -> None:
    console = terminal(80, 24)
    panel = LivePanel(console)
    for _ in range(3):
        panel.see("tick", BUSY)
    panel.close()
    assert isinstance(console.file, StringIO)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in console.file.getvalue().splitlines()]
    command = f"swarmnode join {ADDRESS}"
    assert len(command) > 80
    assert [line.strip("\r") for line in lines].count(command) == 1


def test_a_terminal_of_another_size_is_wiped_and_everything_drawn_anew() -> None:
    """It has folded the lines of the frame before, so going up by as many as were drawn leaves a rest."""
    console = terminal(100, 30)
    panel = LivePanel(console)
    panel.see("tick", BUSY)
    assert isinstance(console.file, StringIO)
    console.size = ConsoleDimensions(60, 20)
    before = console.file.tell()
    panel.see("tick", BUSY)
    panel.see("tick", BUSY)
    panel.close()
    written = console.file.getvalue()[before:]
    assert written.count("\x1b[2J\x1b[H") == 1, "wiped once, and not for each frame"
    after = written.partition("\x1b[2J\x1b[H")[2]
    command, frame, _rest = after.partition("╭")
    assert f"swarmnode join {ADDRESS}" in command and frame
    assert "\x1b[1A" not in command, "nothing is left to go up to"


def test_nobody_is_told_to_join_a_node_that_cannot_be_reached() -> None:
    console = terminal(80, 24)
    panel = LivePanel(console)
    panel.see("tick", replace(BUSY, network=Network("starting", 1000.0)))
    panel.close()
    assert isinstance(console.file, StringIO) and "another machine" not in console.file.getvalue()


def test_the_panel_is_of_the_first_policy_and_tells_the_rounds_of_the_others() -> None:
    console = terminal(80, 24)
    panel = LivePanel(console)
    first = replace(BUSY, policies=2)
    panel.see("tick", first)
    elsewhere = Network("up", 1000.0, 0, "", 1, ("/ip4/1.2.3.4/tcp/1",))
    panel.see("round", replace(first, policy=1, network=elsewhere))
    panel.see("tick", first)
    panel.close()
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().count("another machine on this LAN joins with:") == 1
    assert "policy 1: round" in console.file.getvalue()


def test_what_a_terminal_echoes_below_the_panel_does_not_fold() -> None:
    console = terminal(80, 24)
    panel = LivePanel(console)
    panel.see("tick", BUSY)
    assert isinstance(console.file, StringIO)
    frame = console.file.getvalue()
    panel.close()
    # ^C at the end of a line as wide as the terminal would begin another, and move the panel by one.
    assert not frame.rpartition("\n")[2].strip()


def test_rounds_are_in_the_log_and_not_among_the_lines_of_a_panel() -> None:
    with Screen(terminal=True) as screen:
        panel = screen.start_watcher()
        shown = [one for one in logging.getLogger("swarmnode").handlers if isinstance(one, LivePanel)]
        record = logging.LogRecord(RoundLines.logger.name, logging.INFO, "", 0, "round 1", None, None)
        assert shown and not any(one.filter(record) for one in shown)
        panel.close()
