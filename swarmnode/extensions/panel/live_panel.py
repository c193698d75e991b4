"""The one live table of a process on a terminal: the panel of its first policy.

node.py of each policy -> [LivePanel] -> node_panel.py -> rich

The command with which others join stands above it once, outside any frame and in one piece, so that a
terminal copies it as one line.
"""

import logging
import time
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from swarmnode.extensions.panel.node_panel import NodePanel
from swarmnode.node.showing.board import Occasion, policy_label, round_line
from swarmnode.node.showing.node_status import NodeStatus, invitation, joins_from
from swarmnode.node.showing.screen import LiveHandler, TerminalPanel

LOG_LINES = 6
HISTORY_ROUNDS = 60


class LivePanel(LiveHandler):
    """A `Watcher` of all policies of a process: draws the first in place, with the latest log lines below.
    Rounds of the others are such lines.

    A terminal that becomes narrower folds the lines that it shows, so an old frame then takes more of them
    than were drawn, and going up by those leaves the rest behind. So at another size everything is wiped.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._rewards: deque[float] = deque(maxlen=HISTORY_ROUNDS)
        self._console = console
        self._begin()

    def _begin(self) -> None:
        self._size, self._command = self._console.size, ""
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(f"{policy_label.get()}{record.getMessage()}")

    def _tell(self, line: str) -> None:
        self._lines.append(f"{time.strftime('%H:%M:%S')} {line}")

    def see(self, event: Occasion, status: NodeStatus) -> None:
        if status.policy:
            if event == "round":
                self._tell(f"policy {status.policy}: {round_line(status)}")
            return
        if event == "round" and status.reward.own is not None:
            self._rewards.append(status.reward.own)
        self._draw(status)

    def _draw(self, status: NodeStatus) -> None:
        if self._console.size != self._size:
            self._live.stop()
            self._console.clear()
            self._begin()
        self._command = print_invitation(self._console, status, self._command)
        height = room_below(self._console, self._command)
        panel = NodePanel(status, tuple(self._rewards), tuple(self._lines), time.time(), height)
        # An empty line below: what a terminal echoes there (^C) must not fold, which would move the panel.
        self._live.update(Group(panel, Text()), refresh=True)

    def close(self) -> None:
        """Lets go of the terminal; the last picture stays."""
        self._live.stop()
        super().close()


def print_invitation(console: Console, status: NodeStatus, printed: str) -> str:
    """The command with which another machine joins, above the panel and in one piece, unless it is the one
    `printed` last. Returns what stands there now."""
    command = invitation(status)
    if command is None or command == printed:
        return printed
    console.print(Text(f"{joins_from(status)} joins with:", style="dim"))
    # Soft: the terminal folds the line, and so knows that it is one.
    console.print(Text(command), soft_wrap=True)
    return command


def room_below(console: Console, command: str) -> int:
    """Lines of the terminal that are left for a panel below the command, and the cursor below the panel."""
    above = -(-len(command) // console.width)
    return console.height - above - 1


def _picture(status: NodeStatus) -> NodePanel:
    return NodePanel(status, (), (), time.time())


PANEL = TerminalPanel(live=lambda: LivePanel(Console(stderr=True)), picture=_picture)
