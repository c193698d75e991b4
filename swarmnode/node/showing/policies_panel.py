"""The picture of several policies on one base: a row for each, and one story below.

NodeStatus of each policy -> [render_policies] -> live_panel.py
"""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from swarmnode.node.showing.board import shown
from swarmnode.node.showing.node_status import NodeStatus, invitation, printable_status, swarm_of
from swarmnode.node.showing.panel import age
from swarmnode.node.showing.panel_layout import fit_columns, fit_rows
from swarmnode.printable import printable

COLUMNS: tuple[str, ...] = ("name", "doing", "round", "reward", "held out", "trained on", "tokens/s", "peers")
FIRST_TO_GO = ("trained on", "name", "peers", "held out", "tokens/s", "doing")
"""Columns that a narrow terminal does without, in this order."""
PADDING = 2
"""Empty columns beside each cell."""
FRAME = 4
"""Columns that the border and its padding take."""
NUMBER = 4
"""Columns of the policies' numbers."""


def render_policies(
    statuses: Mapping[int, NodeStatus],
    lines: Sequence[str],
    now: float,
    width: int | None = None,
    height: int | None = None,
) -> RenderableType:
    """All policies for one moment, in the order of their numbers. On a terminal that is too small the columns
    and lines that matter least are left out."""
    statuses = {number: printable_status(status) for number, status in statuses.items()}
    cells = {number: dict(zip(COLUMNS, _cells(statuses[number], now), strict=True)) for number in statuses}
    widths = {
        column: PADDING + max(len(column), *(len(row[column]) for row in cells.values()))
        for column in COLUMNS
    }
    columns = COLUMNS if width is None else fit_columns(widths, FIRST_TO_GO, width - FRAME - NUMBER)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in ("", *columns):
        table.add_column(column, no_wrap=True)
    for number in sorted(cells):
        # Names and phases are text: what looks like markup in them is not ours.
        table.add_row(*map(Text, (str(number), *(cells[number][column] for column in columns))))
    first = statuses[min(statuses)]
    title = f"{len(statuses)} policies on {first.model}, swarm {swarm_of(first)}"
    joining = Text(f"join us  {invitation(first) or '-'}", overflow="fold")
    joins = 1 if width is None else -(-len(joining) // max(width - FRAME, 1))
    rows = {"table": len(cells) + 1, "join us": joins}
    layout = fit_rows(rows, ["join us"], len(lines), height)
    told = lines[len(lines) - layout.story :]
    story = [Text(printable(line), style="dim", overflow="ellipsis", no_wrap=True) for line in told]
    parts = [table, Text(), *([joining] if "join us" in layout.rows else []), *story]
    return Panel(
        Group(*parts),
        title=Text(title),
        subtitle=Text(first.page) if first.page else None,
        border_style=_colour(statuses.values()),
    )


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
