"""The picture of one node: what it does, learns, hears, drops and waits for.

node_status.py -> [NodePanel] -> live_panel.py -> `swarmnode join`, `swarmnode status`

It is made of a status and nothing else, so a picture of it is a real one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swarmnode.exchange.drop_reasons import Reason, in_words
from swarmnode.exchange.exchange_stats import HealthStats, HelpStats, NodesOf, ReceiptStats
from swarmnode.network.reach import Reach
from swarmnode.node.showing.figures import age, figure, sparkline
from swarmnode.node.showing.node_status import (
    LibraryStatus,
    NodeStatus,
    PipelineStatus,
    Rewards,
    Sharing,
    invitation,
    joins_from,
    printable_status,
    swarm_of,
)
from swarmnode.printable import printable
from swarmnode.training.records import TrainReport

FIRST_TO_GO = (
    "kept back", "dropped", "saved", "trained on", "exchange", "held out", "rollouts", "pipeline",
    "policy", "speed", "help", "library", "given", "thanked", "health",
    "reach", "network",
)  # fmt: skip
"""Rows that a small terminal does without, in this order; the others stay as long as anything does."""
FRAME_LINES = 2
"""The border above and below."""
LEAST_STORY = 3
"""Lines of the log that stay as long as a row can go."""
ROOM_AROUND = 4
"""Columns that the frame and its padding take."""
LABEL_ROOM = len("trained on") + 2
"""Columns of the longest label, and of the gap behind it."""
MOST_NAMED = 4
"""Tasks and versions of others that are named."""
LONGEST_BAR = 40
BESIDE_BAR = 30
"""Columns that the numbers on both sides of the bar take."""


@dataclass(frozen=True, slots=True)
class NodePanel:
    """The whole panel for one moment, or what matters most of it within `height` lines. It looks at the width
    only when it is drawn: a terminal may change its size at any time."""

    status: NodeStatus
    rewards: Sequence[float]
    lines: Sequence[str]
    """Lines of the log, the newest last."""
    now: float
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - ROOM_AROUND - LABEL_ROOM, 1)
        status = printable_status(self.status)
        rows = dict(_rows(status, self.rewards, self.now, width))
        lines_of = {label: _lines_taken(content, console, width) for label, content in rows.items()}
        shown_rows, count = rows_that_fit(lines_of, len(self.lines), self.height)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, most in shown_rows.items():
            # Names, reasons and details are text: what looks like markup in them is not ours.
            content = Text(content) if isinstance(content := rows[label], str) else content
            if isinstance(content, Text) and most < lines_of[label]:
                content = Text("\n").join(content.wrap(console, width)[:most])
            grid.add_row(label, content)
        title = Text.assemble((status.name, "bold"), f"  {status.peer_id[:6]}..{status.peer_id[-6:]}")
        told = self.lines[len(self.lines) - count :]
        story = [Text(printable(line), style="dim", overflow="ellipsis", no_wrap=True) for line in told]
        yield Panel(
            Group(grid, *([Text(), *story] if story else [])),
            title=title,
            subtitle=Text(status.page) if status.page else None,
            border_style=_colour(status),
        )


def rows_that_fit(
    lines_of: Mapping[str, int], story: int, height: int | None
) -> tuple[Mapping[str, int], int]:
    """Returns the rows that fit into `height` lines (None: no bound), in their order, with the lines that
    each may take, and how many lines of the log fit below them. `lines_of`: the lines of each row; `story`:
    those of the log. Advice goes before the log, and who is shown it within a height has the command for
    another machine above it.

    >>> rows_that_fit({"doing": 1, "dropped": 3, "join us": 2}, story=6, height=10)
    ({'doing': 1, 'dropped': 3}, 3)
    >>> rows_that_fit({"doing": 1, "advice": 30}, story=6, height=10)
    ({'doing': 1, 'advice': 7}, 0)
    """
    if height is None:
        return lines_of, story
    rows = {row: lines for row, lines in lines_of.items() if row != "join us"}
    least = 0 if "advice" in rows or not story else 1 + min(story, LEAST_STORY)
    for row in FIRST_TO_GO:
        if FRAME_LINES + sum(rows.values()) + least <= height:
            break
        rows.pop(row, None)
    for row in sorted(rows, key=rows.__getitem__, reverse=True):
        over = FRAME_LINES + sum(rows.values()) - height
        rows[row] -= max(0, min(over, rows[row] - 1))
    # An empty line stands between the rows and the log.
    room = height - FRAME_LINES - sum(rows.values()) - 1
    return rows, max(0, min(story, room))


def _policy(status: NodeStatus) -> str:
    run = f", run {status.run}" if status.run else ""
    return f"{status.model}{run}, version {status.progress.policy_version}, swarm {swarm_of(status)}"


def _lines_taken(content: RenderableType, console: Console, width: int) -> int:
    if isinstance(content, ProgressBar | Table):
        return 1
    text = Text(content) if isinstance(content, str) else content
    return max(len(text.wrap(console, width)), 1) if isinstance(text, Text) else 1


def _rows(
    status: NodeStatus, rewards: Sequence[float], now: float, width: int
) -> list[tuple[str, RenderableType]]:
    """All rows in order, for `width` columns behind the labels."""
    if not status.learns:
        return _rows_of_seed(status, now)
    reward, training, sharing, speed = status.reward, status.training, status.exchange, status.speed
    return [
        ("doing", f"{status.phase.name} for {age(now - status.phase.since)}  {status.phase.detail}"),
        ("policy", _policy(status)),
        ("round", _progress(status, width)),
        ("reward", _reward(reward, rewards, width)),
        (
            "held out",
            f"{figure(reward.eval_first)} at first"
            + (f", {figure(reward.eval_last)} after {reward.eval_round} rounds" if reward.eval_round else ""),
        ),
        *([("advice", Text(status.advice, style="yellow"))] if status.advice else []),
        ("trained on", _trained_on(training)),
        *([("library", _library(status.library))] if status.library != LibraryStatus() else []),
        *([("help", _help(status.help))] if status.help.asked or status.help.heard else []),
        (
            "speed",
            f"{figure(speed.tokens_per_s, '.0f')} tokens/s, round {figure(speed.round_s, '.2f')} s "
            f"(generate {figure(speed.generate_s, '.2f')}, train {figure(speed.train_s, '.2f')})",
        ),
        ("rollouts", _generation(status)),
        *([("pipeline", _pipeline(status.pipeline))] if status.pipeline.name else []),
        ("network", _network(status, now)),
        *([("reach", _reach(status))] if status.network.reach != Reach() else []),
        *([("health", _health(status.health))] if status.health.nodes else []),
        (
            "exchange",
            f"announced {_announced(status)}, served {sharing.served}, heard {sharing.headers}, "
            f"fetched {sharing.fetched}, accepted {sharing.accepted}, waiting {sharing.buffered}",
        ),
        *([("given", status.week.in_words())] if status.week.hours is not None else []),
        *([("thanked", _thanked(status.receipts))] if status.receipts.nodes else []),
        ("dropped", in_words(sharing.dropped)),
        *([("no groups", Text(sharing.starved, style="yellow"))] if sharing.starved else []),
        ("kept back", in_words(sharing.unpublished)),
        ("saved", _saved(status, now)),
        ("join us", _invitation(status)),
    ]


def _rows_of_seed(status: NodeStatus, now: float) -> list[tuple[str, RenderableType]]:
    """Rows of a member that only connects others: it has no policy, no rounds and no rewards."""
    heard = status.exchange
    return [
        ("doing", f"{status.phase.name} for {age(now - status.phase.since)}  {status.phase.detail}"),
        ("swarm", swarm_of(status)),
        ("network", _network(status, now)),
        *([("reach", _reach(status))] if status.network.reach != Reach() else []),
        *([("health", _health(status.health))] if status.health.nodes else []),
        ("passed on", f"{heard.headers:,} headers; {_handed_on(heard)}"),
        *([("relay", status.network.relay)] if status.network.relay else []),
        ("join us", _invitation(status)),
    ]


def _handed_on(sharing: Sharing) -> str:
    refused = sharing.dropped.get(Reason.UPLOAD_LIMITED, 0)
    most = f"at most {figure(sharing.upload_mb_per_s, 'g')} MB/s"
    late = f"; {refused:,} refused for it" if refused else ""
    return f"{sharing.served:,} groups, {sharing.bytes_out / 1e6:,.1f} MB ({most}{late})"


def _reward(reward: Rewards, rewards: Sequence[float], width: int) -> str:
    numbers = f"own {figure(reward.own)}  external {figure(reward.external)}  "
    return numbers + sparkline(rewards[-max(width - len(numbers), 1) :])


def _announced(status: NodeStatus) -> str:
    count = status.exchange.published
    return f"{count} (to nobody: no peer is connected)" if count and not status.network.peers else str(count)


def _library(library: LibraryStatus) -> str:
    kept = f"{library.kept} groups kept for others"
    if not library.answers:
        return kept
    now = f"catching up, round {library.rounds + 1}" if library.catching_up else "learnt"
    worth = "" if library.rounds_worth is None else f", worth {library.rounds_worth:.0f} rounds of our own"
    return f"{now}: {library.answers} right answers from {library.lenders} peers{worth}; {kept}"


def _help(stats: HelpStats) -> str:
    others = f"{stats.answered} groups announced again and {stats.tried} examples tried for them"
    return f"asked others {stats.asked} times, was asked {stats.heard} times: {others}"


def _health(health: HealthStats) -> str:
    tried = health.reached + health.out_of_reach
    reach = f", {health.reached} of {tried} reachable" if tried else ""
    return (
        f"{health.nodes} other nodes heard{reach}, {figure(health.headers_per_s, '.1f')} headers/s"
        + _nodes_of("; on", health.tasks, health.different_tasks)
        + _nodes_of("; of version", health.versions, health.different_versions)
    )


def _nodes_of(what: str, names: Sequence[NodesOf], different: int) -> str:
    """Names of strangers, but few of them: they may be many and long."""
    told = ", ".join(f"{one.name} ({one.nodes})" for one in names[:MOST_NAMED])
    more = f" and {different - MOST_NAMED} more" if different > MOST_NAMED else ""
    return f"{what} {told}{more}" if told else ""


def _thanked(receipts: ReceiptStats) -> str:
    nodes = "1 node" if receipts.nodes == 1 else f"{receipts.nodes} nodes"
    times = "once" if receipts.groups == 1 else f"{receipts.groups:,} times"
    return f"{nodes} learnt from our groups, {times} in all"


def _progress(status: NodeStatus, width: int) -> RenderableType:
    progress = status.progress
    if progress.rounds_limit is None:
        return f"{progress.round} (until stopped), {progress.tokens:,} tokens"
    row = Table.grid(padding=(0, 1))
    bar_width = max(min(LONGEST_BAR, width - BESIDE_BAR), 1)
    bar = ProgressBar(total=max(progress.rounds_limit, 1), completed=progress.round, width=bar_width)
    row.add_row(f"{progress.round}/{progress.rounds_limit}", bar, f"{progress.tokens:,} tokens")
    return row


def _trained_on(training: TrainReport) -> str:
    """Groups, or with a book the groups of our own and what was replayed."""
    if training.book:
        return (
            f"{training.own_groups} own groups, {training.replayed} of {training.book} answers in the book"
            f" ({training.book_foreign} from others{_mended(training)}){_teachers(training)}"
        )
    return (
        f"{training.own_groups} own + {training.external_groups} external groups; "
        f"{training.zero_advantage_own} own groups had equal rewards{_teachers(training)}"
    )


def _teachers(training: TrainReport) -> str:
    """Nothing where nobody was ever heard, or everybody may teach."""
    if not (training.teaching or training.waiting):
        return ""
    authors = "1 author teaches" if training.teaching == 1 else f"{training.teaching} authors teach"
    waiting = "waits" if training.waiting == 1 else "wait"
    return f"; {authors}, {training.waiting} {waiting}"


def _mended(training: TrainReport) -> str:
    if not (training.mended or training.refused):
        return ""
    return f"; this round {training.mended} mended, {training.refused} refused"


def _pipeline(pipeline: PipelineStatus) -> str:
    if pipeline.stage is None or pipeline.end_layer is None:
        return f"{pipeline.name}, {pipeline.members} members, no stage assigned yet"
    # Only members that start micro-batches know when the others are done.
    took = ", " if pipeline.iteration_s is None else f" took {pipeline.iteration_s:.2f} s, "
    return (
        f"{pipeline.name}: stage {pipeline.stage} of {figure(pipeline.stages, 'd')}"
        f" (layers {pipeline.first_layer} to {pipeline.end_layer - 1}), {pipeline.members} members;"
        f" iteration {pipeline.iteration}{took}planned {figure(pipeline.planned_s, '.2f')} s;"
        f" {pipeline.repaired} paths repaired, {pipeline.lost} members lost"
    )


def _generation(status: NodeStatus) -> str:
    generation, training = status.generation, status.training
    if not generation.engine:
        return "-"
    off_policy, oldest = figure(training.off_policy_share, ".0%"), figure(training.max_age, "d")
    return (
        f"{generation.engine}, {generation.mode}; {generation.groups_in_flight} in flight;"
        f" off-policy {off_policy}, oldest {oldest} versions"
    )


def _network(status: NodeStatus, now: float) -> str:
    network = status.network
    restarts = f", restarted {network.restarts} times" if network.restarts else ""
    replaced = (
        f", replaced {network.memory_restarts} times for its memory use" if network.memory_restarts else ""
    )
    story = f": {network.detail}" if network.detail else ""
    since = f" for {age(now - network.since)}" if network.since else ""
    return f"{network.peers} peers, {network.state}{since}{restarts}{replaced}{story}"


def _reach(status: NodeStatus) -> Text:
    reach = status.network.reach
    return Text(reach.as_line(), style="yellow" if reach.verdict == "nobody" else "")


def _saved(status: NodeStatus, now: float) -> RenderableType:
    saved = status.checkpoint
    if saved.error:
        return Text(saved.error, style="red")
    if saved.round is None or saved.at is None:
        return "nothing yet"
    return f"round {saved.round}, {age(now - saved.at)} ago"


def _invitation(status: NodeStatus) -> Text:
    """The command for another machine. It folds rather than being cut: people copy it."""
    command, who = invitation(status), joins_from(status).removeprefix("another machine ")
    nearer = "" if command is None or who == "another machine" else f"{who}: "
    return Text(f"{nearer}{command or '-'}", overflow="fold")


def _colour(status: NodeStatus) -> str:
    return "red" if status.checkpoint.error else "yellow" if status.network.state == "restarting" else "green"
