"""The panel of a local swarm, on a terminal of the usual size and while nodes come to life."""

import json
import threading
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from swarmnode.node.showing.swarm_panel import SwarmPanel, render_swarm
from swarmnode.node.showing.swarm_story import NodeStory
from tests.unit.node.commands.test_local_swarm import EVENTS

FIRST = {
    "rev": 0.0,
    "sort": 0.02,
    "next": 0.6,
    "bitop": 0.4,
    "max": 0.27,
    "pop": 0.16,
    "bin": 0.03,
    "gcd": 0.11,
}
LAST = {
    "rev": 0.75,
    "sort": 0.7,
    "next": 0.9,
    "bitop": 0.9,
    "max": 0.97,
    "pop": 0.84,
    "bin": 0.36,
    "gcd": 0.34,
}
BUSY = NodeStory(
    round=60,
    rewards=tuple(number / 60 for number in range(60)),
    tasks_first=FIRST,
    tasks_last=LAST,
    held_out=0.74,
    replayed_from_others=1518,
    agreement=0.03,
    agreement_error=0.02,
)


def drawn(stories: dict[str, NodeStory], lines: tuple[str, ...] = (), width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=StringIO())
    console.print(render_swarm("a swarm of 3, 60 rounds", stories, lines))
    return console.export_text().splitlines()


def test_three_busy_nodes_and_their_story_fit_into_80_by_24() -> None:
    names = ("proud-olive-alpaca", "eager-mossy-antelope", "warm-ruby-gazelle")
    lines = drawn(
        dict.fromkeys(names, BUSY), ("a line of a node that is much longer than the terminal " * 3,) * 6
    )
    assert max(map(len, lines)) <= 80 and len(lines) <= 23
    text = "\n".join(lines)
    assert all(word in text for word in ("alpaca", "next, bitop", "0.74", "1518 (+0.03)"))
    assert all(f"{task} {LAST[task]:.2f}" in text for task in ("rev", "sort", "max", "pop", "bin"))


def test_a_node_that_has_done_nothing_yet_has_no_numbers() -> None:
    (row,) = [line for line in drawn({"calm-blue-otter": NodeStory()}) if "otter" in line]
    assert row.strip("│ ").split() == ["otter", "-", "0", "-", "0"], "and no curve"


def test_what_a_node_says_is_text_and_moves_no_cursor() -> None:
    assert not any("\x1b" in line for line in drawn({}, ("red \x1b[31malert [bold]",)))


def test_lines_pass_below_the_nodes_while_they_run_and_are_printed_otherwise(tmp_path: Path) -> None:
    console = Console(width=80, height=24, file=StringIO(), force_terminal=True, color_system=None)
    metrics = tmp_path / "metrics.jsonl"
    panel = SwarmPanel(console)
    panel.say("building policies")
    with panel.watch("a swarm of 1", {"calm-blue-otter": metrics}):
        metrics.write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
        panel.say("round 1")
    panel.say("otter knew rev")
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert text.index("building policies") < text.index("a swarm of 1") < text.index("otter knew rev")
    assert "next 0.80" in text, "the last picture has the last numbers"
    assert not any(thread.name == "swarm-panel" for thread in threading.enumerate())


def test_the_picture_ends_with_the_nodes_whatever_ends_them(tmp_path: Path) -> None:
    panel = SwarmPanel(Console(file=StringIO()))
    with pytest.raises(KeyboardInterrupt), panel.watch("a swarm", {"otter": tmp_path / "none"}):
        raise KeyboardInterrupt
    assert not any(thread.name == "swarm-panel" for thread in threading.enumerate())
