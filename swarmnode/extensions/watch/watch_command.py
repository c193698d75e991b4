"""`swarmnode watch A B C`: several machines on one screen.

command line -> [watch] -> watched_machine.py, a thread each -> [table], drawn again every second
"""

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarmnode.cli.output import Json, tell
from swarmnode.errors import ConfigError
from swarmnode.extensions.watch.watched_machine import Seen, WatchedMachine, watched
from swarmnode.node.building.page_client import ANSWER_S
from swarmnode.node.showing.figures import age, figure
from swarmnode.node.showing.node_status import NodeStatus, printable_status
from swarmnode.printable import printable

MOST_MACHINES = 64
DRAW_EVERY_S = 1.0
LONGEST_CELL = 300
COLUMNS = ("machine", "node", "doing", "round", "own", "held\nout", "tokens\n/s", "peers", "this week")
NUMBERS = ("round", "own", "held\nout", "tokens\n/s", "peers")
UNBROKEN = ("node", *NUMBERS)
"""Columns that keep their width where there is little."""


def watch(
    machines: Annotated[
        list[str], typer.Argument(help="Homes of nodes here, and addresses of pages elsewhere (HOST:PORT).")
    ],
    every: Annotated[float, typer.Option("--every", min=0.5, max=3600, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end; as --json does.")] = False,
    password: Annotated[
        str,
        typer.Option(
            "--password",
            envvar="SWARMNODE_WATCH_PASSWORD",
            help="Password of all pages elsewhere; others here could read it on the command line.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Show several machines on one screen: what each does and learns, and which does not answer."""
    if len(machines) > MOST_MACHINES:
        raise ConfigError(f"{len(machines)} machines are too many", hint=f"at most {MOST_MACHINES}")
    found = [watched(text, password, every) for text in machines]
    for machine in found:
        machine.start()
    try:
        _show(found, Console(), once, json)
    except KeyboardInterrupt:
        pass
    finally:
        for machine in found:
            machine.end()


def _show(machines: Sequence[WatchedMachine], console: Console, once: bool, json: bool) -> None:
    if once or json or not console.is_terminal:
        until = time.monotonic() + ANSWER_S
        for machine in machines:
            machine.asked.wait(max(0.0, until - time.monotonic()))
        tell(json, {machine.name: machine.seen for machine in machines}, [_table_of(machines)])
        if not any(machine.seen.statuses for machine in machines):
            raise typer.Exit(1)
        return
    with Live(_table_of(machines), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(DRAW_EVERY_S)
            live.update(_table_of(machines), refresh=True)


def _table_of(machines: Sequence[WatchedMachine]) -> RenderableType:
    return table([(machine.name, machine.seen) for machine in machines], time.time())


def table(machines: Sequence[tuple[str, Seen]], now: float) -> RenderableType:
    """Returns the picture of several machines at a moment, and below it what is wrong with which; a pure
    function, as `render` of a panel is."""
    made = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in COLUMNS:
        made.add_column(
            name, justify="right" if name in NUMBERS else "left", no_wrap=name in UNBROKEN, overflow="fold"
        )
    wrong: list[Text] = []
    for name, seen in machines:
        since = "" if seen.at is None else f" (heard {age(now - seen.at)} ago)"
        problem = f"{seen.problem}{since}" if seen.problem else ""
        statuses = [printable_status(status) for status in seen.statuses]
        for status in statuses:
            # Whatever looks like markup in a name or a reason is text.
            made.add_row(*map(_text, (name, *_cells(status, now))), style="dim" if problem else "")
        if not statuses:
            made.add_row(_text(name), _text("" if problem else "asking"))
        remarks = [problem, *map(_remark, statuses)]
        wrong += [_text(f"{name}: {remark}", "yellow") for remark in dict.fromkeys(remarks) if remark]
    return Group(made, *wrong)


def _cells(status: NodeStatus, now: float) -> tuple[str, ...]:
    progress, reward, week = status.progress, status.reward, status.week
    limit = "" if progress.rounds_limit is None else f"/{progress.rounds_limit}"
    energy = "" if week.kwh is None else f", {week.kwh:.1f} kWh"
    return (
        status.name,
        f"{status.phase.name} {age(now - status.phase.since)}",
        f"{progress.round}{limit}",
        figure(reward.own),
        figure(reward.eval_last if reward.eval_last is not None else reward.eval_first),
        figure(status.speed.tokens_per_s, ".0f"),
        str(status.network.peers),
        "" if week.hours is None else f"{week.hours:.1f} h{energy}",
    )


def _remark(status: NodeStatus) -> str:
    """Returns what is wrong with a node, in its own words."""
    alone = status.network.reach.text if status.network.reach.verdict == "nobody" else ""
    return status.checkpoint.error or status.exchange.starved or status.advice or alone


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text, max_chars=LONGEST_CELL), style=style)
