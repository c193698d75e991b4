"""The live panel of several policies on one base: a row for each, and one story below.

node.py of each policy -> [PoliciesPanel] -> rich
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarmnode.node.monitors import policy_label, shown
from swarmnode.node.panel import LOG_LINES, age
from swarmnode.node.status import NodeStatus, invitation


class PoliciesPanel(logging.Handler):
    """Draws in place what all policies do. `monitor(k)` is what policy k is told to report to."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._statuses: dict[int, NodeStatus] = {}
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def monitor(self, number: int) -> "PolicyMonitor":
        return PolicyMonitor(self, number)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{time.strftime('%H:%M:%S')} {policy_label.get()}{record.getMessage()}")

    def show(self, number: int, status: NodeStatus) -> None:
        self._statuses[number] = status
        self._live.update(render_policies(self._statuses, tuple(self._lines), time.time()), refresh=True)

    def close(self) -> None:
        self._live.stop()
        super().close()


class PolicyMonitor:
    """A `Monitor` for one row of the panel."""

    def __init__(self, panel: PoliciesPanel, number: int) -> None:
        self._panel = panel
        self._number = number

    def round_done(self, status: NodeStatus) -> None:
        self._panel.show(self._number, status)

    def evaluated(self, status: NodeStatus) -> None:
        self._panel.show(self._number, status)

    def tick(self, status: NodeStatus) -> None:
        self._panel.show(self._number, status)

    def close(self) -> None:
        self._panel.close()


def render_policies(statuses: Mapping[int, NodeStatus], lines: Sequence[str], now: float) -> RenderableType:
    """All policies for one moment, in the order of their numbers."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in ("", "name", "doing", "round", "reward", "held out", "trained on", "tokens/s", "peers"):
        table.add_column(column, no_wrap=True)
    for number in sorted(statuses):
        # Names and phases are text: what looks like markup in them is not ours.
        table.add_row(*map(Text, (str(number), *_cells(statuses[number], now))))
    first = statuses[min(statuses)]
    title = f"{len(statuses)} policies on {first.model}, swarm {first.swarm}"
    told = [Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in lines]
    joining = Text(f"join us  {invitation(first) or '-'}", overflow="fold")
    return Panel(Group(table, Text(), joining, *told), title=title, border_style=_colour(statuses.values()))


def _cells(status: NodeStatus, now: float) -> tuple[str, ...]:
    progress, reward, training = status.progress, status.reward, status.training
    limit = "" if progress.rounds_limit is None else f"/{progress.rounds_limit}"
    return (
        status.name,
        f"{status.phase.name} for {age(now - status.phase.since)}",
        f"{progress.round}{limit}",
        shown(reward.own),
        shown(reward.eval_last),
        f"{training.own_groups} own + {training.external_groups} external",
        shown(status.speed.tokens_per_s, ".0f"),
        str(status.network.peers),
    )


def _colour(statuses: Iterable[NodeStatus]) -> str:
    states = {"red" if one.checkpoint.error else one.network.state for one in statuses}
    return "red" if "red" in states else "yellow" if "restarting" in states else "green"
